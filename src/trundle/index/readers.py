"""Open any index to read it, and create, open, build those that trundle searches.

Each is named by a file, a folder or the address of a database.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from trundle.embedder import Encode, Vectors
from trundle.errors import BadInput, EmptyTexts
from trundle.folders import atomic_folder, check_free
from trundle.index.base import Wanted, _Store
from trundle.index.embedded import _MARK, _create_embedded, _EmbeddedStore, _FolderReader
from trundle.index.rows import IndexReader, _Wish
from trundle.progress import SILENT, Progress

_KINDS = "Postgres, Qdrant, Chroma, Milvus, LanceDB, FAISS, sqlite-vec, parquet, arrow, npz, its own"
_POSTGRES = ("postgres", "postgresql")
_LANCE = ("s3", "gs", "az", "db")
_SERVERS = {
    "qdrant": (6333, "QDRANT_API_KEY"),
    "chroma": (8000, "CHROMA_API_KEY"),
    "milvus": (19530, "MILVUS_TOKEN"),
}
"""The port of each, and the environment variable of its key."""
_SCHEMES = (*_POSTGRES, *_LANCE, *_SERVERS, *(f"{name}s" for name in _SERVERS))
_ARROW = (".arrow", ".feather", ".ipc")
_SQLITE = b"SQLite format 3\0"
_NAMED = ("table", "texts", "vectors")
_TABLE = "trundle"
_BATCH = 512


def open_reader(
    where: str,
    *,
    table: str | None = None,
    texts: str | None = None,
    vectors: str | None = None,
    progress: Progress = SILENT,
) -> IndexReader:
    """Open a file, a folder or an address to read it; nothing is written.

    `table` is the table or collection, for FAISS and npz the file of the texts; `texts` and `vectors` are
    columns. They may also follow an address, as in `?table=…&texts=…&vectors=…`.
    """
    check_place(where)
    wish = _Wish(table=table, texts=texts, vectors=vectors)
    scheme, separator, _ = where.partition("://")
    if separator:
        return _from_address(where, scheme.lower(), wish, progress)
    return _from_path(Path(where).expanduser(), wish, progress)


def check_place(where: str) -> None:
    """Reject an address of another kind and a path where there is nothing; nothing is opened."""
    scheme, separator, rest = where.partition("://")
    if separator and scheme.lower() not in _SCHEMES:
        place = Path(rest)
        if there := next((part for part in (place, *place.parents) if part.name and part.exists()), None):
            raise BadInput(f"{scheme}:// is no address that trundle reads; pass {there} itself, with --table")
        raise _unsupported(f"{scheme}://")
    if not separator and not Path(where).expanduser().exists():
        raise BadInput(f"there is no index {where!r}; check the path, or build one with trundle index build")


def _from_address(where: str, scheme: str, wish: _Wish, progress: Progress) -> IndexReader:
    url, wish = _named(where, wish)
    if scheme in _POSTGRES:
        from trundle.index.connection import _PostgresReader

        return _PostgresReader(url, wish, progress=progress)
    if scheme in _LANCE:
        from trundle.index.lancedb import _LanceReader

        return _LanceReader(url, wish)
    database = scheme if scheme in _SERVERS else scheme[:-1]
    server = _server(url, database, secure=scheme != database)
    wish = replace(wish, table=wish.table or server.collection)
    if database == "qdrant":
        from trundle.index.qdrant import _QdrantReader

        return _QdrantReader(server.name, wish, key=server.key, url=server.url)
    if database == "chroma":
        from trundle.index.chroma import _ChromaReader

        at = (server.host, server.port, server.secure)
        return _ChromaReader(server.name, wish, server=at, key=server.key)
    from trundle.index.milvus import _MilvusReader

    return _MilvusReader(server.name, wish, uri=server.url, key=server.key)


def _from_path(path: Path, wish: _Wish, progress: Progress) -> IndexReader:
    if path.is_dir():
        return _from_folder(path, wish, progress)
    if path.suffix in (".parquet", *_ARROW):
        from trundle.index.flat_files import _TableReader

        return _TableReader(str(path), wish, [path], "parquet" if path.suffix == ".parquet" else "ipc")
    if path.suffix in (".npy", ".npz"):
        from trundle.index.flat_files import _open_arrays

        return _open_arrays(path, wish)
    if path.suffix in (".faiss", ".index"):
        from trundle.index.flat_files import _open_faiss

        return _open_faiss(path, wish)
    with path.open("rb") as file:
        if file.read(len(_SQLITE)) == _SQLITE:
            from trundle.index.sqlite_vec import _SqliteVecReader

            return _SqliteVecReader(path, wish)
    raise _unsupported(str(path))


def _from_folder(path: Path, wish: _Wish, progress: Progress) -> IndexReader:
    if (path / "index.json").is_file():
        if wish != _Wish():
            raise BadInput("an index that trundle built has one table; leave out its table and columns")
        return _FolderReader(path, progress=progress)
    if (path / "chroma.sqlite3").is_file():
        from trundle.index.chroma import _ChromaReader

        return _ChromaReader(str(path), wish, folder=str(path))
    if (path / "meta.json").is_file() and (path / "collection").is_dir():
        from trundle.index.qdrant import _QdrantReader

        return _QdrantReader(str(path), wish, path=str(path))
    if (path / "raft_state.json").is_file():
        raise BadInput(f"{path} is the storage of a Qdrant server; start it and pass qdrant://host:6333")
    if (path / "databases").is_dir() and (path / "collections").is_dir():
        from trundle.index.milvus import _MilvusReader

        return _MilvusReader(str(path), wish, uri=str(path))
    if (path / "_versions").is_dir():
        table = path.resolve()  # `.` has no name
        path, wish = table.parent, replace(wish, table=table.stem)
    if any(each.suffix == ".lance" for each in path.iterdir()):
        from trundle.index.lancedb import _LanceReader

        return _LanceReader(str(path), wish)
    for kind, suffixes in (("parquet", (".parquet",)), ("ipc", _ARROW)):
        if files := sorted(file for file in path.iterdir() if file.suffix in suffixes):
            from trundle.index.flat_files import _TableReader

            return _TableReader(str(path), wish, files, kind)
    raise _unsupported(str(path))


@dataclass(frozen=True, kw_only=True)
class _Server:
    """The parts of a database's address."""

    name: str
    """Without secrets."""
    host: str
    port: int
    secure: bool
    collection: str | None
    key: str | None

    @property
    def url(self) -> str:
        """The address that a client connects to."""
        return f"http{'s' if self.secure else ''}://{self.host}:{self.port}"


