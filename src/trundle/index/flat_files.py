"""Read texts and vectors from parquet and Arrow files, and from npz with a file of texts beside it."""

from __future__ import annotations

import json
import shutil
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

from trundle.cache import cache_key
from trundle.data.texts import BUFFER_BYTES
from trundle.embedder import Vectors
from trundle.errors import BadInput, OtherTexts
from trundle.folders import atomic_file, locked_folder, write_atomic
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
    _RowBatch,
    _RowCounts,
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
    ids = places if columns.id is None else batch.column(columns.id)
    return _RawRows(ids, batch.column(columns.text).to_pylist(), _arrow_vectors(batch.column(columns.vector)))


def _arrow_vectors(column: Any) -> Any:
    numbers = column.flatten()
    if pa.types.is_fixed_size_list(column.type) and not column.null_count + numbers.null_count:
        return _numbers(numbers).reshape(len(column), -1)
    widths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
    if len(widths) and widths[0] > 0 and (widths == widths[0]).all() and not numbers.null_count:
        return _numbers(numbers).reshape(len(widths), -1)
    return [None if one is None else np.array(one, dtype=np.float32) for one in column.to_pylist()]


def _numbers(column: Any) -> Vectors:
    with np.errstate(over="ignore"):
        numbers: Vectors = column.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return numbers


