"""Read a collection of Milvus, on a server or in the folder of Milvus Lite."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trundle.index.rows import _BATCH_ROWS, IndexReader, Metric, _fields, _import, _RawRows, _Wish

_METRICS: dict[str, Metric] = {"COSINE": "cosine", "IP": "inner product", "L2": "l2"}
_VECTOR_TYPES = ("FLOAT_VECTOR", "FLOAT16_VECTOR", "BFLOAT16_VECTOR", "INT8_VECTOR")
_LOOKED_AT = 20


class _MilvusReader(IndexReader):
    """Reads entities with the client's query iterator, and chosen ones with `get`."""

    def __init__(self, place: str, wish: _Wish, *, uri: str, key: str | None = None) -> None:
        client = _import("pymilvus", "an index in Milvus", "milvus")
        # The client prints a traceback of each error that it raises.
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
        with self._opening(place, hide=key):
            self._client = client.MilvusClient(uri, token=key or "")
            names = self._client.list_collections()
            self._collection = wish.table_of(names, "collection", place)
            where = f"{place}, collection {self._collection}"
            width = self._look(wish, where)
            super().__init__(where, count=self._count(), width=width, metric=self._metric(), secret=key)

    def _look(self, wish: _Wish, where: str) -> int:
        """Choose the fields, and return the width of the vectors."""
        fields = {each["name"]: each for each in self._client.describe_collection(self._collection)["fields"]}
        vectors = [name for name, each in fields.items() if each["type"].name in _VECTOR_TYPES]
        self._vector = wish.vectors_of(vectors, "field of dense vectors", where)
        self._key = next(name for name, each in fields.items() if each.get("is_primary"))
        self._kind = fields[self._vector]["type"].name
        self._client.load_collection(self._collection)
        others = [name for name in fields if name not in vectors]
        some = self._client.query(self._collection, filter="", limit=_LOOKED_AT, output_fields=[*others, "*"])
        there = [name for name in _fields(some) if name != self._key or name == wish.texts]
        self._text = wish.texts_of(there, where) if some else ""
        return int(fields[self._vector]["params"]["dim"])

    def _metric(self) -> Metric:
        for name in self._client.list_indexes(self._collection, field_name=self._vector):
            metric = self._client.describe_index(self._collection, name).get("metric_type", "COSINE")
            return self._known_metric(metric, _METRICS, self._collection)
        return "cosine"

    def _count(self) -> int:
        rows = self._client.query(self._collection, filter="", output_fields=["count(*)"])
        return int(rows[0]["count(*)"])

    def _pages(self, size: int, fields: list[str], which: str = "") -> Iterator[Sequence[Any]]:
        """Yield the entities in the order of their keys."""
        iterator = self._client.query_iterator(
            self._collection, batch_size=size, filter=which, output_fields=fields
        )
        try:
            while rows := iterator.next():
                yield rows
        finally:
            iterator.close()

    def _scan(self, first: int) -> Iterator[_RawRows]:
        which = f"{self._key} > {json.dumps(self._id_at(first - 1))}" if first else ""
        for rows in self._pages(_BATCH_ROWS, [self._key, self._text, self._vector], which):
            yield self._raw(rows)

    def _id_pages(self, size: int) -> Iterator[Sequence[Any]]:
        for rows in self._pages(size, [self._key]):
            yield [row[self._key] for row in rows]

    def _fetch(self, ids: list[Any]) -> _RawRows:
        fields = [self._key, self._text, self._vector]
        return self._raw(self._client.get(self._collection, ids=ids, output_fields=fields))

    def _raw(self, rows: Sequence[Any]) -> _RawRows:
        vectors = [self._decoded(row.get(self._vector)) for row in rows]
        return _RawRows([row[self._key] for row in rows], [row.get(self._text) for row in rows], vectors)

    def _decoded(self, value: Any) -> Any:
        """Return a vector that may be stored as 16-bit floats or bytes."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
            value = value[0]
        if not isinstance(value, bytes):
            return value
        if self._kind == "BFLOAT16_VECTOR":
            return (np.frombuffer(value, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
        return np.frombuffer(value, dtype="<f2" if self._kind == "FLOAT16_VECTOR" else np.int8)
