"""A Postgres connection that reconnects, and read-only access to any table with texts and vectors."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from trundle.errors import BadInput, MissingExtra, TrundleError, WriteFailed
from trundle.index.rows import (
    _BATCH_ROWS,
    IndexReader,
    Metric,
    _chosen_ids,
    _listed,
    _Places,
    _RawRows,
    _Wish,
)
from trundle.progress import SILENT, Progress

try:
    import psycopg
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("an index in Postgres", "postgres") from error

_T = TypeVar("_T")
_Connection = psycopg.Connection[tuple[Any, ...]]

APPLICATION = "trundle"
"""What the server calls our connections."""
_RETRY_SECONDS = 60.0
"""How long to retry if a server goes away."""
_FIRST_RETRY_SECONDS = 1.0
"""How long to retry the first connection."""
_FIRST_WAIT, _LONGEST_WAIT = 0.2, 5.0
_SPARSE = 20
"""From this many times the requested rows on, rows are looked up at random places of the table's file."""
_COUNTED = 1_000_000
"""Larger tables are not counted; the server's estimate takes its place."""
_MOST_SLOTS = 291
"""No page of Postgres holds more rows."""
_PROBED_PAGES = 64
_METRICS: dict[str, Metric] = {"cosine": "cosine", "ip": "inner product", "l2": "l2"}
_VECTOR_TYPES = ("vector", "halfvec")
_REFUSED = ("authentication failed", "does not exist", "no pg_hba.conf entry", "no password supplied")

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
_FACTS = """
SELECT c.oid, c.reltuples::bigint, a.atttypid, a.atttypmod, t.typname
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_type t ON t.oid = a.atttypid
WHERE n.nspname = %s AND c.relname = %s AND a.attname = %s
"""
_KEY = """
SELECT a.attname FROM pg_index i
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)
WHERE i.indrelid = %s AND i.indisprimary ORDER BY array_position(i.indkey::int2[], a.attnum)
"""
_OPERATORS = """
SELECT o.opcname FROM pg_index i
JOIN pg_opclass o ON o.oid = ANY(i.indclass::oid[])
JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = ANY(i.indkey)
WHERE i.indrelid = %s AND a.attname = %s AND o.opcname ~ '^(vector|halfvec)_'
"""
"""What the vectors are indexed for: vector_cosine_ops, vector_ip_ops, vector_l2_ops."""
_PARTS = """
SELECT relid::regclass::text, pg_relation_size(relid) / current_setting('block_size')::bigint
FROM (SELECT relid FROM pg_partition_tree(%(oid)s) WHERE isleaf UNION SELECT %(oid)s::regclass) AS parts
"""
"""The table and those that hold its rows if it is partitioned, and how many pages each has."""


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
        # The client would read a password with such a character as a host or port, and quote it.
        before, _, after = re.split("[/?#]", url.partition("://")[2] + "/", maxsplit=1)[0].rpartition(":")
        if "@" not in before + after and not after.isdigit() and before and "@" in url:
            problem = "the database's address is not valid"
            raise BadInput(f"{problem}; write / ? and # in a password as %2F %3F and %23")
        place = url.partition("://")[2].partition("?")[0].rpartition("@")[2]
        self.name = f"local{place}" if place.startswith("/") else place or "local"
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
        seconds = self._retry_seconds
        if first:  # a wrong address is more likely than a server that restarts
            seconds = 0.0 if self._read_only else min(seconds, _FIRST_RETRY_SECONDS)
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
                    kept = "" if self._read_only else ": what was stored is kept"
                    raise WriteFailed(f"{self.name} {problem}{kept}") from error
                if any(word in str(error) for word in _REFUSED):
                    problem = f"refuses the connection ({_first_line(error)})"
                    raise BadInput(f"{self.name} {problem}; check user, password and database") from None
                if time.monotonic() + wait > end:
                    problem = f"can't be reached ({_first_line(error)}); start the server and run again"
                    if self._read_only:
                        raise BadInput(f"{self.name} {problem}") from error
                    raise WriteFailed(f"{self.name} {problem}: what was stored is kept") from error
                self._progress.say(f"{self.name} does not respond; retrying in {wait:.1f} s")
                time.sleep(wait * random.uniform(0.8, 1.2))
                wait = min(2 * wait, _LONGEST_WAIT)
            except TrundleError:
                self.close()
                raise
            except psycopg.Error as error:
                raise self._rejected(error) from error

    @contextmanager
    def reading(self) -> Iterator[_Connection]:
        """Yield a connection in one transaction, which sees the table as it is now until the end."""
        connection = self.do(lambda connection: connection)
        try:
            with connection.transaction():
                yield connection
        except psycopg.OperationalError as error:
            self.close()
            problem = f"{self.name} went away while it was read ({_first_line(error)})"
            raise BadInput(f"{problem}; start the server and run again") from error
        except psycopg.Error as error:
            raise self._rejected(error) from error

    def _rejected(self, error: psycopg.Error) -> BadInput:
        self.close()
        problem = f"{self.name} rejects the request ({_first_line(error)})"
        return BadInput(f"{problem}; check the table and your permissions")

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connected(self) -> _Connection:
        if self._open is None or self._open.closed:
            try:
                self._open = psycopg.connect(self._url, connect_timeout=5, application_name=self._application)
            except psycopg.ProgrammingError:
                # The client's own words quote the address, with the password in it.
                problem = "the database's address is not valid"
                raise BadInput(f"{problem}; write postgresql://user@host/database") from None
            self._open.read_only = self._read_only
            if self._read_only:
                self._open.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
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