def _server(url: str, database: str, *, secure: bool) -> _Server:
    """Take an address apart; the key is its user or password, or in the database's own variable."""
    port, variable = _SERVERS[database]
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "localhost", parts.port or port
    except ValueError:
        raise BadInput(f"the address is not valid; write {database}://host:{port}/collection") from None
    key = parts.password or parts.username
    if database == "milvus" and parts.password and parts.username:
        key = f"{parts.username}:{parts.password}"
    shown = f"[{host}]" if ":" in host else host
    return _Server(
        name=f"{database}{'s' if secure else ''}://{shown}:{port}",
        host=shown,
        port=port,
        secure=secure,
        collection=unquote(parts.path.strip("/")) or None,
        key=unquote(key) if key else os.environ.get(variable),
    )


def _named(where: str, wish: _Wish) -> tuple[str, _Wish]:
    """Take what names the table and its columns out of an address."""
    place, mark, query = where.partition("?")
    pairs = [pair for pair in query.split("&") if pair]
    named = {
        name: unquote(value) for name, _, value in (pair.partition("=") for pair in pairs) if name in _NAMED
    }
    for name, value in named.items():
        if getattr(wish, name) not in (None, value):
            raise BadInput(f"--{name} differs from {name}= in the address; leave one of them out")
    rest = "&".join(pair for pair in pairs if pair.partition("=")[0] not in _NAMED)
    return place + mark * bool(rest) + rest, replace(wish, **named)


def _unsupported(what: str) -> BadInput:
    """Return the error for a place that is not an index trundle reads."""
    return BadInput(f"{what} is not an index that trundle reads ({_KINDS}); see trundle index read --help")


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
        if where.partition("://")[0] in _POSTGRES:
            from trundle.index.postgres import _PostgresStore

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
    if where.partition("://")[0] in _POSTGRES:
        from trundle.index.postgres import _PostgresStore

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
