"""Nearest neighbours, and collections of queries, documents and judgements to score models on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trundle.data.sampling import fingerprint
from trundle.embedder import Embedder, Similarity, Vectors
from trundle.errors import BadInput

_Positions = NDArray[np.int64]

_DOCUMENTS_AT_ONCE = 8192
_QUERIES_AT_ONCE = 1024
_DEPTH = 100


def unit(vectors: Vectors) -> NDArray[np.float64]:
    """Rows scaled to length one in double precision; a row of zeros stays zeros."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = wide / np.where(lengths == 0, 1.0, lengths)
    return scaled


def _paired_cosines(left: Vectors, right: Vectors) -> NDArray[np.float32]:
    """Cosine of each row with its partner, rounded to single precision so that copies of a pair tie."""
    cosines: NDArray[np.float32] = np.einsum("ij,ij->i", unit(left), unit(right)).astype(np.float32)
    return cosines


def nearest(
    queries: Vectors,
    documents: Vectors,
    k: int,
    *,
    left_out: Sequence[int] | None = None,
    similarity: Similarity = "cosine",
) -> _Positions:
    """Positions of the k nearest documents of each query, by cosine unless told otherwise, best first.

    `left_out` names one document per query that is not ranked (−1: none). A row with fewer than k documents
    ends in −1. Equal scores keep the order of the documents: sums are computed in double precision and
    rounded to single, so that two copies of a text tie in every block.
    """
    k = min(k, len(documents))
    prepare = unit if similarity == "cosine" else partial(np.asarray, dtype=np.float64)
    scaled = prepare(queries)
    hidden = np.full(len(queries), -1) if left_out is None else np.asarray(left_out, dtype=np.int64)
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    found = np.full((len(queries), k), -1, dtype=np.int64)
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        block = prepare(documents[start : start + _DOCUMENTS_AT_ONCE]).T
        # −‖q − d‖² / 2 without the part that is the same for all documents
        offset = (block**2).sum(axis=0) / 2 if similarity == "l2" else 0.0
        for first in range(0, len(queries), _QUERIES_AT_ONCE):
            rows = slice(first, first + _QUERIES_AT_ONCE)
            scores = (scaled[rows] @ block - offset).astype(np.float32)
            here = np.flatnonzero((hidden[rows] >= start) & (hidden[rows] < start + block.shape[1]))
            scores[here, hidden[rows][here] - start] = -np.inf
            columns = _best_columns(scores, min(k, block.shape[1]))
            pooled = np.hstack([best[rows], np.take_along_axis(scores, columns, axis=1)])
            positions = np.hstack([found[rows], columns + start])
            order = np.argsort(-pooled, axis=1, kind="stable")[:, :k]
            best[rows] = np.take_along_axis(pooled, order, axis=1)
            found[rows] = np.take_along_axis(positions, order, axis=1)
    found[np.isneginf(best)] = -1
    return found