def _find_columns(columns: Sequence[_Column], wish: _Wish) -> _TextColumns:
    """Return the only table with texts and vectors; if there are several, the user must choose one."""
    table, vector = wish.table, wish.vectors
    kept = [each for each in columns if table is None or table in (each[1], f"{each[0]}.{each[1]}")]
    if table is not None and not kept:
        known = _listed(sorted({each[1] for each in columns if each[3] in _VECTOR_TYPES}))
        raise BadInput(f"there is no table {table!r} with texts or vectors; pass one of: {known}")
    found = [each for each in kept if each[3] in _VECTOR_TYPES and vector in (None, each[2])]
    if not found:
        what = f"column {vector!r} with vectors" if vector else "column of pgvector's type vector or halfvec"
        raise BadInput(f"there is no {what}; name the table and its column with --table and --vector-column")
    tables = sorted({(each[0], each[1]) for each in found})
    if len(tables) > 1:
        names = _listed([f"{schema}.{name}" for schema, name in tables])
        raise BadInput(f"several tables hold vectors ({names}); name one with --table")
    if len(found) > 1:
        names = _listed([each[2] for each in found])
        raise BadInput(
            f"{tables[0][1]} has several columns of vectors ({names}); name one with --vector-column"
        )
    schema, name = tables[0]
    texts = [each[2] for each in kept if each[:2] == (schema, name) and each[3] not in _VECTOR_TYPES]
    return _TextColumns(schema=schema, table=name, text=wish.texts_of(texts, name), vector=found[0][2])


class _RawLoader(psycopg.adapt.Loader):
    """Leaves a vector as the bytes that pgvector sends: two 16-bit numbers, then the values."""

    format = psycopg.pq.Format.BINARY

    def load(self, data: psycopg.abc.Buffer) -> bytes:
        return bytes(data)


