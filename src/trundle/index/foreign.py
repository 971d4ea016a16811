"""Tables of a database that somebody else filled: they are only read, in a transaction that can't write."""

from __future__ import annotations

from typing import Any

import numpy as np
from psycopg import sql

from trundle.errors import BadInput
from trundle.index.connection import (
    _AT_THE_DOOR,
    _COLUMNS,
    _PATIENCE,
    _Connection,
    _find_place,
    _Link,
    _only_row,
    _Place,
)
from trundle.index.contract import _Sample
from trundle.progress import SILENT, Progress

_SPARSE = 10
"""Where the table has this many times the rows wanted, a part of it is drawn before it is sorted."""


class _ForeignTable:
    """A table that somebody else filled: it is only read."""

    def __init__(self, link: _Link, place: _Place, dimensions: int) -> None:
        self._link = link
        self._place = place
        self._dimensions = dimensions

    @property
    def name(self) -> str:
        """Where it is, without the password."""
        return f"{self._link.name}, table {self._place.table}"

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self._dimensions

    def sample(self, count: int, seed: int) -> _Sample:
        """Up to `count` texts drawn evenly."""
        return _draw_sample(self._link, self._place, count, seed)

    def close(self) -> None:
        """Hang up."""
        self._link.close()


def _open_table(
    url: str,
    *,
    table: str | None = None,
    text_column: str | None = None,
    vector_column: str | None = None,
    patience: float = _PATIENCE,
    progress: Progress = SILENT,
) -> _ForeignTable:
    """Whatever table holds texts and vectors."""
    link = _Link(url, read_only=True, patience=patience, progress=progress)
    found = link.do(
        lambda connection: connection.execute(_COLUMNS).fetchall(), patience=min(patience, _AT_THE_DOOR)
    )
    columns = [(str(one), str(two), str(three), str(four)) for one, two, three, four in found]
    try:
        place = _find_place(columns, table=table, text=text_column, vector=vector_column)
    except BadInput:
        link.close()
        raise
    one = _draw_sample(link, place, 1, 0)
    if not one.texts:
        link.close()
        raise BadInput(f"table {place.table} holds no text with a vector; fill it first")
    return _ForeignTable(link, place, one.vectors.shape[1])


def _draw_sample(link: _Link, place: _Place, count: int, seed: int) -> _Sample:
    """Up to `count` rows of a table that have a text and a vector, drawn evenly."""
    table = sql.Identifier(place.schema, place.table) if place.schema else sql.Identifier(place.table)
    text, vector = sql.Identifier(place.text), sql.Identifier(place.vector)
    whole = sql.SQL(" FROM {table} WHERE {text} <> '' AND {vector} IS NOT NULL").format(
        table=table, text=text, vector=vector
    )

    def draw(connection: _Connection) -> tuple[int, list[tuple[Any, ...]]]:
        total = int(_only_row(connection.execute(sql.SQL("SELECT count(*)") + whole))[0])
        source: sql.Composable = table
        if total > _SPARSE * count and count > 1:
            percent = min(100.0, 200.0 * count / total)
            source = sql.SQL("{} TABLESAMPLE BERNOULLI ({}) REPEATABLE ({})").format(
                table, sql.Literal(percent), sql.Literal(seed)
            )
        connection.execute("SELECT setseed(%s)", [1 / (2 + seed)])
        query = sql.SQL(
            "SELECT {text}, {vector}::text FROM {source} WHERE {text} <> '' AND {vector} IS NOT NULL "
            "ORDER BY random() LIMIT {count}"
        ).format(text=text, vector=vector, source=source, count=sql.Literal(count))
        return total, connection.execute(query).fetchall()

    total, rows = link.do(draw)
    vectors = [np.fromstring(stored[1:-1], sep=",", dtype=np.float32) for _, stored in rows]
    if len({len(vector) for vector in vectors}) > 1:
        raise BadInput(f"table {place.table} holds vectors of several widths; choose another with --table")
    array = np.stack(vectors) if vectors else np.empty((0, 0), dtype=np.float32)
    return _Sample(texts=tuple(text for text, _ in rows), vectors=array, total=total)
