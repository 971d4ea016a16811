"""Read texts and vectors from parquet and Arrow files, and from npz with a file of texts beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from trundle.data.texts import BUFFER_BYTES
from trundle.embedder import Vectors
from trundle.errors import BadInput
from trundle.folders import atomic_file
from trundle.index.rows import (
    _BATCH_ROWS,
    IndexReader,
    Metric,
    _explained,
    _field,
    _fields,
    _import,
    _Places,
    _RawRows,
    _RowReader,
    _Wish,
)
from trundle.progress import SILENT, Progress

_ID_NAMES = ("id", "_id", "pk", "uuid", "key", "chunk_id", "doc_id")
_METRIC = b"trundle.metric"
_GROUP_ROWS = 8192
_JSON_LINES = (".jsonl", ".ndjson")
_BESIDE = (".parquet", ".arrow", ".feather", *_JSON_LINES)
"""Files that may hold the texts of vectors that are stored without."""


@dataclass(frozen=True, kw_only=True)
class _ArrowColumns:
    """The columns of a table that hold ids, texts and vectors."""

    id: str | None
    text: str
    vector: str
    width: int | None
    """None if the column's type does not say."""

    @property
    def names(self) -> list[str]:
        """The columns to read."""
        return list(dict.fromkeys(name for name in (self.id, self.text, self.vector) if name))


def _arrow_columns(schema: Any, wish: _Wish, where: str) -> _ArrowColumns:
    """Choose the columns of a table by their types and names."""
    types, names = pa.types, list(schema.names)
    vectors = [name for name in names if _holds_vectors(schema.field(name).type)]
    if not vectors:
        raise BadInput(f"{where} has no column of lists of numbers; its columns are: {', '.join(names)}")
    vector = wish.vectors_of(vectors, "column of vectors", where)
    texts = [name for name in names if _holds_texts(schema.field(name).type)]
    key = next((name for name in _ID_NAMES if name in names), None)
    text = wish.texts_of([name for name in texts if name != key or name == wish.texts], where)
    kind = schema.field(vector).type
    width = kind.list_size if types.is_fixed_size_list(kind) else None
    return _ArrowColumns(id=key, text=text, vector=vector, width=width)


