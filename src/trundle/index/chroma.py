"""Read a collection of Chroma, on a server or in a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trundle.index.rows import _BATCH_ROWS, IndexReader, Metric, _explained, _fields, _import, _RawRows, _Wish

_METRICS: dict[str, Metric] = {"cosine": "cosine", "ip": "inner product", "l2": "l2"}
_DOCUMENT = "document"
_LOOKED_AT = 20


class _ChromaReader(IndexReader):
    """Reads records with `get`, whose text is their document or a field of their metadata."""

    def __init__(
        self,
        place: str,
        wish: _Wish,
        *,
        folder: str | None = None,
        server: tuple[str, int, bool] | None = None,
        key: str | None = None,
    ) -> None:
        """Either `folder` or `server`: a host, a port, and whether it uses TLS."""
        chroma = _import("chromadb", "an index in Chroma", "chroma")
        with _explained(place, hide=key):
            if server is None:
                client = chroma.PersistentClient(folder)
            else:
                headers = {"x-chroma-token": key, "Authorization": f"Bearer {key}"} if key else None
                host, port, secure = server
                client = chroma.HttpClient(host=host, port=port, ssl=secure, headers=headers)
            names = [each.name for each in client.list_collections()]
            name = wish.table_of(names, "collection", place)
            # The function that embeds queries is not needed, and may ask for a key.
            self._collection = client.get_collection(name, embedding_function=None)
            where = f"{place}, collection {name}"
            some = self._collection.get(limit=_LOOKED_AT, include=["documents", "metadatas", "embeddings"])
        there = [_DOCUMENT] if any(some["documents"] or ()) else []
        there += [name for name in _fields(some["metadatas"] or ()) if name not in there]
        count = self._collection.count()
        self._text = wish.texts_of(there, where) if count else ""
        super().__init__(
            where,
            count=count,
            width=len(some["embeddings"][0]) if count else 1,
            metric=_metric(self._collection),
            secret=key,
        )

    def _count(self) -> int:
        return int(self._collection.count())

    def _scan(self, first: int) -> Iterator[_RawRows]:
        for start in range(first, self.count, _BATCH_ROWS):
            yield self._raw(limit=_BATCH_ROWS, offset=start)

    def _id_pages(self, size: int) -> Iterator[Sequence[Any]]:
        for first in range(0, self.count, size):
            yield self._collection.get(limit=size, offset=first, include=[])["ids"]

    def _fetch(self, ids: list[Any]) -> _RawRows:
        return self._raw(ids=ids)

    def _raw(self, **which: Any) -> _RawRows:
        source = "documents" if self._text == _DOCUMENT else "metadatas"
        found = self._collection.get(**which, include=[source, "embeddings"])
        texts = found[source]
        if source == "metadatas":
            texts = [(each or {}).get(self._text) for each in texts]
        return _RawRows(found["ids"], texts, found["embeddings"])


def _metric(collection: Any) -> Metric:
    """Return what the collection searches by; Chroma's default is L2."""
    settings = collection.configuration or {}
    graph = settings.get("hnsw") or settings.get("spann") or {}
    space = graph.get("space") or (collection.metadata or {}).get("hnsw:space")
    return _METRICS.get(str(space), "l2")
