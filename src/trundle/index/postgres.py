"""An index in Postgres with pgvector; each batch is added in one transaction."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import Any

from trundle.embedder import Vectors
from trundle.errors import BadInput, MissingExtra, WriteFailed
from trundle.index.base import _EXACT_UP_TO, _OVERSAMPLE, Wanted, _agreed, _Facts, _Hit, _key_of
from trundle.index.connection import _RETRY_SECONDS, APPLICATION, _Connection, _Database
from trundle.progress import SILENT, Progress

try:
    import psycopg
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

_WIDEST_GRAPH = {"float": 2000, "binary": 64_000}
_LONGEST_NAME = 63
"""Bytes; Postgres truncates longer names without an error."""
_TURN = 7_481_246
"""The number of the lock that creating and replacing tables waits for."""
_GRAPH = "_graph"
_MOST_CANDIDATES = 1000
"""pgvector's limit for the candidates of a graph search."""


class _PostgresStore:
    """One table that trundle writes."""

    def __init__(
        self,
        database: _Database,
        table: str,
        facts: _Facts,
        *,
        becomes: str | None = None,
        oid: int = 0,
        exact_up_to: int,
        progress: Progress,
    ) -> None:
        self._database = database
        self._table = sql.Identifier(table)
        self._label = table
        self.facts = facts
        self.dimensions = facts.dimensions
        self._becomes, self._oid = becomes, oid
        self._exact_up_to = exact_up_to
        self._progress = progress

    @classmethod
    def create(
        cls,
        url: str,
        table: str,
        wanted: Wanted,
        *,
        force: bool = False,
        retry_seconds: float = _RETRY_SECONDS,
        exact_up_to: int = _EXACT_UP_TO,
        progress: Progress = SILENT,
    ) -> _PostgresStore:
        """Open a table to add to, created if needed; an existing one must have the same settings.

        With `force`, a new table is built, which replaces the old one when it is finished.
        """
        facts = wanted.facts
        if facts.precision == "int8":
            raise BadInput("pgvector has no int8 vectors; choose --precision float or binary")
        if len(table.encode()) > _LONGEST_NAME:
            raise BadInput(f"the name of table {table} is too long; choose {_LONGEST_NAME} bytes or fewer")
        build = secrets.token_hex(4)
        built = _suffixed(table, f"_new_{build}") if force else table
        database = _Database(
            url,
            read_only=False,
            retry_seconds=retry_seconds,
            progress=progress,
            application=_application(build) if force else APPLICATION,
        )

        def make(connection: _Connection) -> tuple[_Facts, int]:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_TURN])
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            there = _facts_of(connection, table)
            if there is not None and not force:
                return _agreed(there, wanted, f"table {table}"), 0
            if force:
                _check_droppable(connection, table)
                _drop_abandoned(connection, table)
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(built)))
            note = asdict(facts) | ({"replaces": table, "build": build} if force else {})
            return facts, _make_table(connection, built, facts, note)

        settled, oid = database.do(make, first=True)
        becomes = table if force else None
        return cls(
            database, built, settled, becomes=becomes, oid=oid, exact_up_to=exact_up_to, progress=progress
        )

    @classmethod
    def open(cls, url: str, table: str, *, progress: Progress = SILENT) -> _PostgresStore:
        """Open a table that trundle wrote, to search it."""
        database = _Database(url, read_only=True, retry_seconds=_RETRY_SECONDS, progress=progress)
        facts = database.do(lambda connection: _facts_of(connection, table), first=True)
        if facts is None:
            database.close()
            raise BadInput(f"there is no table {table} yet; build it with trundle index build")
        return cls(database, table, facts, exact_up_to=_EXACT_UP_TO, progress=progress)

    @property
    def name(self) -> str:
        return f"{self._database.name}, table {self._label}"

    def count(self) -> int:
        query = sql.SQL("SELECT count(*) FROM {}").format(self._table)
        return self._database.do(lambda connection: int(connection.execute(query).fetchall()[0][0]))

    def missing(self, texts: Sequence[str]) -> list[str]:
        keys = {_key_of(text): text for text in texts}
        query = sql.SQL("SELECT key FROM {} WHERE key = ANY(%s)").format(self._table)
        there = self._database.do(lambda connection: connection.execute(query, [list(keys)]).fetchall())
        for (key,) in there:
            keys.pop(bytes(key), None)
        return list(keys.values())

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        query = sql.SQL(
            "INSERT INTO {} (key, text, embedding) VALUES (%s, %s, %s) ON CONFLICT (key) DO NOTHING"
        ).format(self._table)
        pairs = zip(texts, vectors, strict=True)
        # Postgres stores no NUL.
        rows = [(_key_of(text), text.replace("\x00", ""), Vector(vector)) for text, vector in pairs]

        def insert(connection: _Connection) -> None:
            register_vector(connection)
            with connection.cursor() as cursor:
                cursor.executemany(query, rows)

        self._database.do(insert)

    def finish(self) -> None:
        """Build pgvector's graph over a large table, and replace the old table if there is one."""
        width, precision = self.dimensions, self.facts.precision
        if self.count() > self._exact_up_to and width <= _WIDEST_GRAPH[precision]:
            what: sql.Composable = sql.SQL("(embedding vector_cosine_ops)")
            if precision == "binary":
                bits = sql.SQL("((binary_quantize(embedding)::bit({})) bit_hamming_ops)")
                what = bits.format(sql.Literal(width))
            query = sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING hnsw {}").format(
                sql.Identifier(_suffixed(self._label, _GRAPH)), self._table, what
            )
            self._progress.say("building the graph in Postgres")
            self._database.do(lambda connection: connection.execute(query))
        if self._becomes is not None:
            self._replace_table(self._becomes)

    def _replace_table(self, table: str) -> None:
        old, new = sql.Identifier(table), self._table
        graphs = [sql.Identifier(_suffixed(name, _GRAPH)) for name in (self._label, table)]

        def swap(connection: _Connection) -> None:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", [_TURN])
            if _oid_of(connection, table) == self._oid:
                return  # the server committed an earlier try, and its answer was lost
            if _oid_of(connection, self._label) != self._oid:
                raise WriteFailed(f"table {self._label} was dropped while it was filled; run again")
            _facts_of(connection, table)  # an error if the table is no longer ours
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(old))
            connection.execute(sql.SQL("ALTER TABLE {} RENAME TO {}").format(new, old))
            connection.execute(sql.SQL("ALTER INDEX IF EXISTS {} RENAME TO {}").format(*graphs))
            _comment(connection, table, asdict(self.facts))

        try:
            self._database.do(swap)
        except BadInput as error:
            raise BadInput(f"{error}; the new index is complete in table {self._label}") from error
        self._table, self._label, self._becomes = old, table, None

    def search(self, queries: Vectors, k: int) -> list[list[_Hit]]:
        source: sql.Composable = self._table
        candidates = min(_MOST_CANDIDATES, _OVERSAMPLE * k)
        if self.facts.precision == "binary":
            source = sql.SQL(
                "(SELECT text, embedding FROM {} ORDER BY binary_quantize(embedding)::bit({width}) <~> "
                "binary_quantize(%(query)s::vector)::bit({width}) LIMIT {}) AS candidates"
            ).format(self._table, sql.Literal(candidates), width=sql.Literal(self.dimensions))
        query = sql.SQL(
            "SELECT text, 1 - (embedding <=> %(query)s::vector) FROM {} "
            "ORDER BY embedding <=> %(query)s::vector LIMIT %(k)s"
        ).format(source)

        def find(connection: _Connection) -> list[list[_Hit]]:
            register_vector(connection)
            connection.execute(sql.SQL("SET LOCAL hnsw.ef_search = {}").format(sql.Literal(candidates)))
            found = []
            for vector in queries:
                rows = connection.execute(query, {"query": Vector(vector), "k": k}).fetchall()
                found.append([_Hit(text=text, score=float(score)) for text, score in rows])
            return found

        return self._database.do(find)

    def close(self) -> None:
        self._database.close()


