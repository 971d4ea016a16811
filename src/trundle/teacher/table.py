"""A parquet table of texts and their vectors as a teacher.

Columns: `text`; `vector` or `embedding`, a list of numbers; and optionally `kind` (query, document,
definition or null).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trundle.data.files import BUFFER_BYTES
from trundle.data.texts import KINDS, Text, checked_text
from trundle.embedder import Vectors
from trundle.errors import BadInput
from trundle.progress import SILENT, Advance, Progress
from trundle.teacher.labelling import _LabelItem, _store, _VectorSource
from trundle.teacher.shards import SHARD_SIZE, Manifest, _content_digest
from trundle.teacher.targets import Targets

_VECTOR_COLUMNS = ("vector", "embedding")
_BATCH_ROWS = 1024


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
        return _store(self.items(), _VectorSource(_known), wanted, folder, total=self.rows, progress=progress)

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
