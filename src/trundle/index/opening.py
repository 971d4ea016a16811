"""A folder or an address as a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import trundle.index as room
from trundle.artifact import whole_folder
from trundle.errors import BadInput
from trundle.index.contract import Readable, Store, Wanted
from trundle.index.embedded import MARK, EmbeddedStore, create_embedded
from trundle.progress import SILENT, Progress

ADDRESSES = ("postgres://", "postgresql://")
TABLE = "trundle"


def is_address(where: str) -> bool:
    """Whether this names a database, not a folder."""
    return where.startswith(ADDRESSES)


@contextmanager
def create_store(
    where: str, wanted: Wanted, *, table: str = TABLE, force: bool = False, progress: Progress = SILENT
) -> Iterator[Store]:
    """A store to add to, made where it is not there yet. With `force` a new one takes its place when it is whole."""
    if is_address(where):
        store: Store = room.PostgresStore.create(where, table, wanted, force=force, progress=progress)
        try:
            yield store
        finally:
            store.close()
        return
    folder = Path(where).expanduser()
    if force and (folder / MARK).is_file():
        with whole_folder(folder, replace=True, marks=(MARK,)) as scratch:
            create_embedded(scratch, wanted)
            yield from _closing(EmbeddedStore(scratch, progress=progress))
        return
    create_embedded(folder, wanted)
    yield from _closing(EmbeddedStore(folder, progress=progress))


def _closing(store: EmbeddedStore) -> Iterator[Store]:
    try:
        yield store
    finally:
        store.close()


def open_store(where: str, *, table: str = TABLE, progress: Progress = SILENT) -> Store:
    """A store of ours to search."""
    if is_address(where):
        return room.PostgresStore.open(where, table, progress=progress)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise BadInput(f"there is no index {where!r}; build one with trundle index build")
    return EmbeddedStore(folder, progress=progress)


def open_readable(
    where: str,
    *,
    table: str | None = None,
    text_column: str | None = None,
    vector_column: str | None = None,
    progress: Progress = SILENT,
) -> Readable:
    """Any store to look at: a folder of ours, or whatever table of a database holds texts and vectors."""
    if is_address(where):
        return room.open_table(
            where, table=table, text_column=text_column, vector_column=vector_column, progress=progress
        )
    if table or text_column or vector_column:
        raise BadInput("tables and columns are for databases; leave them out for a folder")
    return open_store(where, progress=progress)
