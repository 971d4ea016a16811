"""A connection to Postgres that is made again when it breaks."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from trundle.errors import BadInput, MissingExtra, TrundleError, WriteFailed
from trundle.progress import Progress

try:
    import psycopg
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

_T = TypeVar("_T")
_Connection = psycopg.Connection[tuple[Any, ...]]

_PATIENCE = 60.0
"""Seconds a server may be away once it was there."""
_AT_THE_DOOR = 1.0
"""Seconds to wait for a server that was never there."""
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0


class _Link:
    """A connection that is made again when it breaks."""

    def __init__(self, url: str, *, read_only: bool, patience: float, progress: Progress) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.hostname or 'local'}{parts.path}"
        self._url = url
        self._read_only = read_only
        self._patience = patience
        self._progress = progress
        self._open: _Connection | None = None

    def do(self, work: Callable[[_Connection], _T], *, patience: float | None = None) -> _T:
        """Carry out `work` in one transaction; if the server goes away, wait for it and do the whole again."""
        end, wait = time.monotonic() + (self._patience if patience is None else patience), _FIRST_WAIT
        while True:
            try:
                connection = self._connected()
                with connection.transaction():
                    return work(connection)
            except psycopg.OperationalError as error:
                self.close()
                if isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory):
                    raise WriteFailed(
                        f"{self.name} has no room ({_first_line(error)}); free some and run the same command "
                        "again: what was stored is kept"
                    ) from error
                if time.monotonic() + wait > end:
                    raise WriteFailed(
                        f"{self.name} can't be reached ({_first_line(error)}); start the server or mend the address "
                        "and run the same command again: what was stored is kept"
                    ) from error
                self._progress.say(f"{self.name} is away; trying again in {wait:.1f} s")
                time.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(2 * wait, _LONGEST_WAIT)
            except TrundleError:
                self.close()
                raise
            except psycopg.Error as error:
                self.close()
                raise BadInput(
                    f"{self.name} refuses ({_first_line(error)}); mend that and run again"
                ) from error

    def close(self) -> None:
        """Hang up."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connected(self) -> _Connection:
        if self._open is None or self._open.closed:
            try:
                self._open = psycopg.connect(self._url, connect_timeout=5, application_name="trundle")
            except psycopg.ProgrammingError as error:
                raise BadInput(f"the address of the database can't be read ({_first_line(error)})") from error
            self._open.read_only = self._read_only
        return self._open


def _only_row(cursor: psycopg.Cursor[tuple[Any, ...]]) -> tuple[Any, ...]:
    """The row of a query that always has one."""
    row = cursor.fetchone()
    assert row is not None
    return row


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


_TEXT_NAMES = ("text", "content", "document", "body", "chunk", "page_content", "passage")

_COLUMNS = """
SELECT n.nspname, c.relname, a.attname, t.typname
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
WHERE c.relkind IN ('r', 'p', 'm') AND a.attnum > 0 AND NOT a.attisdropped
  AND n.nspname NOT IN ('pg_catalog', 'information_schema')
  AND t.typname IN ('vector', 'halfvec', 'text', 'varchar', 'bpchar')
ORDER BY n.nspname, c.relname, a.attnum
"""
"""Every column that could be a vector or a text."""

_Column = tuple[str, str, str, str]
_VECTORS = ("vector", "halfvec")


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where texts and vectors lie in a database."""

    schema: str
    table: str
    text: str
    vector: str


def _find_place(
    columns: Sequence[_Column], *, table: str | None, text: str | None, vector: str | None
) -> _Place:
    """The one table that holds texts and vectors; where there are several, the user must say which."""
    kept = [each for each in columns if table is None or table in (each[1], f"{each[0]}.{each[1]}")]
    if table is not None and not kept:
        known = _listed(sorted({each[1] for each in columns if each[3] in _VECTORS}))
        raise BadInput(f"there is no table {table!r} with texts or vectors; give one of: {known}")
    found = [each for each in kept if each[3] in _VECTORS and vector in (None, each[2])]
    if not found:
        what = f"column {vector!r} with vectors" if vector else "column of pgvector's type vector or halfvec"
        raise BadInput(f"there is no {what}; name the table and its column with --table and --vectors")
    tables = sorted({(each[0], each[1]) for each in found})
    if len(tables) > 1:
        names = _listed([f"{schema}.{name}" for schema, name in tables])
        raise BadInput(f"several tables hold vectors ({names}); name one with --table")
    if len(found) > 1:
        names = _listed([each[2] for each in found])
        raise BadInput(f"{tables[0][1]} has several columns of vectors ({names}); name one with --vectors")
    schema, name = tables[0]
    texts = [each[2] for each in kept if each[:2] == (schema, name) and each[3] not in _VECTORS]
    return _Place(schema=schema, table=name, text=_text_column(texts, text, name), vector=found[0][2])


def _text_column(there: Sequence[str], wanted: str | None, table: str) -> str:
    if wanted is not None:
        if wanted not in there:
            raise BadInput(f"{table} has no column of texts {wanted!r}; give one of: {_listed(there)}")
        return wanted
    usual = [name for name in _TEXT_NAMES if name in there]
    if usual or len(there) == 1:
        return (usual or list(there))[0]
    raise BadInput(
        f"{table} does not say which column holds the texts; name it with --texts: {_listed(there)}"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
