"""Vectors that exist already as a teacher: a parquet table, a store of targets, or the rows of an index.

Columns of a table: `text`; `vector` or `embedding`, a list of numbers; and optionally `kind` (query,
document, definition or null). Rows of an index are read into a store and found by their text. A store answers
for its own texts. Whoever made it, a model or an endpoint, can answer for all others.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trundle.cache import cache_key
from trundle.data.sampling import key_bits
from trundle.data.texts import BUFFER_BYTES, KINDS, Text, checked_text
from trundle.embedder import Embedder, Encode, Role, Vectors
from trundle.errors import BadInput, OtherTexts
from trundle.progress import SILENT, Advance, Progress
from trundle.teacher.labelling import _LabelItem, _store, role_of
from trundle.teacher.shards import _UNIT_TOLERANCE, SHARD_SIZE, Manifest, _content_digest, read_manifest
from trundle.teacher.targets import Targets, find_targets

if TYPE_CHECKING:
    from trundle.index.rows import IndexReader

_VECTOR_COLUMNS = ("vector", "embedding")
_BATCH_ROWS = 1024
ROWS = 100_000
"""Rows that are read of an index unless told otherwise."""
_TEXTS_AT_ONCE = 8192
_PROBED_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class _TableTeacher:
    """A table of texts and vectors with valid columns."""

    path: Path
    rows: int
    columns: tuple[str, ...]
    teacher_id: str

    def targets(
        self, folder: str | Path, *, shard_size: int = SHARD_SIZE, progress: Progress = SILENT
    ) -> Targets:
        """Copy the table into a folder of targets."""
        wanted = Manifest(teacher=self.teacher_id, shard_size=shard_size)
        return _store(self.items(), _known, wanted, folder, total=self.rows, progress=progress)

    def items(self) -> Iterator[_LabelItem]:
        """Yield the rows; an invalid one is an error that names it."""
        width, first = 0, 1
        try:
            with pq.ParquetFile(self.path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
                batches = file.iter_batches(
                    batch_size=_BATCH_ROWS, columns=list(self.columns), use_threads=False
                )
                for batch in filter(len, batches):
                    vectors = _vectors(batch.column(self.columns[1]), f"{self.path} row", first, width)
                    width = vectors.shape[1]
                    yield from zip(_texts(batch, f"{self.path} row", first), vectors, strict=True)
                    first += len(vectors)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise BadInput(f"{self.path} is damaged ({reason}); create or download it again") from error


def _teacher_from_parquet(path: str | Path) -> _TableTeacher:
    file = Path(path)
    try:
        schema, rows = pq.read_schema(file), pq.read_metadata(file).num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{file} is not a parquet file that can be read ({reason}); check it") from error
    vector = next((name for name in _VECTOR_COLUMNS if name in schema.names), None)
    if "text" not in schema.names or vector is None:
        there = ", ".join(schema.names)
        raise BadInput(f"{file} has the columns {there}; it needs 'text' and 'vector' or 'embedding'")
    listed, is_a = schema.field(vector).type, pa.types
    is_list = is_a.is_list(listed) or is_a.is_large_list(listed) or is_a.is_fixed_size_list(listed)
    if not is_list or not (is_a.is_floating(listed.value_type) or is_a.is_integer(listed.value_type)):
        raise BadInput(f"{file} column {vector!r} holds {listed}; it must hold lists of numbers")
    columns = ("text", vector, "kind") if "kind" in schema.names else ("text", vector)
    return _TableTeacher(path=file, rows=rows, columns=columns, teacher_id=f"table {_content_digest(file)}")


def _known(items: Sequence[_LabelItem], advance: Advance) -> Vectors:
    advance(len(items))
    return np.stack([vector for _, vector in items if vector is not None])


def _texts(batch: Any, place: str, first: int) -> Iterator[Text]:
    texts = batch.column("text").to_pylist()
    kinds = batch.column("kind").to_pylist() if "kind" in batch.schema.names else [None] * len(texts)
    for row, (text, kind) in enumerate(zip(texts, kinds, strict=True), first):
        if kind is not None and kind not in KINDS:
            raise BadInput(f"{place} {row} has the kind {kind!r}; write one of {', '.join(KINDS)}, or null")
        yield Text(text=checked_text(text, "text", f"{place} {row}"), kind=kind)


def _vectors(column: Any, place: str, first: int, width: int) -> Vectors:
    widths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    width = width or int(widths[0])
    _reject(widths == 0, place, first, "has no vector; fill it in or delete the row")
    _reject(widths != width, place, first, f"has a vector of another width than {width} before it")
    with np.errstate(over="ignore"):
        numbers = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    vectors: Vectors = numbers.reshape(-1, width)
    finite = np.isfinite(vectors).all(axis=1)
    _reject(~finite, place, first, "has a vector with NaN or infinity; delete the row")
    _reject(~vectors.any(axis=1), place, first, "has a vector of zeros; delete the row")
    return vectors


def _reject(bad: Any, place: str, first: int, what: str) -> None:
    if bad.any():
        raise BadInput(f"{place} {first + int(bad.argmax())} {what}")


@dataclass(frozen=True, kw_only=True)
class IndexRows:
    """A sample of the rows of an index: documents with their vectors.

    Vectors that are compared by cosine get length 1. All others keep their length, which is part of what is
    learned.
    """

    reader: IndexReader
    most: int = ROWS
    seed: int = 0
    seconds: float = float("inf")
    """Reading stops after this time, with the rows read until then."""
    fresh: bool = False
    """Read the rows again, even if the store has them."""

    @cached_property
    def keeps_length(self) -> bool:
        """Whether the lengths of the vectors matter and differ from 1."""
        if self.reader.metric == "cosine":
            return False
        batch = next(self.reader.rows(min(_PROBED_ROWS, self.most), self.seed))
        return bool((abs(np.linalg.norm(batch.vectors, axis=1) - 1) > _UNIT_TOLERANCE).any())

    @property
    def teacher_id(self) -> str:
        """What distinguishes these rows from those of another index, or of this one after it has grown."""
        reader = self.reader
        return f"index {cache_key(reader.where, reader.count, reader.width, reader.metric)}"

    def targets(
        self, folder: str | Path, *, shard_size: int = SHARD_SIZE, progress: Progress = SILENT
    ) -> Targets:
        """Read the rows into a store and close the index; a complete store is not read again."""
        path = Path(folder)
        with closing(self.reader):
            if self.fresh:
                shutil.rmtree(path, ignore_errors=True)
            if (found := find_targets(path)) is not None:
                return found
            try:
                made = self._read(path, shard_size, progress)
            except OtherTexts:
                what = f"{self.reader.where} has changed since its rows were read"
                progress.say(f"{what}, so they are read again")
                shutil.rmtree(path, ignore_errors=True)
                made = self._read(path, shard_size, progress)
            if said := self.reader.counts.says():
                progress.say(said)
            return made

    def _read(self, path: Path, shard_size: int, progress: Progress) -> Targets:
        wanted = Manifest(
            teacher=f"{self.teacher_id} {self.most} {self.seed}",
            dtype="float32" if self.keeps_length else "float16",
            shard_size=shard_size,
        )
        total, stored = min(self.most, self.reader.count), read_manifest(path)
        items = self._items(at_least=0 if stored is None else stored.count)
        return _store(items, _known, wanted, path, total=total, progress=progress)

    def _items(self, *, at_least: int) -> Iterator[_LabelItem]:
        end, count = time.monotonic() + self.seconds, 0
        for batch in self.reader.rows(self.most, self.seed):
            vectors = batch.vectors
            if self.reader.metric == "cosine":
                vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
            for text, vector in zip(batch.texts, vectors, strict=True):
                yield Text(text=_readable(text), kind="document"), vector
            count += len(vectors)
            if time.monotonic() > end and count >= at_least:
                return


def _readable(text: str) -> str:
    """Replace unpaired surrogates, which no tokenizer accepts."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def stored_embedder(targets: Targets, name: str, *, maker: Embedder | None = None) -> Embedder:
    """Return an embedder that finds the vectors of a store by their texts.

    A text in another role than it is stored in gets its stored vector. Other texts are for `maker`, if there
    is one.
    """
    finder = _Finder(targets)

    def role(role: Role) -> Encode:
        ask = None if maker is None else {"text": maker.text, "query": maker.query}.get(role, maker.document)

        def encode(texts: Sequence[str]) -> Vectors:
            places = finder.places(texts, role)
            missing = np.flatnonzero(places < 0)
            if len(missing) and ask is None:
                text = texts[int(missing[0])]
                raise BadInput(
                    f"{name} has no vector of {text[:60]!r}; name the model that made it as the teacher"
                )
            vectors = np.empty((len(texts), targets.width), dtype=np.float32)
            known = np.flatnonzero(places >= 0)
            vectors[known] = targets.vectors(places[known])
            if len(missing) and ask is not None:
                vectors[missing] = ask([texts[place] for place in missing.tolist()])
            return vectors

        return encode

    return Embedder(
        name=name, text=role("text"), query=role("query"), document=role("document"), width=targets.width
    )