class _PostgresReader(IndexReader):
    """Reads a table that other software wrote, in read-only transactions."""

    def __init__(self, url: str, wish: _Wish, *, progress: Progress = SILENT) -> None:
        self._database = _Database(url, read_only=True, retry_seconds=_RETRY_SECONDS, progress=progress)
        self._client = self._database
        with self._opening(self._database.name):
            rows = self._database.do(lambda connection: connection.execute(_COLUMNS).fetchall(), first=True)
            columns = [(str(one), str(two), str(three), str(four)) for one, two, three, four in rows]
            found = _find_columns(columns, wish)
            where = f"{self._database.name}, table {found.table}"
            count, width, metric = self._database.do(lambda connection: self._look(connection, found))
            super().__init__(where, count=count, width=width, metric=metric)

    def _look(self, connection: _Connection, found: _TextColumns) -> tuple[int, int, Metric]:
        """Return the number of rows, the width and the metric, and keep what selects the rows."""
        names = [found.schema, found.table, found.vector]
        oid, estimate, type_oid, declared, kind = connection.execute(_FACTS, names).fetchall()[0]
        key = [str(name) for (name,) in connection.execute(_KEY, [oid]).fetchall()]
        self._oid, self._vector_oid, self._half = oid, type_oid, kind == "halfvec"
        self._table = sql.Identifier(found.schema, found.table)
        identity = sql.SQL(", ',', ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in key)
        self._selected = sql.SQL("SELECT {}, {}::text, {}").format(
            sql.SQL("concat({})").format(identity) if key else sql.SQL("ctid::text"),
            sql.Identifier(found.text),
            sql.Identifier(found.vector),
        )
        self._estimated = estimate > _COUNTED
        count = estimate if self._estimated else self._exact(connection)
        width = declared
        if width < 1:
            query = sql.SQL("{} FROM {} WHERE {} IS NOT NULL LIMIT 1").format(
                self._selected, self._table, sql.Identifier(found.vector)
            )
            with connection.cursor(binary=True) as cursor:
                some = self._raw(self._prepared(cursor).execute(query).fetchall())
            width = len(some.vectors[0]) if some.ids else 1
        names = [str(name) for (name,) in connection.execute(_OPERATORS, [oid, found.vector]).fetchall()]
        metrics = {metric for name, metric in _METRICS.items() if any(f"_{name}_" in one for one in names)}
        return count, width, metrics.pop() if len(metrics) == 1 else "cosine"

    def _exact(self, connection: _Connection) -> int:
        rows = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(self._table)).fetchall()
        return int(rows[0][0])

    def _scan(self, first: int) -> Iterator[_RawRows]:
        with self._database.reading() as connection, connection.cursor("trundle", binary=True) as cursor:
            # Otherwise a scan starts where that of another connection is.
            connection.execute("SET LOCAL synchronize_seqscans = off")
            query = sql.SQL("{} FROM {} OFFSET {}").format(self._selected, self._table, first)
            self._prepared(cursor).execute(query)
            while rows := cursor.fetchmany(_BATCH_ROWS):
                yield self._raw(rows)

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        with self._database.reading() as connection:

            def identifiers() -> Iterator[list[tuple[str, str]]]:
                for part, _ in connection.execute(_PARTS, {"oid": self._oid}).fetchall():
                    with connection.cursor("trundle") as cursor:
                        cursor.execute(f"SELECT ctid::text FROM ONLY {part}")
                        while rows := cursor.fetchmany(10 * _BATCH_ROWS):
                            yield [(part, row) for (row,) in rows]

            yield from _chosen_ids(identifiers(), places, lambda some: self._fetched(connection, some))

    def _draw(self, sample: int, seed: int) -> Iterator[_RawRows]:
        if sample * _SPARSE > self.count:
            if self._estimated:
                self.count, self._estimated = self._database.do(self._exact), False
            yield from super()._draw(sample, seed)
            return
        with self._database.reading() as connection:
            parts = [(name, pages) for name, pages in connection.execute(_PARTS, {"oid": self._oid}) if pages]
            yield from self._probed(connection, parts, sample, seed)

    def _probed(
        self, connection: _Connection, parts: list[tuple[str, int]], sample: int, seed: int
    ) -> Iterator[_RawRows]:
        """Yield rows at random places of the table's files, which reads one page for each row.

        A place is a page and a number in it; where there is no row, another place is drawn, so every row
        has the same chance, however full its page is.
        """
        rng = np.random.default_rng(seed)
        pages = sum(count for _, count in parts)
        some = rng.choice(pages, size=min(pages, _PROBED_PAGES), replace=False)
        every = (some[:, None] * _MOST_SLOTS + np.arange(_MOST_SLOTS)).ravel()
        found = self._existing(connection, parts, every, _MOST_SLOTS)
        most = max((int(row.rpartition(",")[2][:-1]) for _, row in found), default=1)
        slots = min(_MOST_SLOTS, 2 * most)
        rate, total = max(1, len(found)) / (len(some) * slots), pages * slots
        tried = np.empty(0, dtype=np.int64)
        while len(tried) < total:
            wanted = sample - (self.counts.read - self.counts.left_out)
            if wanted <= 0:
                return
            size = min(total, len(tried) + int(1.2 * wanted / rate) + 16)
            chosen = rng.choice(total, size=size, replace=False)
            new = chosen[~np.isin(chosen, tried)][: size - len(tried)]
            tried = np.concatenate([tried, new])
            rows = self._existing(connection, parts, new, slots)
            for start in range(0, min(wanted, len(rows)), _BATCH_ROWS):
                yield self._fetched(connection, rows[start : min(wanted, start + _BATCH_ROWS)])

    def _existing(
        self, connection: _Connection, parts: list[tuple[str, int]], places: _Places, slots: int
    ) -> list[tuple[str, str]]:
        """Return which places hold a row, in the same order."""
        page, slot = places // slots, places % slots + 1
        found: list[tuple[int, tuple[str, str]]] = []
        first = 0
        for part, pages in parts:
            inside = np.flatnonzero((page >= first) & (page < first + pages))
            asked = {f"({page[place] - first},{slot[place]})": int(place) for place in inside}
            query = sql.SQL("SELECT ctid::text FROM ONLY {} WHERE ctid = ANY(%s::tid[])").format(
                sql.SQL(part)
            )
            rows = connection.execute(query, [list(asked)]).fetchall() if asked else []
            found += [(asked[row], (part, row)) for (row,) in rows]
            first += pages
        return [row for _, row in sorted(found)]

    def _fetched(self, connection: _Connection, rows: Sequence[tuple[str, str]]) -> _RawRows:
        """Return the rows of each part with these row identifiers."""
        found: list[tuple[Any, ...]] = []
        for part in dict.fromkeys(part for part, _ in rows):
            query = sql.SQL("{} FROM ONLY {} WHERE ctid = ANY(%s::tid[])").format(
                self._selected, sql.SQL(part)
            )
            with connection.cursor(binary=True) as cursor:
                self._prepared(cursor).execute(query, [[row for each, row in rows if each == part]])
                found += cursor.fetchall()
        return self._raw(found)

    def _prepared(self, cursor: Any) -> Any:
        cursor.adapters.register_loader(self._vector_oid, _RawLoader)
        return cursor

    def _raw(self, rows: Sequence[tuple[Any, ...]]) -> _RawRows:
        kind = np.dtype(">f2" if self._half else ">f4")
        stored = [row[2] for row in rows]
        sizes = {-1 if one is None else len(one) for one in stored}
        vectors: Any
        if len(sizes) == 1 and min(sizes) > 0:
            whole = np.frombuffer(b"".join(stored), dtype=np.uint8).reshape(len(stored), -1)
            vectors = np.ascontiguousarray(whole[:, 4:]).view(kind).astype(np.float32)
        else:
            vectors = [None if one is None else np.frombuffer(one, dtype=kind, offset=4) for one in stored]
        return _RawRows([row[0] for row in rows], [row[1] for row in rows], vectors)
