"""Read a collection of Qdrant, on a server or in the folder of its local mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from trundle.errors import BadInput
from trundle.index.rows import (
    _BATCH_ROWS,
    Metric,
    _chosen_ids,
    _explained,
    _field,
    _fields,
    _imported,
    _one_of,
    _Places,
    _RawRows,
    _RowReader,
    _text_column,
    _Wish,
)

_METRICS: dict[str, Metric] = {"Cosine": "cosine", "Dot": "inner product", "Euclid": "l2"}
_LOOKED_AT = 20
_IDS_AT_ONCE = 10_000
_LOCAL_ROWS = 4 * _BATCH_ROWS
"""The local mode sorts all points for each page, so its pages are larger."""
_TIMEOUT_SECONDS = 60


class _QdrantReader(_RowReader):
    """Reads points with `scroll`, and chosen ones with `retrieve`."""

    def __init__(self, place: str, wish: _Wish, *, key: str | None = None, **address: Any) -> None:
        """`address` is the `path` or `url` of the client."""
        client = _imported("qdrant_client", "an index in Qdrant", "qdrant")
        self._local = "path" in address
        with _explained(place, hide=key):
            # Its own check of versions fails in a thread, with a traceback, if the server is away.
            self._client = client.QdrantClient(
                **address, api_key=key, timeout=_TIMEOUT_SECONDS, check_compatibility=False
            )
        try:
            with _explained(place, hide=key):
                names = [each.name for each in self._client.get_collections().collections]
                self._collection = _one_of(names, wish.table, "collection", place, "--table")
                where = f"{place}, collection {self._collection}"
                stored = self._client.get_collection(self._collection).config.params.vectors
                self._vector, params = _vector_of(stored, wish.vectors, where)
                count = self._client.count(self._collection, exact=True).count
                payloads = [point.payload or {} for point in self._some(_LOOKED_AT)]
                self._text = _text_column(_fields(payloads), wish.texts, where) if count else ""
            metric = getattr(params.distance, "value", params.distance)
            if metric not in _METRICS:
                raise BadInput(f"{where} searches by {metric}; only {', '.join(_METRICS)} are supported")
            super().__init__(where, count=count, width=params.size, metric=_METRICS[metric], secret=key)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the client, which unlocks a folder."""
        self._client.close()

    def _some(self, count: int) -> Sequence[Any]:
        points: Sequence[Any] = self._client.scroll(self._collection, limit=count, with_vectors=False)[0]
        return points

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
        start = next(islice(chain.from_iterable(self._ids()), first, None), None) if first else None
        for points in self._pages(size, ids_only=False, offset=start):
            yield self._raw(points)

    def _ids(self) -> Iterator[list[Any]]:
        ids_at_once = self.count if self._local else _IDS_AT_ONCE
        return ([point.id for point in page] for page in self._pages(ids_at_once, ids_only=True))

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        def fetch(ids: list[Any]) -> _RawRows:
            vectors = [self._vector] if self._vector else True
            points = self._client.retrieve(
                self._collection, ids=ids, with_payload=[self._text], with_vectors=vectors
            )
            return self._raw(points)

        yield from _chosen_ids(self._ids(), places, fetch)

    def _raw(self, points: Sequence[Any]) -> _RawRows:
        found = [point.vector for point in points]
        vectors = [(one or {}).get(self._vector) for one in found] if self._vector else found
        texts = [_field(point.payload or {}, self._text) for point in points]
        return _RawRows([point.id for point in points], texts, vectors)


def _vector_of(stored: Any, wanted: str | None, where: str) -> tuple[str, Any]:
    """Return the name of the vectors, empty for the unnamed ones, and their settings."""
    if not isinstance(stored, dict):
        if wanted or stored is None:
            raise BadInput(f"{where} has no named dense vectors; leave out --vectors, or name another place")
        name, params = "", stored
    else:
        name = _one_of(list(stored), wanted, "vector", where, "--vectors")
        params = stored[name]
    if getattr(params, "multivector_config", None) is not None:
        raise BadInput(f"{where} stores several vectors for each point; only one for each can be read")
    return name, params
