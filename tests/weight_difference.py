"""How far the weights of two trainings that should be equal differ."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def weight_difference(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, share: float
) -> float:
    """The most that this share of all weights differs by.

    Adam makes a step of the same length of any gradient, so what is hardly reached may differ by rounding
    alone.
    """
    assert one.keys() == other.keys()
    away = torch.cat([(one[name] - other[name]).abs().flatten() for name in one])
    return float(away.kthvalue(int(share * len(away))).values)
