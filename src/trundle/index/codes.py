"""Vectors in fewer bits, exact scans over them, and graphs for approximate search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import MissingExtra
from trundle.folders import scratch_folder, sync
from trundle.index.base import _Precision
from trundle.progress import SILENT, Progress

_Rows = NDArray[np.int64]
_Codes = NDArray[Any]
_Candidates = Callable[[_Codes, int], _Rows]

_WORD = 8
_BLOCK = 8192
_TINY = 1e-12
_GRAPH_KINDS: dict[_Precision, tuple[str, str]] = {
    "float": ("cos", "f32"),
    "int8": ("cos", "i8"),
    "binary": ("hamming", "b1"),
}
_GRAPH_BATCH = 4096
_LEAST_EXPANSION = 128


def _code_width(dimensions: int, precision: _Precision) -> int:
    """Return the bytes per vector in the file that is scanned first."""
    if precision == "binary":
        return -(-dimensions // (8 * _WORD)) * _WORD  # full words, for fast counting
    return dimensions if precision == "int8" else 4 * dimensions


def _encode_codes(vectors: Vectors, precision: _Precision) -> _Codes:
    """Quantise vectors: int8 scales each so that its largest value becomes 127, binary keeps the signs."""
    if precision == "int8":
        largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), _TINY)
        return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    codes = np.zeros((len(vectors), _code_width(vectors.shape[1], "binary")), dtype=np.uint8)
    codes[:, : bits.shape[1]] = bits
    return codes


def _scores(query: _Codes, codes: _Codes, precision: _Precision) -> NDArray[np.float32]:
    """Return the cosine of one query with every row, or for binary minus the number of differing signs."""
    if precision == "binary":
        differing = np.bitwise_count(codes.view(np.uint64) ^ query.view(np.uint64)[None]).sum(axis=1)
        return np.asarray(-differing.astype(np.float32))
    vectors, one = codes.astype(np.float32, copy=False), query.astype(np.float32, copy=False)
    lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.linalg.norm(one), _TINY)
    return np.asarray((vectors @ one) / lengths)


def _scan(query: _Codes, codes: _Codes, precision: _Precision, count: int, first: int = 0) -> _Rows:
    """Return the `count` best rows of `codes` from `first` on, best first; blocks keep the memory small."""
    rows = np.empty(0, dtype=np.int64)
    best = np.empty(0, dtype=np.float32)
    for start in range(first, len(codes), _BLOCK):
        scores = _scores(query, np.ascontiguousarray(codes[start : start + _BLOCK]), precision)
        best = np.concatenate([best, scores])
        rows = np.concatenate([rows, np.arange(start, start + len(scores))])
        if len(best) > count:
            keep = np.argpartition(-best, count - 1)[:count]
            best, rows = best[keep], rows[keep]
    return rows[np.lexsort((rows, -best))]


def _rescored(query: Vectors, vectors: Vectors, rows: _Rows, k: int) -> list[tuple[int, float]]:
    """Return row and cosine of the best `k` candidates by their full vectors."""
    rows = np.sort(rows)  # in the order of the file
    scores = _scores(query, np.asarray(vectors[rows]), "float")
    order = np.argsort(-scores, kind="stable")[:k]
    return [(int(rows[place]), float(scores[place])) for place in order]


def _usearch() -> Any:
    # Imported late: on ARM, torch hangs when it is imported after usearch.
    try:
        from usearch.index import Index
    except ImportError as error:
        raise MissingExtra("an index of many texts", "index") from error
    return Index


def _write_graph(
    path: Path, codes: _Codes, precision: _Precision, dimensions: int, progress: Progress = SILENT
) -> None:
    metric, dtype = _GRAPH_KINDS[precision]
    index = _usearch()(ndim=_graph_width(codes, precision, dimensions), metric=metric, dtype=dtype)
    with progress.task("building the graph", len(codes)) as advance:
        for start in range(0, len(codes), _GRAPH_BATCH):
            part = np.ascontiguousarray(codes[start : start + _GRAPH_BATCH])
            index.add(np.arange(start, start + len(part)), part)
            advance(len(part))
    with scratch_folder(path.parent, path.name) as scratch:
        made = scratch / path.name
        index.save(str(made))
        sync(made)
        made.replace(path)
        sync(path.parent)


def _open_graph(
    path: Path, precision: _Precision, codes: _Codes, dimensions: int
) -> tuple[int, _Candidates] | None:
    """Return the number of rows the graph covers and a search in it, or None without a usable graph."""
    if not path.is_file():
        return None
    library = _usearch()
    try:
        index: Any = library.restore(str(path), view=True)
    except Exception:  # RuntimeError and others; without the graph the search is only slower
        return None
    if index is None or index.ndim != _graph_width(codes, precision, dimensions) or len(index) > len(codes):
        return None

    def candidates(query: _Codes, count: int) -> _Rows:
        index.expansion_search = max(_LEAST_EXPANSION, 2 * count)
        return np.asarray(index.search(query, count).keys, dtype=np.int64)

    return len(index), candidates


def _graph_width(codes: _Codes, precision: _Precision, dimensions: int) -> int:
    """Return what usearch calls dimensions; for binary vectors, all bits of their words."""
    return 8 * codes.shape[1] if precision == "binary" else dimensions
