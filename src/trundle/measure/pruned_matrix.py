"""A pruned matrix as a record, apart from what counts it: a report reads such without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PrunedMatrix:
    """One matrix and what is left of it."""

    layer: int
    matrix: str
    weights: int
    kept: int
