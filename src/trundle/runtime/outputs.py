"""What is done to a vector after the graph: fewer dimensions, fewer bits. Each vector is treated by itself."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import BadInput

Output = Literal["float32", "int8", "binary"]

TINY = 1e-12


def check_output(output: str) -> None:
    """Refuse a kind of vector that there is not."""
    if output not in get_args(Output):
        raise BadInput(f"vectors can't be {output!r}; ask for one of {', '.join(get_args(Output))}")


def truncated(vectors: Vectors, dimensions: int | None, *, normalise: bool) -> Vectors:
    """The first `dimensions` numbers of each vector, brought back to length 1 where the whole had it."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if not 1 <= dimensions < vectors.shape[1]:
        raise BadInput(
            f"{dimensions} dimensions can't be had of {vectors.shape[1]}; give 1 to {vectors.shape[1]}"
        )
    short = np.ascontiguousarray(vectors[:, :dimensions])
    if not normalise:
        return short
    lengths = np.maximum(np.linalg.norm(short, axis=1, keepdims=True), TINY)
    return np.asarray(short / lengths, dtype=np.float32)


def as_output(vectors: Vectors, output: Output) -> NDArray[Any]:
    """The vectors in the numbers asked for.

    int8 stretches each vector so that its largest number becomes 127, which leaves every cosine as it is; binary
    keeps signs alone, eight to a byte, in the layout of sentence-transformers' `binary`.
    """
    match output:
        case "int8":
            largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), TINY)
            return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
        case "binary":
            return (np.packbits(vectors > 0, axis=1).astype(np.int16) - 128).astype(np.int8)
    return vectors
