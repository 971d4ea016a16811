"""Read a table of sqlite-vec, with its texts in the same table or in one joined by the row's number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trundle.errors import BadInput
from trundle.index.rows import _BATCH_ROWS, IndexReader, Metric, _import, _listed, _one_of, _RawRows, _Wish

_VECTOR = re.compile(r"([\w]+)\s+(float|f32|int8|i8)\s*\[(\d+)\]([^,]*)", re.IGNORECASE)
_TEXT = re.compile(r"[+]?\s*\"?(\w+)\"?\s+text\b", re.IGNORECASE)
_METRICS: dict[str, Metric] = {"cosine": "cosine", "l2": "l2"}
_LOOKUP = 500
_ROWS_IN_CHUNK = 1024
"""Rows whose vectors sqlite-vec stores in one place, unless the table says otherwise."""
_CACHE_KIB = 2048


class _SqliteVecReader(IndexReader):
    """Reads rows of a `vec0` table; a lookup by row number does not scan it."""

    def __init__(self, path: Path, wish: _Wish) -> None:
        # Many builds of Python have a sqlite3 that can't load extensions.
        apsw = _import("apsw", "an index of sqlite-vec", "sqlite-vec")
        extension = _import("sqlite_vec", "an index of sqlite-vec", "sqlite-vec")
        with self._opening(str(path)):
            self._client = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            self._client.enable_load_extension(True)
            self._client.load_extension(extension.loadable_path())
            self._client.enable_load_extension(False)
            declared = "SELECT name, sql FROM sqlite_master WHERE sql LIKE '%USING vec0%'"
            tables = {str(name): str(text) for name, text in self._client.execute(declared)}
            table = wish.table_of(list(tables), "table of sqlite-vec", str(path))
            where = f"{path}, table {table}"
            count = int(self._one(f"SELECT count(*) FROM {_quoted(table)}"))
            self._table, body = _quoted(table), tables[table].partition("(")[2]
            width, metric = self._vectors(body, wish, where)
            # A chunk of wide vectors is larger than SQLite's own cache: each row would read it again.
            self._client.execute(f"PRAGMA cache_size = -{_ROWS_IN_CHUNK * width * 4 // 1024 + _CACHE_KIB}")
            self._choose_texts(body, list(tables), wish, where)
            super().__init__(where, count=count, width=width, metric=metric)

    def _one(self, query: str) -> Any:
        return next(iter(self._client.execute(query)))[0]

    def _vectors(self, body: str, wish: _Wish, where: str) -> tuple[int, Metric]:
        found = {name: (kind, width, rest) for name, kind, width, rest in _VECTOR.findall(body)}
        name = wish.vectors_of(list(found), "column of float or int8 vectors", where)
        kind, width, rest = found[name]
        self._vector, self._kind = _quoted(name), "<f4" if kind.lower() in ("float", "f32") else "i1"
        metric = re.search(r"distance_metric\s*=\s*(\w+)", rest, re.IGNORECASE)
        asked = metric.group(1).lower() if metric else "l2"
        return int(width), self._known_metric(asked, _METRICS, where)

    def _choose_texts(self, body: str, tables: Sequence[str], wish: _Wish, where: str) -> None:
        """Choose a column of the table itself, or `table.column` of another one."""
        wanted = wish.texts
        own = [name for name in _TEXT.findall(body) if name.lower() not in ("partition", "primary")]
        if own and (wanted is None or "." not in wanted):
            self._join, self._text = "", f"v.{_quoted(wish.texts_of(own, where))}"
            return
        others = {
            f"{table}.{column}": (str(table), str(column))
            for table, column in self._client.execute(
                "SELECT m.name, c.name FROM sqlite_master m JOIN pragma_table_info(m.name) c "
                "WHERE m.type = 'table' AND (c.type LIKE '%TEXT%' OR c.type LIKE '%CHAR%')"
            )
            if not any(table == vec or str(table).startswith(f"{vec}_") for vec in tables)
        }
        named = [one for one in others if wanted in (None, one, others[one][1])]
        if not named and wanted is not None:
            there = _listed([*own, *others])
            raise BadInput(f"{where} has no column of texts {wanted!r}; pass one of: {there}")
        if wanted is None and len(named) > 1:
            usual = wish.texts_of([others[one][1] for one in named], where)
            named = [one for one in named if others[one][1] == usual]
        name = _one_of(named, None, "column of texts", where, "--text-column")
        table, column = map(_quoted, others[name])
        self._join, self._text = f" LEFT JOIN {table} t ON t.rowid = v.rowid", f"t.{column}"

    def _count(self) -> int:
        return int(self._one(f"SELECT count(*) FROM {self._table}"))

    def _scan(self, first: int) -> Iterator[_RawRows]:
        rows = self._client.execute(f"{self._query} LIMIT -1 OFFSET {first}" if first else self._query)
        while some := [row for _, row in zip(range(_BATCH_ROWS), rows, strict=False)]:
            yield self._raw(some)

    @property
    def _query(self) -> str:
        return f"SELECT v.rowid, {self._text}, v.{self._vector} FROM {self._table} v{self._join}"

    def _id_pages(self, size: int) -> Iterator[Sequence[Any]]:
        rows = self._client.execute(f"SELECT rowid FROM {self._table}")
        while some := [int(row[0]) for _, row in zip(range(size), rows, strict=False)]:
            yield some

    def _fetch(self, ids: list[Any]) -> _RawRows:
        found: list[Any] = []
        for start in range(0, len(ids), _LOOKUP):
            part = ids[start : start + _LOOKUP]
            chosen = f"{self._query} WHERE v.rowid IN ({','.join('?' * len(part))})"
            found += self._client.execute(chosen, part)
        return self._raw(found)

    def _raw(self, rows: Sequence[Any]) -> _RawRows:
        stored = b"".join(row[2] for row in rows)  # its tables take vectors of the declared width only
        vectors = np.frombuffer(stored, dtype=self._kind).reshape(len(rows), -1)
        return _RawRows([row[0] for row in rows], [row[1] for row in rows], vectors)


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
