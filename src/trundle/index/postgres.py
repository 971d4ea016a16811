"""A store in Postgres with pgvector; each part is stored whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from trundle.embedder import Vectors
from trundle.errors import BadInput, MissingExtra
from trundle.index.connection import _AT_THE_DOOR, _PATIENCE, _Connection, _Link, _only_row, _Place
from trundle.index.contract import (
    _EXACT_UP_TO,
    _OVERSAMPLE,
    Wanted,
    _agreed,
    _Facts,
    _Found,
    _key_of,
    _Sample,
)
from trundle.index.foreign import _draw_sample
from trundle.progress import SILENT, Progress

try:
    from pgvector import Vector
    from pgvector.psycopg import register_vector
    from psycopg import sql
except ImportError as error:
    raise MissingExtra("an index in Postgres", "index") from error

_WIDEST_GRAPH = {"float": 2000, "binary": 64_000}
_BESIDE = "_beside"
"""Ends the name of a table that is being built to take another one's place."""
_MOST_CANDIDATES = 1000
"""pgvector's own limit for what its graph looks at."""


class _PostgresStore:
    """One table of ours."""

    def __init__(
        self,
        link: _Link,
        table: str,
        facts: _Facts,
        *,
        becomes: str | None = None,
        exact_up_to: int,
        progress: Progress,
    ) -> None:
        self._link = link
        self._table = sql.Identifier(table)
        self._label = table
        self._facts = facts
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
        patience: float = _PATIENCE,
        exact_up_to: int = _EXACT_UP_TO,
        progress: Progress = SILENT,
    ) -> _PostgresStore:
        """A table to add to; one that is there already must be ours and of the same kind."""
        facts = wanted.facts
        if facts.precision == "int8":
            raise BadInput("pgvector has no vectors of 8 bits; choose --precision float or binary")
        link = _Link(url, read_only=False, patience=patience, progress=progress)

        built = f"{table}{_BESIDE}" if force else table

        def make(connection: _Connection) -> _Facts:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            there = _facts_of(connection, table)
            if force:
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(built)))
            elif there is not None:
                return _agreed(there, wanted, f"table {table}")
            _make_table(connection, built, facts)
            return facts

        settled = link.do(make, patience=min(patience, _AT_THE_DOOR))
        becomes = table if force else None
        return cls(link, built, settled, becomes=becomes, exact_up_to=exact_up_to, progress=progress)

    @classmethod
    def open(
        cls,
        url: str,
        table: str,
        *,
        patience: float = _PATIENCE,
        exact_up_to: int = _EXACT_UP_TO,
        progress: Progress = SILENT,
    ) -> _PostgresStore:
        """A table of ours to search."""
        link = _Link(url, read_only=True, patience=patience, progress=progress)
        facts = link.do(lambda connection: _facts_of(connection, table), patience=min(patience, _AT_THE_DOOR))
        if facts is None:
            link.close()
            raise BadInput(f"there is no table {table} yet; build it with trundle index build")
        return cls(link, table, facts, exact_up_to=exact_up_to, progress=progress)

    @property
    def name(self) -> str:
        """Where it is, without the password."""
        return f"{self._link.name}, table {self._label}"

    @property
    def facts(self) -> _Facts:
        """What it was told when it was made."""
        return self._facts

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self._facts.dimensions

    def count(self) -> int:
        """How many texts there are."""
        query = sql.SQL("SELECT count(*) FROM {}").format(self._table)
        return self._link.do(lambda connection: int(_only_row(connection.execute(query))[0]))

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those that are not stored yet, each once."""
        keys = {_key_of(text): text for text in texts}
        query = sql.SQL("SELECT key FROM {} WHERE key = ANY(%s)").format(self._table)
        there = self._link.do(lambda connection: connection.execute(query, [list(keys)]).fetchall())
        for (key,) in there:
            keys.pop(bytes(key), None)
        return list(keys.values())

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Store texts with their vectors; a text that somebody else stored meanwhile is left as it is."""
        clean = [text.replace("\x00", "") for text in texts]  # Postgres has no NUL in texts
        query = sql.SQL(
            "INSERT INTO {} (key, text, embedding) VALUES (%s, %s, %s) ON CONFLICT (key) DO NOTHING"
        ).format(self._table)
        rows = [
            (_key_of(text), stored, Vector(vector))
            for text, stored, vector in zip(texts, clean, vectors, strict=True)
        ]

        def insert(connection: _Connection) -> None:
            register_vector(connection)
            with connection.cursor() as cursor:
                cursor.executemany(query, rows)

        self._link.do(insert)

    def finish(self) -> None:
        """Build pgvector's graph over a large table, and put a new table in the old one's place."""
        width, precision = self.dimensions, self._facts.precision
        if self.count() > self._exact_up_to and width <= _WIDEST_GRAPH[precision]:
            what: sql.Composable = sql.SQL("(embedding vector_cosine_ops)")
            if precision == "binary":
                bits = sql.SQL("((binary_quantize(embedding)::bit({})) bit_hamming_ops)")
                what = bits.format(sql.Literal(width))
            query = sql.SQL("CREATE INDEX IF NOT EXISTS {} ON {} USING hnsw {}").format(
                sql.Identifier(f"{self._label}_graph"), self._table, what
            )
            self._progress.say("building the graph in Postgres")
            self._link.do(lambda connection: connection.execute(query))
        if self._becomes is not None:
            self._take_place(self._becomes)

    def _take_place(self, table: str) -> None:
        old, new = sql.Identifier(table), self._table
        graphs = sql.Identifier(f"{self._label}_graph"), sql.Identifier(f"{table}_graph")

        def swap(connection: _Connection) -> None:
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(old))
            connection.execute(sql.SQL("ALTER TABLE IF EXISTS {} RENAME TO {}").format(new, old))
            connection.execute(sql.SQL("ALTER INDEX IF EXISTS {} RENAME TO {}").format(*graphs))

        self._link.do(swap)
        self._table, self._label, self._becomes = old, table, None

    def search(self, queries: Vectors, k: int) -> list[list[_Found]]:
        """The k nearest texts of each query by cosine, best first."""
        source: sql.Composable = self._table
        candidates = min(_MOST_CANDIDATES, _OVERSAMPLE * k)
        if self._facts.precision == "binary":
            source = sql.SQL(
                "(SELECT text, embedding FROM {} ORDER BY binary_quantize(embedding)::bit({width}) <~> "
                "binary_quantize(%(query)s::vector)::bit({width}) LIMIT {}) AS candidates"
            ).format(self._table, sql.Literal(candidates), width=sql.Literal(self.dimensions))
        query = sql.SQL(
            "SELECT text, 1 - (embedding <=> %(query)s::vector) FROM {} "
            "ORDER BY embedding <=> %(query)s::vector LIMIT %(k)s"
        ).format(source)

        def look(connection: _Connection) -> list[list[_Found]]:
            register_vector(connection)
            connection.execute(sql.SQL("SET LOCAL hnsw.ef_search = {}").format(sql.Literal(candidates)))
            found = []
            for vector in queries:
                rows = connection.execute(query, {"query": Vector(vector), "k": k}).fetchall()
                found.append([_Found(text=text, score=float(score)) for text, score in rows])
            return found

        return self._link.do(look)

    def sample(self, count: int, seed: int) -> _Sample:
        """Up to `count` texts drawn evenly."""
        place = _Place(schema="", table=self._label, text="text", vector="embedding")
        return _draw_sample(self._link, place, count, seed)

    def close(self) -> None:
        """Hang up."""
        self._link.close()


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
    """What a table of ours was told; None where there is no table."""
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
