"""What a weight is worth, as pure functions of tensors: magnitude, Fisher, Wanda, and GAPrune's DAI.

    DAI = [(F_dom − β·F_gen)·|θ| + γ·√|θ|]·(1 + α·s)

F is the mean squared gradient over samples and s the cosine between the mean gradients of the two sources. For one weight
alone a cosine is ±1, so s is taken over a row (an output neuron), or over the whole matrix. F is smaller than √|θ| by
orders of magnitude, so the two are put on one scale first: see `on_one_scale`.

All matrices are (out, in).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from trundle.measure.weight_names import AlignedBy, FisherScale

ALPHA, BETA, GAMMA = 0.2, 0.0, 0.5
"""The paper's, but for β, which is 1 there. The weights that matter most matter to both sides, and to hold one side's need against
them takes away what both need: with one small model on validation queries of two domains, β = 0 lost less of the domain, and far less of both sides where whole
neurons went."""
TINY = 1e-30


def alignment(general: Tensor, domain: Tensor, by: AlignedBy = "row") -> Tensor:
    """The cosine between mean gradients, (out, 1) by row or (1, 1) by tensor; 0 where one of them is zero."""
    axes = (1,) if by == "row" else (0, 1)
    product = (general * domain).sum(dim=axes, keepdim=True)
    lengths = general.square().sum(dim=axes, keepdim=True) * domain.square().sum(dim=axes, keepdim=True)
    return torch.where(lengths > TINY**2, product / lengths.clamp_min(TINY**2).sqrt(), 0.0).clamp(-1.0, 1.0)


def on_one_scale(fisher: Tensor, scale: FisherScale) -> Tensor:
    """A Fisher matrix relative to its own mean, so that a usual weight has 1; or to its largest value, so that all are below 1."""
    if scale == "raw":
        return fisher
    return fisher / (fisher.mean() if scale == "mean" else fisher.max()).clamp_min(TINY)


def dai(
    weight: Tensor,
    general: Tensor,
    domain: Tensor,
    aligned: Tensor,
    *,
    alpha: float = ALPHA,
    beta: float = BETA,
    gamma: float = GAMMA,
    scale: FisherScale = "mean",
) -> Tensor:
    """GAPrune's score from the Fisher matrices of both sides; `raw` is the paper's formula as printed."""
    size = weight.abs()
    net = on_one_scale(domain, scale) - beta * on_one_scale(general, scale)
    return (net * size + gamma * size.sqrt()) * (1 + alpha * aligned)


def random_scores(weights: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """A throw of the dice for each weight, on the CPU, so that it falls the same way everywhere."""
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=dice).to(weight.device) for name, weight in weights.items()
    }


def wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """|θ| times the length of what enters its column over all tokens."""
    return weight.abs() * norms