class _TableReader(IndexReader):
    """Reads one or more parquet or Arrow files with the same columns."""

    def __init__(self, where: str, wish: _Wish, files: Sequence[Path], kind: str) -> None:
        self._files, self._kind = files, kind
        with _explained(where):
            data = _dataset(files, kind)
            self._columns = _arrow_columns(data.schema, wish, where)
            count = data.count_rows()
            width = self._columns.width or self._first_width()
            said = (data.schema.metadata or {}).get(_METRIC, b"").decode()
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
        return _record_batches(self._files, self._kind, names)

    def _scan(self, first: int) -> Iterator[_RawRows]:
        place = 0
        for batch in self._batches(self._columns.names):
            skipped = min(max(0, first - place), len(batch))
            if skipped < len(batch):
                yield _arrow_raw(batch.slice(skipped), self._columns, place + skipped)
            place += len(batch)

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
    """Write the rows of an index to a parquet file, and return their number.

    They are collected in a hidden folder beside it, a few thousand at a time. An interrupted copy of all rows
    resumes there, unless the index has changed.
    """
    parts = _Parts(reader=reader, folder=path.with_name(f".{path.name}.rows"))
    with locked_folder(parts.folder, lambda: progress.say(f"another process writes {path}; this one waits")):
        whole = sample is None or sample >= reader.count
        try:
            parts.read(None if whole else sample, seed, progress)
        except OtherTexts:
            progress.say(f"{reader.where} has changed since a part of it was read, so it is read again")
            parts.clear()
            parts.read(None, seed, progress)
        with atomic_file(path) as scratch, parts.writer(scratch) as writer:
            for file in parts.files():
                writer.write_table(pq.read_table(file), row_group_size=_GROUP_ROWS)
        shutil.rmtree(parts.folder, ignore_errors=True)
    return reader.counts.read - reader.counts.left_out


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Rows of an index in parquet files, and a file that says how many of them are complete."""

    reader: IndexReader
    folder: Path

    @property
    def _state(self) -> Path:
        return self.folder / "state.json"

    @property
    def _identity(self) -> str:
        reader = self.reader
        return cache_key(reader.where, reader.count, reader.width, reader.metric)

    def files(self) -> list[Path]:
        """Return the complete files, in order."""
        return [self.folder / f"{number}.parquet" for number in range(self._known().get("parts", 0))]

    def clear(self) -> None:
        """Forget what was read."""
        self._state.unlink(missing_ok=True)

    def read(self, sample: int | None, seed: int, progress: Progress) -> None:
        """Read the rows that are missing; those of a sample are read anew."""
        reader, total = self.reader, self.reader.count if sample is None else sample
        if sample is not None or self._known().get("index") != self._identity:
            self.clear()
        counts = _RowCounts(**self._known().get("counts", {}))
        number, waiting = len(self.files()), list[_RowBatch]()
        for file in self.files():
            for batch in pq.ParquetFile(file).iter_batches(columns=["vector"]):
                counts._note(_arrow_vectors(batch.column("vector")))
        if counts.read:
            progress.say(f"{counts.read:,} rows of {reader.where} were read before; reading goes on there")
        with progress.task(f"reading {reader.where}", total) as advance:
            advance(counts.read)
            for batch in reader.rows(sample, seed, after=counts):
                waiting.append(batch)
                advance(len(batch.texts))
                if sum(len(each.texts) for each in waiting) >= _GROUP_ROWS:
                    self._add(number, waiting)
                    number, waiting = number + 1, []
            if waiting:
                self._add(number, waiting)

    def writer(self, file: Path) -> Any:
        """Open a parquet file for rows of this index."""
        packed = {"id": "zstd", "text": "zstd", "vector": "none"}
        return pq.ParquetWriter(file, self._schema, compression=packed, use_dictionary=False)

    @property
    def _schema(self) -> Any:
        vector = pa.list_(pa.float32(), self.reader.width)
        columns = [("id", pa.string()), ("text", pa.string()), ("vector", vector)]
        return pa.schema(columns, {_METRIC: self.reader.metric.encode()})

    def _known(self) -> dict[str, Any]:
        known: dict[str, Any] = {}
        if self._state.is_file():
            known = json.loads(self._state.read_text(encoding="utf-8"))
        return known

    def _add(self, number: int, batches: Sequence[_RowBatch]) -> None:
        """Write a file, then record it and what has been counted until its end."""
        schema = self._schema
        with atomic_file(self.folder / f"{number}.parquet") as scratch, self.writer(scratch) as writer:
            for each in batches:
                vectors = pa.FixedSizeListArray.from_arrays(each.vectors.ravel(), type=schema[2].type)
                columns = [pa.array(each.ids), pa.array(each.texts), vectors]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        counts = self.reader.counts.as_json()
        state = {"index": self._identity, "parts": number + 1, "counts": counts}
        write_atomic(self._state, json.dumps(state))


class _BesideReader(IndexReader):
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

    def _scan(self, first: int) -> Iterator[_RawRows]:
        yield from self._take(np.arange(first, self.count))

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        first = 0
        for page in _text_pages(self._source, self._text):
            low, high = np.searchsorted(places, [first, first + len(page)])
            if high > low:
                chosen = places[low:high]
                texts = page if len(chosen) == len(page) else [page[place] for place in chosen - first]
                yield _RawRows(chosen, texts, self._vectors(chosen))
            first += len(page)
        if first != self.count:
            what = f"{self.where} holds {self.count:,} vectors and {self._source} {first:,} texts"
            raise BadInput(f"{what}; name the file of its texts with --table")


def _text_names(path: Path) -> list[str]:
    """Return the columns of texts in a table."""
    if path.suffix in _JSON_LINES:
        with path.open(encoding="utf-8") as lines:
            return _fields(_json_row(line) for line in islice(lines, 20) if line.strip())
    schema = _dataset([path], "parquet" if path.suffix == ".parquet" else "ipc").schema
    return [name for name in schema.names if _holds_texts(schema.field(name).type)]


def _text_pages(path: Path, column: str) -> Iterator[list[Any]]:
    """Yield a column of texts, a page at a time."""
    if path.suffix in _JSON_LINES:
        with path.open(encoding="utf-8") as lines:
            rows = (line for line in lines if line.strip())
            while page := [_field(_json_row(line), column) for line in islice(rows, _BATCH_ROWS)]:
                yield page
        return
    kind = "parquet" if path.suffix == ".parquet" else "ipc"
    yield from (batch.column(0).to_pylist() for batch in _record_batches([path], kind, [column]))


def _dataset(files: Sequence[Path], kind: str) -> Any:
    return ds.dataset([str(file) for file in files], format=kind)


def _record_batches(files: Sequence[Path], kind: str, names: list[str]) -> Iterator[Any]:
    """Yield some columns, without reading whole row groups, or those to come, into memory."""
    if kind == "parquet":
        for file in files:
            with pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as rows:
                yield from rows.iter_batches(_BATCH_ROWS, columns=names)
        return
    scanner = _dataset(files, kind).scanner(
        columns=names, batch_size=_BATCH_ROWS, batch_readahead=2, fragment_readahead=1
    )
    yield from (batch for batch in scanner.to_batches() if len(batch))


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
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError:  # its message is a line of C++
        what = f"{path} can't be read, because it is damaged or not a FAISS index of floats"
        raise BadInput(f"{what}; write it again with faiss.write_index") from None
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
