"""Read a collection of Qdrant, on a server or in the folder of its local mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trundle.errors import BadInput
from trundle.index.rows import _BATCH_ROWS, IndexReader, Metric, _field, _fields, _import, _RawRows, _Wish

_METRICS: dict[str, Metric] = {"Cosine": "cosine", "Dot": "inner product", "Euclid": "l2"}
_LOOKED_AT = 20
_LOCAL_ROWS = 4 * _BATCH_ROWS
"""The local mode sorts all points for each page, so its pages are larger."""
_TIMEOUT_SECONDS = 60


class _QdrantReader(IndexReader):
    """Reads points with `scroll`, and chosen ones with `retrieve`."""

    def __init__(self, place: str, wish: _Wish, *, key: str | None = None, **address: Any) -> None:
        """`address` is the `path` or `url` of the client."""
        client = _import("qdrant_client", "an index in Qdrant", "qdrant")
        self._local = "path" in address
        with self._opening(place, hide=key):
            # Its own check of versions fails in a thread, with a traceback, if the server is away.
            self._client = client.QdrantClient(
                **address, api_key=key, timeout=_TIMEOUT_SECONDS, check_compatibility=False
            )
            names = [each.name for each in self._client.get_collections().collections]
            self._collection = wish.table_of(names, "collection", place)
            where = f"{place}, collection {self._collection}"
            stored = self._client.get_collection(self._collection).config.params.vectors
            self._vector, params = _vector_of(stored, wish, where)
            count = self._count()
            points = self._client.scroll(self._collection, limit=_LOOKED_AT, with_vectors=False)[0]
            self._text = wish.texts_of(_fields(point.payload for point in points), where) if count else ""
            metric = getattr(params.distance, "value", params.distance)
            by = self._known_metric(metric, _METRICS, where)
            super().__init__(where, count=count, width=params.size, metric=by, secret=key)

    def _count(self) -> int:
        return int(self._client.count(self._collection, exact=True).count)

    def _pages(self, size: int, *, ids_only: bool, offset: Any = None) -> Iterator[Sequence[Any]]:
        """Yield the points from the one with the id `offset` on, in the order of their ids."""
        wanted = (False, False) if ids_only else ([self._text], [self._vector] if self._vector else True)
        while True:
            points, offset = self._client.scroll(
                self._collection, limit=size, offset=offset, with_payload=wanted[0], with_vectors=wanted[1]
            )
            if points:
                yield points
            if offset is None:
                return

    def _scan(self, first: int) -> Iterator[_RawRows]:
        size = _LOCAL_ROWS if self._local else _BATCH_ROWS
        for points in self._pages(size, ids_only=False, offset=self._id_at(first) if first else None):
            yield self._raw(points)

    def _id_pages(self, size: int) -> Iterator[Sequence[Any]]:
        for points in self._pages(self.count if self._local else size, ids_only=True):
            yield [point.id for point in points]

    def _fetch(self, ids: list[Any]) -> _RawRows:
        vectors = [self._vector] if self._vector else True
        return self._raw(
            self._client.retrieve(self._collection, ids=ids, with_payload=[self._text], with_vectors=vectors)
        )

    def _raw(self, points: Sequence[Any]) -> _RawRows:
        found = [point.vector for point in points]
        vectors = [(one or {}).get(self._vector) for one in found] if self._vector else found
        texts = [_field(point.payload or {}, self._text) for point in points]
        return _RawRows([point.id for point in points], texts, vectors)


def _vector_of(stored: Any, wish: _Wish, where: str) -> tuple[str, Any]:
    """Return the name of the vectors, empty for the unnamed ones, and their settings."""
    if not isinstance(stored, dict):
        if wish.vectors or stored is None:
            raise BadInput(f"{where} has no named dense vectors; leave out its name, or name another place")
        name, params = "", stored
    else:
        name = wish.vectors_of(list(stored), "vector", where)
        params = stored[name]
    if getattr(params, "multivector_config", None) is not None:
        raise BadInput(f"{where} stores several vectors for each point; only one for each can be read")
    return name, params
