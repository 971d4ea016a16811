"""The graph over a large set: a usearch file made from the codes, and made again whenever it is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trundle.errors import MissingExtra
from trundle.index.codes import Codes, Rows
from trundle.index.contract import Precision
from trundle.progress import SILENT, Progress

try:
    from usearch.index import Index
except ImportError as error:
    raise MissingExtra("an index of many texts", "index") from error

KINDS: dict[Precision, tuple[str, str]] = {
    "float": ("cos", "f32"),
    "int8": ("cos", "i8"),
    "binary": ("hamming", "b1"),
}
AT_ONCE = 4096
LEAST_EXPANSION = 128


def write_graph(
    path: Path, codes: Codes, precision: Precision, dimensions: int, progress: Progress = SILENT
) -> None:
    """Build the graph beside its place, then rename it."""
    metric, dtype = KINDS[precision]
    index = Index(ndim=_width(codes, precision, dimensions), metric=metric, dtype=dtype)
    with progress.task("building the graph", len(codes)) as advance:
        for start in range(0, len(codes), AT_ONCE):
            part = np.ascontiguousarray(codes[start : start + AT_ONCE])
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


Candidates = Callable[[Codes, int], Rows]


def open_graph(
    path: Path, precision: Precision, codes: Codes, dimensions: int
) -> tuple[int, Candidates] | None:
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

    def candidates(query: Codes, count: int) -> Rows:
        index.expansion_search = max(LEAST_EXPANSION, 2 * count)
        return np.asarray(index.search(query, count).keys, dtype=np.int64)

    return len(index), candidates


def _width(codes: Codes, precision: Precision, dimensions: int) -> int:
    """What usearch calls the dimensions: bits of a binary vector are counted with those that fill its last word."""
    return 8 * codes.shape[1] if precision == "binary" else dimensions