def _application(build: str) -> str:
    return f"{APPLICATION} {build}"


def _suffixed(name: str, suffix: str) -> str:
    """Return a name with a suffix, shortened so that Postgres does not cut the suffix off."""
    raw, room = name.encode(), _LONGEST_NAME - len(suffix.encode())
    if len(raw) > room:
        mark = f"_{blake2b(raw, digest_size=4).hexdigest()}"
        name = raw[: room - len(mark)].decode("utf-8", "ignore") + mark
    return name + suffix


def _make_table(connection: _Connection, table: str, facts: _Facts, note: Mapping[str, Any]) -> int:
    """Create a table and return its object id, which a new name does not change."""
    columns = sql.SQL(
        "CREATE TABLE {} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "key bytea NOT NULL UNIQUE, text text NOT NULL, embedding vector({}) NOT NULL)"
    )
    connection.execute(columns.format(sql.Identifier(table), sql.Literal(facts.dimensions)))
    _comment(connection, table, note)
    return _oid_of(connection, table)


def _comment(connection: _Connection, table: str, note: Mapping[str, Any]) -> None:
    text = sql.Literal(json.dumps(note))
    connection.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(sql.Identifier(table), text))


def _oid_of(connection: _Connection, table: str) -> int:
    """Return the object id of a table, or 0 if it does not exist."""
    row = connection.execute("SELECT coalesce(to_regclass(quote_ident(%s))::oid, 0)", [table]).fetchone()
    return 0 if row is None else int(row[0])


def _check_droppable(connection: _Connection, table: str) -> None:
    """Reject a table that can't be dropped in the end, because of a view or a missing permission."""
    try:
        with connection.transaction(force_rollback=True):
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(table)))
    except (psycopg.errors.DependentObjectsStillExist, psycopg.errors.InsufficientPrivilege) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"table {table} can't be replaced ({reason}); choose another with --table") from error


def _drop_abandoned(connection: _Connection, table: str) -> None:
    """Drop what killed builds left, which were to replace this table; theirs is no connection any more."""
    rows = connection.execute(
        "SELECT relname, obj_description(oid, 'pg_class') FROM pg_class WHERE relkind = 'r' "
        "AND pg_table_is_visible(oid) AND obj_description(oid, 'pg_class') LIKE '{%\"replaces\"%'"
    ).fetchall()
    live = {
        name for (name,) in connection.execute("SELECT application_name FROM pg_stat_activity").fetchall()
    }
    for name, note in rows:
        try:
            content = json.loads(note)
            left = content["replaces"] == table and _application(content["build"]) not in live
        except (ValueError, LookupError, TypeError):
            continue
        if left:
            with suppress(psycopg.Error), connection.transaction():
                connection.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(name)))


def _facts_of(connection: _Connection, table: str) -> _Facts | None:
    """Return the settings of a table, or None if it does not exist."""
    row = connection.execute(
        "SELECT obj_description(to_regclass(quote_ident(%s)), 'pg_class'), "
        "to_regclass(quote_ident(%s)) IS NOT NULL",
        [table, table],
    ).fetchone()
    note, there = row or (None, False)
    if not there:
        return None
    try:
        content = json.loads(note or "")
        return _Facts(**{name: value for name, value in content.items() if name not in ("replaces", "build")})
    except (ValueError, TypeError, AttributeError) as error:
        raise BadInput(f"table {table} was not made by trundle; choose another with --table") from error
