"""Read a table of LanceDB, in a folder or a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trundle.index.flat_files import _arrow_columns, _arrow_raw, _ArrowColumns
from trundle.index.rows import _BATCH_ROWS, IndexReader, Metric, _explained, _import, _Places, _RawRows, _Wish

_METRICS: dict[str, Metric] = {"cosine": "cosine", "dot": "inner product", "l2": "l2"}


class _LanceReader(IndexReader):
    """Reads the version of the table that is the latest when it is opened."""

    def __init__(self, place: str, wish: _Wish) -> None:
        client = _import("lancedb", "an index in LanceDB", "lancedb")
        with _explained(place):
            database = client.connect(place)
            name = wish.table_of(_tables(database), "table", place)
            self._table = database.open_table(name)
            self._table.checkout(self._table.version)
            where = f"{place}, table {name}"
            self._columns: _ArrowColumns = _arrow_columns(self._table.schema, wish, where)
            count, metric = self._table.count_rows(), self._metric()
            width = self._columns.width or self._first_width()
        super().__init__(where, count=count, width=width, metric=metric)

    def _metric(self) -> Metric:
        """Return what the vectors are indexed for; without an index, LanceDB's default is L2."""
        for index in self._table.list_indices():
            if self._columns.vector in index.columns and (stats := self._table.index_stats(index.name)):
                return _METRICS.get(str(stats.distance_type).lower(), "l2")
        return "l2"

    def _first_width(self) -> int:
        rows = self._table.search().select([self._columns.vector]).limit(1).to_arrow()
        return len(rows.column(0)[0].as_py() or [0]) if len(rows) else 1

    def _scan(self, first: int) -> Iterator[_RawRows]:
        query: Any = self._table.search().select(self._columns.names).offset(first)
        for batch in query.to_batches(_BATCH_ROWS):
            yield _arrow_raw(batch, self._columns, first)
            first += len(batch)

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        for start in range(0, len(places), _BATCH_ROWS):
            chosen = places[start : start + _BATCH_ROWS]
            found = self._table.take_offsets(chosen.tolist()).select(self._columns.names).to_arrow()
            for batch in found.combine_chunks().to_batches():
                yield _arrow_raw(batch, self._columns, chosen)


def _tables(database: Any) -> list[str]:
    names: list[str] = []
    token = None
    while True:
        page = database.list_tables(page_token=token)
        names += page.tables
        token = page.page_token
        if not token:
            return names