def _holds_texts(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _holds_vectors(kind: Any) -> bool:
    types = pa.types
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return False
    return bool(types.is_floating(kind.value_type) or types.is_integer(kind.value_type))


def _arrow_raw(batch: Any, columns: _ArrowColumns, first: int | _Places) -> _RawRows:
    """Return the rows of a batch, whose positions are their ids if no column holds any."""
    places = np.arange(first, first + len(batch)) if isinstance(first, int) else first
    ids = places.tolist() if columns.id is None else batch.column(columns.id).to_pylist()
    return _RawRows(ids, batch.column(columns.text).to_pylist(), _arrow_vectors(batch.column(columns.vector)))


def _arrow_vectors(column: Any) -> Any:
    widths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
    if len(widths) and widths[0] > 0 and (widths == widths[0]).all() and not column.flatten().null_count:
        with np.errstate(over="ignore"):
            numbers = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        return numbers.reshape(len(widths), -1)
    return [None if one is None else np.array(one, dtype=np.float32) for one in column.to_pylist()]


class _TableReader(_RowReader):
    """Reads one or more parquet or Arrow files with the same columns."""

    def __init__(self, where: str, wish: _Wish, files: Sequence[Path], kind: str) -> None:
        with _explained(where):
            self._data = _dataset(files, kind)
            self._columns = _arrow_columns(self._data.schema, wish, where)
            count = self._data.count_rows()
            width = self._columns.width or self._first_width()
            said = (self._data.schema.metadata or {}).get(_METRIC, b"").decode()
        metric: Metric = next((known for known in get_args(Metric) if known == said), "cosine")
        super().__init__(where, count=count, width=width, metric=metric)

    def _first_width(self) -> int:
        column = self._columns.vector
        for batch in self._batches([column]):
            widths = pc.fill_null(pc.list_value_length(batch.column(column)), 0).to_numpy()
            if widths.any():
                return int(widths[widths > 0][0])
        return 1

    def _batches(self, names: list[str]) -> Iterator[Any]:
        # Little is read ahead: the default holds dozens of batches and fragments in memory.
        scanner = self._data.scanner(
            columns=names, batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
        )
        yield from (batch for batch in scanner.to_batches() if len(batch))

    def _scan(self) -> Iterator[_RawRows]:
        first = 0
        for batch in self._batches(self._columns.names):
            yield _arrow_raw(batch, self._columns, first)
            first += len(batch)

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        first = 0
        for batch in self._batches(self._columns.names):
            low, high = np.searchsorted(places, [first, first + len(batch)])
            if high > low:
                chosen = places[low:high]
                yield _arrow_raw(batch.take(pa.array(chosen - first)), self._columns, chosen)
            first += len(batch)


def write_table(
    reader: IndexReader, path: Path, *, sample: int | None = None, seed: int = 0, progress: Progress = SILENT
) -> int:
    """Write the rows of an index to a parquet file, a few thousand at a time, and return their number."""
    vector = pa.list_(pa.float32(), reader.width)
    schema = pa.schema(
        [("id", pa.string()), ("text", pa.string()), ("vector", vector)], {_METRIC: reader.metric.encode()}
    )
    total = reader.count if sample is None else min(sample, reader.count)
    written, waiting = 0, list[Any]()
    packed = {"id": "zstd", "text": "zstd", "vector": "none"}

    def write() -> None:
        writer.write_table(pa.Table.from_batches(waiting, schema), row_group_size=_GROUP_ROWS)
        waiting.clear()

    with (
        atomic_file(path) as scratch,
        pq.ParquetWriter(scratch, schema, compression=packed, use_dictionary=False) as writer,
        progress.task(f"reading {reader.where}", total) as advance,
    ):
        for batch in reader.rows(sample, seed):
            vectors = pa.FixedSizeListArray.from_arrays(batch.vectors.ravel(), type=vector)
            waiting.append(
                pa.record_batch([pa.array(batch.ids), pa.array(batch.texts), vectors], schema=schema)
            )
            written += len(batch.ids)
            advance(len(batch.ids))
            if sum(map(len, waiting)) >= _GROUP_ROWS:
                write()
        write()
    return written


class _BesideReader(_RowReader):
    """Reads vectors by their positions, and the texts from another file in the same order."""

    def __init__(
        self,
        path: Path,
        wish: _Wish,
        vectors: Callable[[_Places], Vectors],
        *,
        shape: tuple[int, int],
        metric: Metric,
    ) -> None:
        """`vectors` returns those at some positions of the `shape[0]` stored ones."""
        where = str(path)
        self._vectors = vectors
        self._source = _texts_beside(path, wish.table)
        with _explained(str(self._source)):
            self._text = wish.texts_of(_text_names(self._source), str(self._source))
        super().__init__(where, count=shape[0], width=shape[1], metric=metric)

    def _scan(self) -> Iterator[_RawRows]:
        yield from self._take(np.arange(self.count))

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        first = 0
        for page in _text_pages(self._source, self._text):
            low, high = np.searchsorted(places, [first, first + len(page)])
            if high > low:
                chosen = places[low:high]
                ids = chosen.tolist()
                texts = page if len(ids) == len(page) else [page[place - first] for place in ids]
                yield _RawRows(ids, texts, self._vectors(chosen))
            first += len(page)
        if first != self.count:
            what = f"{self.where} holds {self.count:,} vectors and {self._source} {first:,} texts"
            raise BadInput(f"{what}; name the file of its texts with --table")


def _text_names(path: Path) -> list[str]:
    """Return the columns of texts in a table."""
    if path.suffix in _JSON_LINES:
        with path.open(encoding="utf-8") as lines:
            return _fields(_json_row(line) for line in islice(lines, 20) if line.strip())
    schema = _dataset([path]).schema
    return [name for name in schema.names if _holds_texts(schema.field(name).type)]


def _text_pages(path: Path, column: str) -> Iterator[list[Any]]:
    """Yield a column of texts, a page at a time."""
    if path.suffix in _JSON_LINES:
        with path.open(encoding="utf-8") as lines:
            rows = (line for line in lines if line.strip())
            while page := [_field(_json_row(line), column) for line in islice(rows, _BATCH_ROWS)]:
                yield page
        return
    scanner = _dataset([path]).scanner(
        columns=[column], batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
    )
    yield from (batch.column(0).to_pylist() for batch in scanner.to_batches())


def _dataset(files: Sequence[Path], kind: str | None = None) -> Any:
    """Open files of one format without reading whole row groups, and those to come, into memory."""
    if (kind or files[0].suffix.removeprefix(".")) != "parquet":
        return ds.dataset([str(file) for file in files], format="ipc")
    options = ds.ParquetFragmentScanOptions(
        use_buffered_stream=True, buffer_size=BUFFER_BYTES, pre_buffer=False
    )
    form = ds.ParquetFileFormat(default_fragment_scan_options=options)
    return ds.dataset([str(file) for file in files], format=form)


def _json_row(line: str) -> dict[str, Any]:
    value = json.loads(line)
    return value if isinstance(value, dict) else {"text": value}


def _texts_beside(path: Path, named: str | None) -> Path:
    """Return the file of texts that belongs to a file of vectors."""
    if named is not None:
        found = next((file for file in (path.parent / named, Path(named)) if file.is_file()), None)
        if found is None or found.suffix not in _BESIDE:
            raise BadInput(f"there is no file of texts {named!r}; name one that ends in {', '.join(_BESIDE)}")
        return found
    for suffix in _BESIDE:
        if (same := path.with_suffix(suffix)).is_file():
            return same
    others = [file for file in sorted(path.parent.iterdir()) if file.suffix in _BESIDE]
    if len(others) == 1:
        return others[0]
    there = ", ".join(file.name for file in others) or "none"
    raise BadInput(f"{path} holds no texts; name their file with --table, one row per vector (here: {there})")


def _open_arrays(path: Path, wish: _Wish) -> _BesideReader:
    """Open a npy or npz file of vectors."""
    with _explained(str(path)):
        stored = np.load(path, mmap_mode="r" if path.suffix == ".npy" else None, allow_pickle=False)
    if path.suffix == ".npz":
        names = [name for name in stored.files if stored[name].ndim == 2]
        stored = stored[wish.vectors_of(names, "2-D array", str(path))]
    if stored.ndim != 2:
        raise BadInput(f"{path} holds an array of {stored.ndim} dimensions; it must have rows of vectors")

    def take(places: _Places) -> Vectors:
        return np.asarray(stored[places], dtype=np.float32)

    return _BesideReader(path, wish, take, shape=stored.shape, metric="cosine")


def _open_faiss(path: Path, wish: _Wish) -> _BesideReader:
    """Open a FAISS index; quantised vectors come back as it decodes them."""
    faiss = _import("faiss", "a FAISS index", "faiss")
    with _explained(str(path)):
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    metrics: dict[int, Metric] = {faiss.METRIC_INNER_PRODUCT: "inner product", faiss.METRIC_L2: "l2"}
    if index.metric_type not in metrics:
        raise BadInput(f"{path} searches by another metric than inner product or L2; it can't be read")
    owners = [index]  # an index frees those inside it
    inner = faiss.downcast_index(index)
    if hasattr(inner, "id_map"):  # its vectors are asked for by position, not by id
        owners.append(inner)
        inner = faiss.downcast_index(inner.index)
    with suppress(RuntimeError):  # lists have no positions until they are mapped; other kinds have
        faiss.extract_index_ivf(inner).make_direct_map()

    def take(places: _Places, _owners: object = owners) -> Vectors:
        together = len(places) and places[-1] - places[0] + 1 == len(places)
        found: Vectors = (
            inner.reconstruct_n(int(places[0]), len(places)) if together else inner.reconstruct_batch(places)
        )
        return found

    return _BesideReader(path, wish, take, shape=(index.ntotal, index.d), metric=metrics[index.metric_type])
