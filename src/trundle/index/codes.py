"""Vectors in fewer bits, and scans over them: pure functions of arrays."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import MissingExtra
from trundle.index.contract import _Precision
from trundle.progress import SILENT, Progress

_Rows = NDArray[np.int64]
_Codes = NDArray[Any]

_WORD = 8
_BLOCK = 8192
_TINY = 1e-12


def _code_width(dimensions: int, precision: _Precision) -> int:
    """Bytes a vector takes in the file that is scanned first."""
    match precision:
        case "int8":
            return dimensions
        case "binary":
            return -(-dimensions // (8 * _WORD)) * _WORD  # whole words, for fast counting
    return 4 * dimensions


def _encode_codes(vectors: Vectors, precision: _Precision) -> _Codes:
    """int8 stretches each vector so that its largest number becomes 127; binary keeps signs alone."""
    if precision == "int8":
        largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), _TINY)
        return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    whole = np.zeros((len(vectors), _code_width(vectors.shape[1], "binary")), dtype=np.uint8)
    whole[:, : bits.shape[1]] = bits
    return whole


def _float_scores(query: Vectors, vectors: Vectors) -> NDArray[np.float32]:
    """Cosine of one query with every row."""
    lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.linalg.norm(query), _TINY)
    scores: NDArray[np.float32] = (vectors @ query) / lengths
    return scores


def _int8_scores(query: _Codes, codes: _Codes) -> NDArray[np.float32]:
    """Cosine of one query with every row, all in whole numbers of 8 bits."""
    return _float_scores(query.astype(np.float32), codes.astype(np.float32))


def _binary_scores(query: _Codes, codes: _Codes) -> NDArray[np.float32]:
    """Fewer differing signs are a higher score."""
    differing = np.bitwise_count(codes.view(np.uint64) ^ query.view(np.uint64)[None]).sum(axis=1)
    scores: NDArray[np.float32] = -differing.astype(np.float32)
    return scores


_SCORES: dict[_Precision, Callable[[Any, Any], NDArray[np.float32]]] = {
    "float": _float_scores,
    "int8": _int8_scores,
    "binary": _binary_scores,
}


def _scan(query: _Codes, codes: _Codes, precision: _Precision, count: int, first: int = 0) -> _Rows:
    """The `count` best rows of `codes` from `first` on, best first, read in blocks so that memory stays small."""
    rows = np.empty(0, dtype=np.int64)
    best = np.empty(0, dtype=np.float32)
    score = _SCORES[precision]
    for start in range(first, len(codes), _BLOCK):
        scores = score(query, np.ascontiguousarray(codes[start : start + _BLOCK]))
        best = np.concatenate([best, scores])
        rows = np.concatenate([rows, np.arange(start, start + len(scores))])
        if len(best) > count:
            keep = np.argpartition(-best, count - 1)[:count]
            best, rows = best[keep], rows[keep]
    return rows[np.lexsort((rows, -best))]


def _rescored(query: Vectors, vectors: Vectors, rows: _Rows, k: int) -> list[tuple[int, float]]:
    """Candidates put in their true order by full vectors: row and cosine of the best `k`."""
    rows = np.sort(rows)  # in the order of the file
    scores = _float_scores(query, np.asarray(vectors[rows]))
    order = np.argsort(-scores, kind="stable")[:k]
    return [(int(rows[place]), float(scores[place])) for place in order]


try:
    from usearch.index import Index
except ImportError as error:
    raise MissingExtra("an index of many texts", "index") from error

_KINDS: dict[_Precision, tuple[str, str]] = {
    "float": ("cos", "f32"),
    "int8": ("cos", "i8"),
    "binary": ("hamming", "b1"),
}
_AT_ONCE = 4096
_LEAST_EXPANSION = 128


def _write_graph(
    path: Path, codes: _Codes, precision: _Precision, dimensions: int, progress: Progress = SILENT
) -> None:
    """Build the graph beside its place, then rename it."""
    metric, dtype = _KINDS[precision]
    index = Index(ndim=_width(codes, precision, dimensions), metric=metric, dtype=dtype)
    with progress.task("building the graph", len(codes)) as advance:
        for start in range(0, len(codes), _AT_ONCE):
            part = np.ascontiguousarray(codes[start : start + _AT_ONCE])
            index.add(np.arange(start, start + len(part)), part)
            advance(len(part))
    scratch = path.with_name(f".{path.name}.part")
    try:
        index.save(str(scratch))
        with scratch.open("rb") as handle:
            os.fsync(handle.fileno())
        scratch.replace(path)
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


_Candidates = Callable[[_Codes, int], _Rows]


def _open_graph(
    path: Path, precision: _Precision, codes: _Codes, dimensions: int
) -> tuple[int, _Candidates] | None:
    """How many rows the graph covers, and a search in it; None where there is no graph that fits."""
    if not path.is_file():
        return None
    try:
        index: Any = Index.restore(str(path), view=True)
    except (
        Exception
    ):  # the library raises RuntimeError and others; without the graph the search is only slower
        return None
    if index is None or index.ndim != _width(codes, precision, dimensions) or len(index) > len(codes):
        return None

    def candidates(query: _Codes, count: int) -> _Rows:
        index.expansion_search = max(_LEAST_EXPANSION, 2 * count)
        return np.asarray(index.search(query, count).keys, dtype=np.int64)

    return len(index), candidates


def _width(codes: _Codes, precision: _Precision, dimensions: int) -> int:
    """What usearch calls the dimensions: bits of a binary vector are counted with those that fill its last word."""
    return 8 * codes.shape[1] if precision == "binary" else dimensions
