"""Queries, documents and judgements: one retrieval task's data, and how a model fares on it.

The cautions that collections need are rules here, not names: see `Search.build`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from trundle.data import fingerprint
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.encoding import check_same_width
from trundle.evaluate.ranking import DEPTH, nearest, ranking_measures


@dataclass(frozen=True, kw_only=True)
class Search:
    """A collection ready to be searched; documents are known by their position."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    grades: tuple[Mapping[int, float], ...]  # per query: document → grade
    judged: tuple[tuple[float, ...], ...]  # per query: every grade given, of absent documents too
    own: tuple[int, ...]  # per query: the document that is the query itself, or −1
    note: str
    fingerprint: str

    @classmethod
    def build(
        cls,
        queries: Mapping[str, str],
        documents: Mapping[str, str],
        judgements: Iterable[tuple[str, str, float]],
        name: str,
    ) -> Search:
        """Put a collection in order.

        - Documents stand in descending order of their ids: so trec_eval orders those that score the same.
        - Judgements of unknown queries are dropped; those of unknown documents still count in the ideal.
        - Queries without a positive judgement are left out.
        - A document with the id of a query and all its words is that query again (as in ArguAna): it is left
          out of that ranking unless it was judged relevant. The id alone proves nothing: many collections
          number queries and documents alike.
        """
        by_query: dict[str, dict[str, float]] = {}
        for query, document, grade in judgements:
            if query in queries:
                by_query.setdefault(query, {})[document] = grade
        asked = [query for query in queries if any(grade > 0 for grade in by_query.get(query, {}).values())]
        if not asked:
            raise BadInput(
                f"{name} has no query with a positive judgement; check the ids and scores of its judgements"
            )
        if not documents:
            raise BadInput(f"{name} has no documents; add some")
        ids = sorted(documents, reverse=True)
        position = {document: place for place, document in enumerate(ids)}
        own = [_own_document(query, queries, documents, by_query[query]) for query in asked]
        absent = sum(document not in position for query in asked for document in by_query[query])
        notes = (
            (len(queries) - len(asked), "queries without a positive judgement left out"),
            (absent, "judged documents are not in the collection"),
            (sum(own), "queries ranked without the document that is the query itself"),
        )
        return cls(
            queries=tuple(queries[query] for query in asked),
            documents=tuple(documents[document] for document in ids),
            grades=tuple(
                {
                    position[document]: grade
                    for document, grade in by_query[query].items()
                    if document in position
                }
                for query in asked
            ),
            judged=tuple(tuple(by_query[query].values()) for query in asked),
            own=tuple(position[query] if itself else -1 for query, itself in zip(asked, own, strict=True)),
            note="; ".join(f"{count} {what}" for count, what in notes if count),
            # Sorted, so that the order of the files' rows is no part of it.
            fingerprint=fingerprint(
                [
                    *((query, queries[query], sorted(by_query[query].items())) for query in sorted(asked)),
                    *((document, documents[document]) for document in ids),
                ]
            ),
        )

    def measures(self, embedder: Embedder) -> dict[str, float]:
        """Rank every document for every query and take the measures."""
        documents = embedder.document(self.documents)
        queries = embedder.query(self.queries)
        check_same_width(queries, documents, embedder.name)
        ranking = nearest(queries, documents, DEPTH, left_out=self.own)
        gains = [
            [grades.get(document, 0) for document in row]
            for row, grades in zip(ranking.tolist(), self.grades, strict=True)
        ]
        return ranking_measures(np.array(gains, dtype=np.float64), self.judged)


def _own_document(
    query: str, queries: Mapping[str, str], documents: Mapping[str, str], grades: Mapping[str, float]
) -> bool:
    """Whether the document with the query's id is the query itself."""
    if query not in documents or grades.get(query, 0) > 0:
        return False
    return set(queries[query].casefold().split()) <= set(documents[query].casefold().split())