def _best_columns(scores: NDArray[np.float32], k: int) -> _Positions:
    """Columns of the k highest scores of each row, best first, the leftmost of equal ones."""
    width = scores.shape[1]
    if k == width:
        return np.argsort(-scores, axis=1, kind="stable")
    threshold = np.partition(scores, width - k, axis=1)[:, width - k, None]
    keep = scores >= threshold
    crowded = np.flatnonzero(keep.sum(axis=1) > k)
    if crowded.size:
        above = scores[crowded] > threshold[crowded]
        level = scores[crowded] == threshold[crowded]
        room = k - above.sum(axis=1, keepdims=True)
        keep[crowded] = above | (level & (np.cumsum(level, axis=1) <= room))
    columns = np.nonzero(keep)[1].reshape(len(scores), k)
    order = np.argsort(-np.take_along_axis(scores, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)


def _ranking_measures(gains: NDArray[np.float64], judged: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over queries of nDCG@10, recall@10, recall@100 and MRR@10.

    `gains` holds the grade of the document at each rank (0 if it was not judged), `judged` all grades of each
    query. Grades of documents outside the collection count in the ideal. Gains are linear, and grades of 0 or
    less count nothing. Every query needs a positive grade.
    """
    gains = np.maximum(gains, 0)
    discount = 1 / np.log2(np.arange(2, 12))
    ideal = np.zeros((len(judged), 10))
    for row, grades in zip(ideal, judged, strict=True):
        top = sorted((grade for grade in grades if grade > 0), reverse=True)[:10]
        row[: len(top)] = top
    relevant = np.array([sum(grade > 0 for grade in grades) for grades in judged])
    hits = gains > 0
    dcg = gains[:, :10] @ discount[: gains.shape[1]]
    first = np.where(hits[:, :10].any(axis=1), 1 / (1 + hits[:, :10].argmax(axis=1)), 0.0)
    return {
        "ndcg@10": float(np.mean(dcg / (ideal @ discount))),
        "recall@10": float(np.mean(hits[:, :10].sum(axis=1) / relevant)),
        "recall@100": float(np.mean(hits[:, :100].sum(axis=1) / relevant)),
        "mrr@10": float(np.mean(first)),
    }


@dataclass(frozen=True, kw_only=True)
class _Collection:
    """Queries, documents and judgements; documents are identified by their position."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    grades: tuple[Mapping[int, float], ...]  # per query: document → grade
    judged: tuple[tuple[float, ...], ...]  # per query: all grades, also of absent documents
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
    ) -> _Collection:
        """Build a collection by these rules.

        - Documents are in descending order of their ids, as trec_eval orders equal scores.
        - Judgements of unknown queries are dropped; those of unknown documents count in the ideal.
        - Queries without a positive judgement are left out.
        - A document with the id of a query and all its words is the query itself (as in ArguAna): it is left
          out of that ranking unless it was judged relevant. The id alone is not enough: many collections
          number queries and documents from 1.
        """
        by_query: dict[str, dict[str, float]] = {}
        for query, document, grade in judgements:
            if query in queries:
                by_query.setdefault(query, {})[document] = grade
        asked = [query for query in queries if any(grade > 0 for grade in by_query.get(query, {}).values())]
        if not asked:
            raise BadInput(f"{name} has no query with a positive judgement; check its ids and scores")
        if not documents:
            raise BadInput(f"{name} has no documents; add some")
        ids = sorted(documents, reverse=True)
        position = {document: place for place, document in enumerate(ids)}
        own = [
            query in documents
            and by_query[query].get(query, 0) <= 0
            and set(queries[query].casefold().split()) <= set(documents[query].casefold().split())
            for query in asked
        ]
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
                {position[each]: grade for each, grade in by_query[query].items() if each in position}
                for query in asked
            ),
            judged=tuple(tuple(by_query[query].values()) for query in asked),
            own=tuple(position[query] if itself else -1 for query, itself in zip(asked, own, strict=True)),
            note="; ".join(f"{count} {what}" for count, what in notes if count),
            # Sorted, so that the order of the rows in the files has no influence.
            fingerprint=fingerprint(
                [
                    *((query, queries[query], sorted(by_query[query].items())) for query in sorted(asked)),
                    *((document, documents[document]) for document in ids),
                ]
            ),
        )

    def measures(self, embedder: Embedder) -> dict[str, float]:
        documents = embedder.document(self.documents)
        queries = embedder.query(self.queries)
        _check_same_width(queries, documents, embedder.name)
        ranking = nearest(queries, documents, _DEPTH, left_out=self.own)
        gains = [
            [grades.get(document, 0) for document in row]
            for row, grades in zip(ranking.tolist(), self.grades, strict=True)
        ]
        return _ranking_measures(np.array(gains, dtype=np.float64), self.judged)


SENTENCES = (
    "The bank raised its interest rate by half a percent.",
    "Whales breathe air and nurse their young.",
    "How do I undo the last commit in git?",
    "Simmer the onions in butter until they turn golden.",
    "The treaty ended a war of thirty years.",
    "A vaccine teaches the immune system to know a virus.",
    "Our train to the coast was two hours late.",
    "The striker scored twice in the second half.",
)
"""Texts so different that a model of the same vector space recognises each one."""


def find_themselves(queries: Vectors, documents: Vectors) -> bool:
    """Whether most rows of one model are closest to their own row of the other."""
    best = (queries @ documents.T).argmax(axis=1)
    return bool(np.mean(best == np.arange(len(queries))) > 0.5)


def _check_same_width(queries: Vectors, documents: Vectors, name: str) -> None:
    if queries.shape[1] != documents.shape[1]:
        widths = f"{queries.shape[1]} and of {documents.shape[1]} dimensions"
        raise BadInput(f"{name} has vectors of {widths}; align the student to the teacher's space first")
