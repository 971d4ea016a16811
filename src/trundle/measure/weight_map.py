"""What was pruned, as figures to draw: the share that is left by layer and matrix, and how the two sides' gradients agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trundle.measure.pruned_matrix import NEUTRAL, Alignment, PrunedMatrix

BINS = 40


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """Everything the picture shows."""

    says: str
    matrices: tuple[PrunedMatrix, ...]
    alignment: Alignment | None

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> WeightMap:
        """What `as_json` gave."""
        return cls(
            says=values["says"],
            matrices=tuple(PrunedMatrix(**one) for one in values["matrices"]),
            alignment=Alignment.from_json(values["alignment"]),
        )


def count_alignment(aligned: Mapping[str, Tensor], sizes: Mapping[str, int]) -> Alignment:
    """Weights by the cosine they were given; `sizes` are the weights of each matrix."""
    cosines = torch.cat([value.flatten().float().cpu() for value in aligned.values()])
    each = torch.cat(
        [torch.full((value.numel(),), sizes[name] // value.numel()) for name, value in aligned.items()]
    )
    bins = ((cosines + 1) / 2 * BINS).long().clamp(0, BINS - 1)
    counts = torch.zeros(BINS, dtype=torch.long).scatter_add_(0, bins, each)
    shared, conflicting = int(each[cosines > NEUTRAL].sum()), int(each[cosines < -NEUTRAL].sum())
    return Alignment(
        counts=tuple(counts.tolist()),
        shared=shared,
        specific=int(each.sum()) - shared - conflicting,
        conflicting=conflicting,
    )
