"""A folder or an address as a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from trundle.embedder import Encode
from trundle.errors import BadInput
from trundle.folders import whole_folder
from trundle.index.contract import Wanted, _Readable, _Store
from trundle.index.embedded import _MARK, _create_embedded, _EmbeddedStore
from trundle.index.foreign import _open_table
from trundle.index.postgres import _PostgresStore
from trundle.progress import SILENT, Progress

_ADDRESSES = ("postgres://", "postgresql://")
_TABLE = "trundle"


def _is_address(where: str) -> bool:
    """Whether this names a database, not a folder."""
    return where.startswith(_ADDRESSES)


@contextmanager
def create_store(
    where: str, wanted: Wanted, *, table: str = _TABLE, force: bool = False, progress: Progress = SILENT
) -> Iterator[_Store]:
    """A store to add to, made where it is not there yet. With `force` a new one takes its place when it is whole."""
    if _is_address(where):
        store: _Store = _PostgresStore.create(where, table, wanted, force=force, progress=progress)
        try:
            yield store
        finally:
            store.close()
        return
    folder = Path(where).expanduser()
    if force and (folder / _MARK).is_file():
        with whole_folder(folder, replace=True, marks=(_MARK,)) as scratch:
            _create_embedded(scratch, wanted)
            yield from _closing(_EmbeddedStore(scratch, progress=progress))
        return
    _create_embedded(folder, wanted)
    yield from _closing(_EmbeddedStore(folder, progress=progress))


def _closing(store: _EmbeddedStore) -> Iterator[_Store]:
    try:
        yield store
    finally:
        store.close()


def open_store(where: str, *, table: str = _TABLE, progress: Progress = SILENT) -> _Store:
    """A store of ours to search."""
    if _is_address(where):
        return _PostgresStore.open(where, table, progress=progress)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise BadInput(f"there is no index {where!r}; build one with trundle index build")
    return _EmbeddedStore(folder, progress=progress)


def open_readable(
    where: str,
    *,
    table: str | None = None,
    text_column: str | None = None,
    vector_column: str | None = None,
    progress: Progress = SILENT,
) -> _Readable:
    """Any store to look at: a folder of ours, or whatever table of a database holds texts and vectors."""
    if _is_address(where):
        return _open_table(
            where, table=table, text_column=text_column, vector_column=vector_column, progress=progress
        )
    if table or text_column or vector_column:
        raise BadInput("tables and columns are for databases; leave them out for a folder")
    return open_store(where, progress=progress)


_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class _Built:
    """What came of a build."""

    total: int
    added: int


def build_index(
    store: _Store,
    texts: Iterable[str],
    encode: Encode,
    *,
    progress: Progress = SILENT,
    at_once: int = _AT_ONCE,
) -> _Built:
    """Embed the texts that are missing and store them, a part at a time; each part is kept for good."""
    added = 0
    source = iter(texts)
    with progress.task("embedding and storing", None) as advance:
        while part := list(islice(source, at_once)):
            added += _add(store, part, encode)
            advance(len(part))
    store.finish()
    return _Built(total=store.count(), added=added)


def _add(store: _Store, texts: Sequence[str], encode: Encode) -> int:
    new = store.missing(texts)
    if new:
        store.add(new, encode(new))
    return len(new)
