"""Vectors with neighbours, for tests of stores."""

from __future__ import annotations

import numpy as np

from trundle.embedder import Vectors
from trundle.index.base import Wanted, _Precision

WIDTH = 48


def clustered(count: int, seed: int = 0, width: int = WIDTH) -> Vectors:
    """Points around a few centres, as embeddings lie."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(7).normal(size=(20, width))
    points = centres[rng.integers(0, 20, count)] + 0.7 * rng.normal(size=(count, width))
    return (points * rng.uniform(0.5, 2, (count, 1))).astype(np.float32)


def wanted(precision: _Precision | None = "float", model: str = "teacher") -> Wanted:
    return Wanted(model=model, dimensions=WIDTH, precision=precision)
