"""Create, open and build indexes, each named by a folder or by the address of a database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from trundle.embedder import Encode, Vectors
from trundle.errors import BadInput, EmptyTexts
from trundle.folders import atomic_folder, check_free
from trundle.index.base import Wanted, _Store
from trundle.index.embedded import _MARK, _create_embedded, _EmbeddedStore
from trundle.index.postgres import _PostgresStore
from trundle.progress import SILENT, Progress

_TABLE = "trundle"
_BATCH = 512


def _is_address(where: str) -> bool:
    return where.startswith(("postgres://", "postgresql://"))


@contextmanager
def create_store(
    where: str,
    wanted: Wanted,
    *,
    table: str = _TABLE,
    force: bool = False,
    read: Sequence[str | Path] = (),
    progress: Progress = SILENT,
) -> Iterator[_Store]:
    """Yield an index to add to, created if needed; with `force`, a complete new one replaces it.

    A folder that holds something that is `read` is not replaced.
    """
    with ExitStack() as stack:
        if _is_address(where):
            store = _PostgresStore.create(where, table, wanted, force=force, progress=progress)
            yield stack.enter_context(closing(store))
            return
        folder = Path(where).expanduser()
        if force and (folder / _MARK).is_file():
            check_free(folder, replace=True, marks=(_MARK,), read=read)
            folder = stack.enter_context(atomic_folder(folder, replace=True, marks=(_MARK,), keep=True))
        _create_embedded(folder, wanted)
        yield stack.enter_context(closing(_EmbeddedStore(folder, progress=progress)))


def open_store(where: str, *, table: str = _TABLE, progress: Progress = SILENT) -> _Store:
    """Open an index that trundle built, to search it."""
    if _is_address(where):
        return _PostgresStore.open(where, table, progress=progress)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        raise BadInput(f"there is no index {where!r}; build one with trundle index build")
    return _EmbeddedStore(folder, read_only=True, progress=progress)


@dataclass(frozen=True, kw_only=True)
class _Built:
    """The numbers of texts in an index, of those that a build added, and of those that hold nothing."""

    total: int
    added: int
    empty: int = 0


def build_index(
    store: _Store, texts: Iterable[str], encode: Encode, *, progress: Progress = SILENT, at_once: int = _BATCH
) -> _Built:
    """Encode and store the missing texts, `at_once` at a time; each batch stays stored if the build stops."""
    added = empty = 0
    source = iter(texts)
    with progress.task("embedding and storing", None) as advance:
        while batch := list(islice(source, at_once)):
            asked = store.missing(batch)
            new, vectors = _encoded(asked, encode)
            if new:
                store.add(new, vectors)
            added += len(new)
            empty += len(asked) - len(new)
            advance(len(batch))
    if empty:
        progress.say(f"{empty} texts of which the tokenizer leaves nothing were left out")
    store.finish()
    return _Built(total=store.count(), added=added, empty=empty)


def _encoded(texts: list[str], encode: Encode) -> tuple[list[str], Vectors]:
    """Encode the texts that hold something to embed."""
    while texts:
        try:
            return texts, encode(texts)
        except EmptyTexts as error:
            left_out = set(error.places)
            texts = [text for place, text in enumerate(texts) if place not in left_out]
    return [], np.empty((0, 0), dtype=np.float32)
