"""Open any index to read it, named by a file, a folder or the address of a database."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from trundle.errors import BadInput
from trundle.index.rows import IndexReader, Wish
from trundle.progress import SILENT, Progress

_KINDS = (
    "postgresql://user@host/database?table=NAME, qdrant://host:6333/COLLECTION, "
    "chroma://host:8000/COLLECTION, milvus://host:19530/COLLECTION, a folder or bucket of LanceDB, "
    "a folder of Qdrant, Chroma, Milvus Lite or trundle, "
    "or a file of FAISS, sqlite-vec, parquet, arrow or npz"
)
_POSTGRES = ("postgres", "postgresql")
_LANCE = ("s3", "gs", "az", "db")
_NAMED = ("table", "texts", "vectors")


def open_reader(
    where: str,
    *,
    table: str | None = None,
    texts: str | None = None,
    vectors: str | None = None,
    progress: Progress = SILENT,
) -> IndexReader:
    """Open an index to read it; nothing is written.

    Args:
        where: A file, a folder or an address; `?table=…&texts=…&vectors=…` may follow an address.
        table: The table or collection, if there are several; for FAISS and npz, the file of the texts.
        texts: The column or payload field of the texts, if it has no usual name.
        vectors: The column or name of the vectors, if there are several.
        progress: Shows retries.
    """
    wish = Wish(table=table, texts=texts, vectors=vectors)
    scheme, separator, _ = where.partition("://")
    if separator:
        return _from_address(where, scheme.lower(), wish, progress)
    return _from_path(Path(where).expanduser(), wish, progress)


def _from_address(where: str, scheme: str, wish: Wish, progress: Progress) -> IndexReader:
    if scheme in _POSTGRES:
        from trundle.index.connection import PostgresReader

        url, wish = _named(where, wish)
        return PostgresReader(url, wish, progress=progress)
    raise unsupported(f"{scheme}://")


def _from_path(path: Path, wish: Wish, progress: Progress) -> IndexReader:
    if not path.exists():
        raise BadInput(
            f"there is no index {str(path)!r}; build one with trundle index build, or pass {_KINDS}"
        )
    if (path / "index.json").is_file():
        from trundle.index.embedded import FolderReader

        if wish != Wish():
            raise BadInput(
                "an index of trundle's own has one table; leave out --table, --texts and --vectors"
            )
        return FolderReader(path, progress=progress)
    raise unsupported(str(path))


def _named(where: str, wish: Wish) -> tuple[str, Wish]:
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


def unsupported(what: str) -> BadInput:
    """Return the error for a place that is not an index trundle reads."""
    return BadInput(f"{what} is not an index that trundle reads; pass {_KINDS}")
