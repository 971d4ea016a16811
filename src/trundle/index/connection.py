"""A Postgres connection that reconnects, and read-only access to any table with texts and vectors."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from trundle.errors import BadInput, MissingExtra, TrundleError, WriteFailed
from trundle.index.base import _Sample
from trundle.progress import SILENT, Progress

try:
    import psycopg
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

_T = TypeVar("_T")
_Connection = psycopg.Connection[tuple[Any, ...]]

APPLICATION = "trundle"
"""What the server calls our connections."""
_RETRY_SECONDS = 60.0
"""How long to retry if a server goes away."""
_FIRST_RETRY_SECONDS = 1.0
"""How long to retry the first connection."""
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_SPARSE = 10
"""From this many times the requested rows on, a part of the table is sampled before it is sorted."""
_TEXT_NAMES = ("text", "content", "document", "body", "chunk", "page_content", "passage")
_VECTOR_TYPES = ("vector", "halfvec")

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
"""Every column that could hold vectors or texts."""
_Column = tuple[str, str, str, str]


class _Database:
    """A connection that is opened again when it breaks."""

    def __init__(
        self,
        url: str,
        *,
        read_only: bool,
        retry_seconds: float,
        progress: Progress,
        application: str = APPLICATION,
    ) -> None:
        parts = urlsplit(url)
        self.name = f"{parts.hostname or 'local'}{parts.path}"
        self._url = url
        self._application = application
        self._read_only = read_only
        self._retry_seconds = retry_seconds
        self._progress = progress
        self._open: _Connection | None = None

    def do(self, work: Callable[[_Connection], _T], *, first: bool = False) -> _T:
        """Run `work` in one transaction, and again if the connection breaks; `first` gives up sooner.

        The connection may break after the server has committed, so `work` must allow being done twice.
        """
        seconds = min(self._retry_seconds, _FIRST_RETRY_SECONDS) if first else self._retry_seconds
        end, wait = time.monotonic() + seconds, _FIRST_WAIT
        while True:
            try:
                connection = self._connected()
                with connection.transaction():
                    return work(connection)
            except psycopg.OperationalError as error:
                self.close()
                if isinstance(error, psycopg.errors.DiskFull | psycopg.errors.OutOfMemory):
                    problem = f"is full ({_first_line(error)}); free some space and run again"
                    raise WriteFailed(f"{self.name} {problem}: what was stored is kept") from error
                if isinstance(error, psycopg.errors.QueryCanceled | psycopg.errors.LockNotAvailable):
                    problem = f"stopped a statement ({_first_line(error)}); raise its timeout and run again"
                    raise WriteFailed(f"{self.name} {problem}: what was stored is kept") from error
                if time.monotonic() + wait > end:
                    problem = f"can't be reached ({_first_line(error)}); start the server and run again"
                    raise WriteFailed(f"{self.name} {problem}: what was stored is kept") from error
                self._progress.say(f"{self.name} does not respond; retrying in {wait:.1f} s")
                time.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(2 * wait, _LONGEST_WAIT)
            except TrundleError:
                self.close()
                raise
            except psycopg.Error as error:
                self.close()
                problem = f"{self.name} rejects the request ({_first_line(error)})"
                raise BadInput(f"{problem}; check the table and your permissions") from error

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connected(self) -> _Connection:
        if self._open is None or self._open.closed:
            try:
                self._open = psycopg.connect(self._url, connect_timeout=5, application_name=self._application)
            except psycopg.ProgrammingError as error:
                problem = f"the database's address is not valid ({_first_line(error)})"
                raise BadInput(f"{problem}; write postgresql://user@host/database") from error
            self._open.read_only = self._read_only
        return self._open


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True, kw_only=True)
class _TextColumns:
    """The table and columns of a database that hold texts and vectors."""

    schema: str
    table: str
    text: str
    vector: str


def _find_columns(
    columns: Sequence[_Column], *, table: str | None, text: str | None, vector: str | None
) -> _TextColumns:
    """Return the only table with texts and vectors; if there are several, the user must choose one."""
    kept = [each for each in columns if table is None or table in (each[1], f"{each[0]}.{each[1]}")]
    if table is not None and not kept:
        known = _listed(sorted({each[1] for each in columns if each[3] in _VECTOR_TYPES}))
        raise BadInput(f"there is no table {table!r} with texts or vectors; pass one of: {known}")
    found = [each for each in kept if each[3] in _VECTOR_TYPES and vector in (None, each[2])]
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
    texts = [each[2] for each in kept if each[:2] == (schema, name) and each[3] not in _VECTOR_TYPES]
    return _TextColumns(schema=schema, table=name, text=_text_column(texts, text, name), vector=found[0][2])


def _text_column(there: Sequence[str], wanted: str | None, table: str) -> str:
    if wanted is not None and wanted not in there:
        raise BadInput(f"{table} has no column of texts {wanted!r}; pass one of: {_listed(there)}")
    usual = [name for name in ((wanted,) if wanted else _TEXT_NAMES) if name in there]
    if usual or len(there) == 1:
        return (usual or there)[0]
    raise BadInput(f"{table} may hold texts in several columns; name it with --texts: {_listed(there)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


class _ForeignTable:
    """A table that other software wrote; it is only read, in read-only transactions."""

    def __init__(
        self,
        url: str,
        *,
        table: str | None = None,
        text_column: str | None = None,
        vector_column: str | None = None,
        progress: Progress = SILENT,
    ) -> None:
        self._database = _Database(url, read_only=True, retry_seconds=_RETRY_SECONDS, progress=progress)
        try:
            rows = self._database.do(lambda connection: connection.execute(_COLUMNS).fetchall(), first=True)
            columns = [(str(one), str(two), str(three), str(four)) for one, two, three, four in rows]
            self._columns = _find_columns(columns, table=table, text=text_column, vector=vector_column)
            one = self.sample(1, 0)
            if not one.texts:
                raise BadInput(f"table {self._columns.table} holds no text with a vector; fill it first")
        except BadInput:
            self.close()
            raise
        self.name = f"{self._database.name}, table {self._columns.table}"
        self.dimensions = one.vectors.shape[1]

    def sample(self, count: int, seed: int) -> _Sample:
        return _draw_sample(self._database, self._columns, count, seed)

    def close(self) -> None:
        self._database.close()


def _draw_sample(database: _Database, columns: _TextColumns, count: int, seed: int) -> _Sample:
    """Return up to `count` rows of a table that have a text and a vector, sampled uniformly."""
    table = sql.Identifier(*filter(None, (columns.schema, columns.table)))
    text, vector = sql.Identifier(columns.text), sql.Identifier(columns.vector)
    usable = sql.SQL("WHERE {text} <> '' AND {vector} IS NOT NULL").format(text=text, vector=vector)

    def draw(connection: _Connection) -> tuple[int, list[tuple[Any, ...]]]:
        counted = sql.SQL("SELECT count(*) FROM {} {}").format(table, usable)
        total = int(connection.execute(counted).fetchall()[0][0])
        source: sql.Composable = table
        if total > _SPARSE * count and count > 1:
            percent = min(100.0, 200.0 * count / total)
            source = sql.SQL("{} TABLESAMPLE BERNOULLI ({}) REPEATABLE ({})").format(
                table, sql.Literal(percent), sql.Literal(seed)
            )
        connection.execute("SELECT setseed(%s)", [1 / (2 + seed)])
        query = sql.SQL("SELECT {}, {}::text FROM {} {} ORDER BY random() LIMIT {}").format(
            text, vector, source, usable, sql.Literal(count)
        )
        return total, connection.execute(query).fetchall()

    total, rows = database.do(draw)
    vectors = [np.fromstring(stored[1:-1], sep=",", dtype=np.float32) for _, stored in rows]
    if len({len(vector) for vector in vectors}) > 1:
        raise BadInput(f"table {columns.table} holds vectors of several widths; choose another with --table")
    array = np.stack(vectors) if vectors else np.empty((0, 0), dtype=np.float32)
    return _Sample(texts=tuple(text for text, _ in rows), vectors=array, total=total)
