"""Vectors in fewer bits, and scans over them: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.index.contract import Precision

Rows = NDArray[np.int64]
Codes = NDArray[Any]

WORD = 8
BLOCK = 8192
TINY = 1e-12


def code_width(dimensions: int, precision: Precision) -> int:
    """Bytes a vector takes in the file that is scanned first."""
    match precision:
        case "int8":
            return dimensions
        case "binary":
            return -(-dimensions // (8 * WORD)) * WORD  # whole words, for fast counting
    return 4 * dimensions


def encode_codes(vectors: Vectors, precision: Precision) -> Codes:
    """int8 stretches each vector so that its largest number becomes 127; binary keeps signs alone."""
    if precision == "int8":
        largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), TINY)
        return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    whole = np.zeros((len(vectors), code_width(vectors.shape[1], "binary")), dtype=np.uint8)
    whole[:, : bits.shape[1]] = bits
    return whole


def float_scores(query: Vectors, vectors: Vectors) -> NDArray[np.float32]:
    """Cosine of one query with every row."""
    lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.linalg.norm(query), TINY)
    scores: NDArray[np.float32] = (vectors @ query) / lengths
    return scores


def int8_scores(query: Codes, codes: Codes) -> NDArray[np.float32]:
    """Cosine of one query with every row, all in whole numbers of 8 bits."""
    return float_scores(query.astype(np.float32), codes.astype(np.float32))


def binary_scores(query: Codes, codes: Codes) -> NDArray[np.float32]:
    """Fewer differing signs are a higher score."""
    differing = np.bitwise_count(codes.view(np.uint64) ^ query.view(np.uint64)[None]).sum(axis=1)
    scores: NDArray[np.float32] = -differing.astype(np.float32)
    return scores


SCORES: dict[Precision, Callable[[Any, Any], NDArray[np.float32]]] = {
    "float": float_scores,
    "int8": int8_scores,
    "binary": binary_scores,
}


def scan(query: Codes, codes: Codes, precision: Precision, count: int, first: int = 0) -> Rows:
    """The `count` best rows of `codes` from `first` on, best first, read in blocks so that memory stays small."""
    rows = np.empty(0, dtype=np.int64)
    best = np.empty(0, dtype=np.float32)
    score = SCORES[precision]
    for start in range(first, len(codes), BLOCK):
        scores = score(query, np.ascontiguousarray(codes[start : start + BLOCK]))
        best = np.concatenate([best, scores])
        rows = np.concatenate([rows, np.arange(start, start + len(scores))])
        if len(best) > count:
            keep = np.argpartition(-best, count - 1)[:count]
            best, rows = best[keep], rows[keep]
    return rows[np.lexsort((rows, -best))]


def rescored(query: Vectors, vectors: Vectors, rows: Rows, k: int) -> list[tuple[int, float]]:
    """Candidates put in their true order by full vectors: row and cosine of the best `k`."""
    rows = np.sort(rows)  # in the order of the file
    scores = float_scores(query, np.asarray(vectors[rows]))
    order = np.argsort(-scores, kind="stable")[:k]
    return [(int(rows[place]), float(scores[place])) for place in order]
