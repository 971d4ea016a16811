"""An index in Postgres with pgvector; each batch is added in one transaction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from trundle.embedder import Vectors
from trundle.errors import BadInput, MissingExtra
from trundle.index.base import _EXACT_UP_TO, _OVERSAMPLE, Wanted, _agreed, _Facts, _Hit, _key_of, _Sample
from trundle.index.connection import _RETRY_SECONDS, _Connection, _Database, _draw_sample, _TextColumns
from trundle.progress import SILENT, Progress

try:
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

_WIDEST_GRAPH = {"float": 2000, "binary": 64_000}
_NEW = "_new"
"""The suffix of a table that is being built to replace another one."""
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
        exact_up_to: int,
        progress: Progress,
    ) -> None:
        self._database = database
        self._table = sql.Identifier(table)
        self._label = table
        self.facts = facts
        self.dimensions = facts.dimensions
        self._becomes = becomes
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
        """Open a table to add to, created if needed; an existing one must have the same settings."""
        facts = wanted.facts
        if facts.precision == "int8":
            raise BadInput("pgvector has no int8 vectors; choose --precision float or binary")
        database = _Database(url, read_only=False, retry_seconds=retry_seconds, progress=progress)
        built = f"{table}{_NEW}" if force else table

        def make(connection: _Connection) -> _Facts:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            there = _facts_of(connection, table)
            if force:
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(built)))
            elif there is not None:
                return _agreed(there, wanted, f"table {table}")
            _make_table(connection, built, facts)
            return facts

        settled, becomes = database.do(make, first=True), table if force else None
        return cls(database, built, settled, becomes=becomes, exact_up_to=exact_up_to, progress=progress)

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
                sql.Identifier(f"{self._label}_graph"), self._table, what
            )
            self._progress.say("building the graph in Postgres")
            self._database.do(lambda connection: connection.execute(query))
        if self._becomes is not None:
            self._replace_table(self._becomes)

    def _replace_table(self, table: str) -> None:
        old, new = sql.Identifier(table), self._table
        graphs = sql.Identifier(f"{self._label}_graph"), sql.Identifier(f"{table}_graph")

        def swap(connection: _Connection) -> None:
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(old))
            connection.execute(sql.SQL("ALTER TABLE IF EXISTS {} RENAME TO {}").format(new, old))
            connection.execute(sql.SQL("ALTER INDEX IF EXISTS {} RENAME TO {}").format(*graphs))

        self._database.do(swap)
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

    def sample(self, count: int, seed: int) -> _Sample:
        columns = _TextColumns(schema="", table=self._label, text="text", vector="embedding")
        return _draw_sample(self._database, columns, count, seed)

    def close(self) -> None:
        self._database.close()


def _make_table(connection: _Connection, table: str, facts: _Facts) -> None:
    name = sql.Identifier(table)
    columns = sql.SQL(
        "CREATE TABLE {} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
        "key bytea NOT NULL UNIQUE, text text NOT NULL, embedding vector({}) NOT NULL)"
    )
    connection.execute(columns.format(name, sql.Literal(facts.dimensions)))
    note = sql.Literal(json.dumps(asdict(facts)))
    connection.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(name, note))


def _facts_of(connection: _Connection, table: str) -> _Facts | None:
    """Return the settings of a table, or None if it does not exist."""
    row = connection.execute(
        "SELECT obj_description(to_regclass(%s), 'pg_class'), to_regclass(%s) IS NOT NULL",
        [f'"{table}"', f'"{table}"'],
    ).fetchone()
    note, there = row or (None, False)
    if not there:
        return None
    try:
        return _Facts(**json.loads(note or ""))
    except (ValueError, TypeError) as error:
        raise BadInput(f"table {table} was not made by trundle; choose another with --table") from error
