"""What was pruned, as records apart from what counts it: a report reads such without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NEUTRAL = 0.1
"""Cosines nearer to 0 than this are neither agreement nor conflict."""


@dataclass(frozen=True, kw_only=True)
class PrunedMatrix:
    """One matrix and what is left of it."""

    layer: int
    matrix: str
    weights: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How many weights lie in rows (or matrices) of each cosine between the sides' mean gradients, from −1 to 1."""

    counts: tuple[int, ...]
    shared: int
    """Weights that both sides pull the same way."""
    specific: int
    conflicting: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Alignment | None:
        """As a file has it; None where nothing was compared."""
        return None if values is None else cls(**{**values, "counts": tuple(values["counts"])})