class _Finder:
    """The positions of a store's texts by the first 64 bits of their hashes: 16 bytes per text."""

    def __init__(self, targets: Targets) -> None:
        bits = np.empty(len(targets), dtype=np.uint64)
        for start in range(0, len(targets), _TEXTS_AT_ONCE):
            part = range(start, min(start + _TEXTS_AT_ONCE, len(targets)))
            bits[part.start : part.stop] = [key_bits(text) for text in targets.texts(part)]
        self._targets = targets
        self._order = np.argsort(bits, kind="stable")
        self._bits = bits[self._order]

    def places(self, texts: Sequence[str], role: Role) -> NDArray[np.int64]:
        """Return the position of each text, in its role if it has one there; −1 if it is not in the store."""
        wanted = np.array([key_bits(text) for text in texts], dtype=np.uint64)
        starts, ends = (np.searchsorted(self._bits, wanted, side=side) for side in ("left", "right"))
        found = np.full(len(texts), -1, dtype=np.int64)
        for row in np.flatnonzero(starts < ends).tolist():
            places = self._order[starts[row] : ends[row]]
            kinds = self._targets.kinds(places) if len(places) > 1 else [None]
            own = [place for place, kind in zip(places, kinds, strict=True) if role_of(kind) == role]
            found[row] = own[0] if own else places[0]
        return found
