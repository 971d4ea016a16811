"""Nearest documents in bounded memory, and the measures of a ranking as trec_eval takes them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors

Positions = NDArray[np.int64]

DOCUMENTS_AT_ONCE = 8192
QUERIES_AT_ONCE = 1024
DEPTH = 100


def unit(vectors: Vectors) -> NDArray[np.float64]:
    """Rows scaled to length one in double precision; a row of zeros stays zeros."""
    wide = vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = wide / np.where(lengths == 0, 1.0, lengths)
    return scaled


def nearest(
    queries: Vectors,
    documents: Vectors,
    k: int,
    *,
    left_out: Sequence[int] | None = None,
    documents_at_once: int = DOCUMENTS_AT_ONCE,
) -> Positions:
    """Positions of the k nearest documents of each query by cosine, best first.

    `left_out` names one document per query that must not be ranked (−1: none). Where fewer than k documents
    are left the row ends in −1. Equal scores keep the order of the documents: sums are taken in double
    precision and rounded to single, so that two copies of a text tie whatever the block they fall in.
    """
    k = min(k, len(documents))
    scaled = unit(queries)
    hidden = np.full(len(queries), -1) if left_out is None else np.asarray(left_out, dtype=np.int64)
    best = np.full((len(queries), k), -np.inf, dtype=np.float32)
    found = np.full((len(queries), k), -1, dtype=np.int64)
    for start in range(0, len(documents), documents_at_once):
        block = unit(documents[start : start + documents_at_once]).T
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            scores = (scaled[rows] @ block).astype(np.float32)
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


def _best_columns(scores: NDArray[np.float32], k: int) -> Positions:
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


def ranking_measures(gains: NDArray[np.float64], judged: Sequence[Sequence[float]]) -> dict[str, float]:
    """Means over queries of nDCG@10, recall@10, recall@100 and MRR@10.

    `gains` holds the grade of the document at each rank (0 where it was not judged), `judged` all grades of
    each query, of documents that are not in the collection too: they count in the ideal. Gains are linear, and
    grades of 0 or less count nothing. Every query needs a positive grade.
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
