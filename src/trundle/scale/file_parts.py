"""Parquet files, local or in object storage, divided into parts that workers read independently.

A part is some consecutive row groups of one file. All parts in order give the texts that `read_texts` gives
for the same files. Object storage is named by its URI: `s3://bucket/folder`,
`gs://bucket/file.parquet::text=body`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pydantic import BaseModel

from trundle.data.files import (
    needed_columns,
    no_rows,
    no_training_rows,
    parquet_rows,
    parse_columns,
    parse_source,
    training_row,
)
from trundle.data.texts import Text, may_hold_texts, texts_of
from trundle.errors import BadInput

_PART_ROWS = 1 << 17
"""A part ends with the row group that reaches this many rows."""
_METADATA_THREADS = 16
_ENDING = ".parquet"


class _FilePart(BaseModel, frozen=True, extra="forbid"):
    """Some row groups of a file."""

    storage: str
    """The URI of the file's storage, or an empty string for the local file system."""
    path: str
    groups: tuple[int, ...]
    before: int
    """The number of rows of the file before this part."""
    rows: int
    columns: dict[str, str]


def _is_remote(source: str) -> bool:
    return "://" in source


def _list_parts(sources: Sequence[str]) -> list[_FilePart]:
    """Return all parts in order; a source that is missing, not parquet or without texts is an error."""
    parts: list[_FilePart] = []
    with ThreadPoolExecutor(_METADATA_THREADS) as pool:
        for files in map(_files, sources):
            found = list(chain.from_iterable(pool.map(lambda file: _parts_of(*file), files)))
            next(_read_part(found[0]), None)  # checks the columns
            parts += found
    return parts


def _read_parts(parts: Iterable[_FilePart]) -> Iterator[Text]:
    """Yield all texts in order; a file without training texts is an error."""
    for (_, path), of_file in groupby(parts, key=attrgetter("storage", "path")):
        found = 0
        for text in chain.from_iterable(map(_read_part, of_file)):
            found += 1
            yield text
        if not found:
            raise no_training_rows(path)


def _read_part(part: _FilePart) -> Iterator[Text]:
    try:
        opened = _storage(part.storage).open_input_file(part.path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(part.path, error) from error
    with opened:
        needed = needed_columns(part.columns, may_hold_texts)
        rows = parquet_rows(opened, part.path, needed, groups=list(part.groups), before=part.before)
        usable = (training_row(row, part.columns) for row in rows)
        yield from texts_of(row for row in usable if row is not None)


def _files(source: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the parquet files of a source as storage, path and columns."""
    if not _is_remote(source):
        local = parse_source(source)
        for file in local.files:
            if file.suffix.lower() != _ENDING:
                raise BadInput(f"{file} is not parquet, the only format a cluster reads; convert it first")
        return [("", str(file.resolve()), dict(local.columns)) for file in local.files]
    uri, columns = parse_columns(source)
    storage, path = _resolved(uri)
    try:
        info = storage.get_file_info(path)
        found = [info]
        if info.type == fs.FileType.Directory:
            found = storage.get_file_info(fs.FileSelector(path, recursive=True))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(uri, error) from error
    paths = [one.path for one in found if one.type == fs.FileType.File and one.path.lower().endswith(_ENDING)]
    paths = [one for one in paths if not any(part.startswith(".") for part in one[len(path) :].split("/"))]
    if not paths:
        raise BadInput(f"{_without_secrets(uri)} holds no parquet files; pass one, or a folder of them")
    return [(uri, one, columns) for one in sorted(paths, key=lambda one: one.split("/"))]


def _parts_of(storage: str, path: str, columns: dict[str, str]) -> list[_FilePart]:
    try:
        with _storage(storage).open_input_file(path) as opened:
            metadata = pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    if not metadata.num_rows:
        raise no_rows(path)
    part = partial(_FilePart, storage=storage, path=path, columns=columns)
    found: list[_FilePart] = []
    first = before = rows = 0
    for number in range(metadata.num_row_groups):
        rows += metadata.row_group(number).num_rows
        if rows >= _PART_ROWS or number + 1 == metadata.num_row_groups:
            found.append(part(groups=tuple(range(first, number + 1)), before=before, rows=rows))
            first, before, rows = number + 1, before + rows, 0
    return found


@cache
def _storage(uri: str) -> Any:
    return _resolved(uri)[0] if uri else fs.LocalFileSystem()


def _resolved(uri: str) -> tuple[Any, str]:
    try:
        storage, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise _unreadable(uri, error) from error
    return storage, path


def _unreadable(place: str, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = _without_secrets(place)
    reason = reason.replace(place, where)
    return BadInput(f"{where} can't be read ({reason}); check the address and the right to read it")


def _without_secrets(place: str) -> str:
    """Return a URI without the keys that may be before the host or after a question mark."""
    scheme, separator, rest = place.partition("://")
    return f"{scheme}{separator}{rest.partition('?')[0].rpartition('@')[2]}" if separator else place
