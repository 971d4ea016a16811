"""Parquet files, here or in object storage, cut into pieces that any worker of a cluster can read alone.

A piece is a run of row groups of one file. Read one after the other, all pieces give the texts that `read_texts` gives
for the same files. Storage is named by its URI, as in `s3://bucket/folder` or `gs://bucket/file.parquet::text=body`.

What this is not: it reads parquet alone, the only format of which a part can be read without what comes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs
from pydantic import BaseModel, ConfigDict

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

_PIECE_ROWS = 1 << 17
"""A piece ends with the row group that reaches this many rows."""
_FOOTERS_AT_ONCE = 16
_ENDING = ".parquet"


class _Piece(BaseModel):
    """Some row groups of a file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    storage: str
    """The URI that leads to the file's storage, or nothing for this machine's own."""
    path: str
    groups: tuple[int, ...]
    before: int
    """Rows of the file that come before."""
    rows: int
    columns: dict[str, str]


def _is_remote(source: str) -> bool:
    """Whether a source is in some storage rather than a path."""
    return "://" in source


def _list_pieces(sources: Sequence[str]) -> list[_Piece]:
    """All pieces in order; what can't be found or is not parquet is refused, and so is a table without texts."""
    pieces: list[_Piece] = []
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        for files in map(_files, sources):
            found = list(chain.from_iterable(pool.map(lambda file: _pieces(*file), files)))
            next(_read_piece(found[0]), None)
            pieces += found
    return pieces


def _read_pieces_in_order(pieces: Iterable[_Piece]) -> Iterator[Text]:
    """All texts, file by file; a file that has none to learn from is refused."""
    for _, of_file in groupby(pieces, key=attrgetter("storage", "path")):
        listed = list(of_file)
        found = 0
        for text in chain.from_iterable(map(_read_piece, listed)):
            found += 1
            yield text
        if not found:
            raise _nothing_in(listed[0])


def _read_piece(piece: _Piece) -> Iterator[Text]:
    """The texts of one piece."""
    try:
        opened = _storage(piece.storage).open_input_file(piece.path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(piece.path, error) from error
    with opened:
        needed = needed_columns(piece.columns, may_hold_texts)
        rows = parquet_rows(opened, piece.path, needed, groups=list(piece.groups), before=piece.before)
        usable = (training_row(row, piece.columns) for row in rows)
        yield from texts_of(row for row in usable if row is not None)


def _nothing_in(piece: _Piece) -> BadInput:
    """What is said of a file without a text to learn from."""
    return no_training_rows(piece.path)


def _files(source: str) -> list[tuple[str, str, dict[str, str]]]:
    """The parquet files of a source: storage, path there, columns."""
    if not _is_remote(source):
        local = parse_source(source)
        for file in local.files:
            if file.suffix.lower() != _ENDING:
                raise BadInput(f"{file} is not parquet, which is what a cluster reads; convert it first")
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
        raise BadInput(f"{_without_secrets(uri)} holds no parquet files; give one, or a folder of them")
    return [(uri, one, columns) for one in sorted(paths, key=lambda one: one.split("/"))]


def _pieces(storage: str, path: str, columns: dict[str, str]) -> list[_Piece]:
    try:
        with _storage(storage).open_input_file(path) as opened:
            metadata = pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    if not metadata.num_rows:
        raise no_rows(path)
    found: list[_Piece] = []
    groups: list[int] = []
    before = rows = 0
    for number in range(metadata.num_row_groups):
        groups.append(number)
        rows += metadata.row_group(number).num_rows
        if rows >= _PIECE_ROWS or number + 1 == metadata.num_row_groups:
            found.append(
                _Piece(
                    storage=storage,
                    path=path,
                    groups=tuple(groups),
                    before=before,
                    rows=rows,
                    columns=columns,
                )
            )
            groups, before, rows = [], before + rows, 0
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
    """A URI as it may be shown: keys can stand in it, before the host or after a question mark."""
    scheme, separator, rest = place.partition("://")
    return f"{scheme}{separator}{rest.partition('?')[0].rpartition('@')[2]}" if separator else place
