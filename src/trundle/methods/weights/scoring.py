"""A score for every weight that may be pruned, by any of the methods: samples in, one tensor a matrix out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trundle.data.examples import DROPOUT
from trundle.methods.contract import LONGEST, Context
from trundle.methods.training import prompts_by_file
from trundle.methods.weights import WeightsOptions, _AlignedBy, _FisherScale, _Score, _Selection
from trundle.methods.weights.gradients import _measure_gradients, _measure_norms
from trundle.methods.weights.samples import _draw_samples, _Name, _Side
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable, weight_of
from trundle.model.surgery import transformer_of
from trundle.records import NEUTRAL, GradientAlignment

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.examples import Example
    from trundle.methods.weights.gradients import _Gradients
    from trundle.model.matrices import Matrix

_ALPHA, _BETA, _GAMMA = 0.2, 0.0, 0.5
"""The paper's, but for β, which is 1 there. The weights that matter most matter to both sides, and to hold one side's need against
them takes away what both need: with one small model on validation queries of two domains, β = 0 lost less of the domain, and far less of both sides where whole
neurons went."""
_TINY = 1e-30


def _alignment(general: Tensor, domain: Tensor, by: _AlignedBy = "row") -> Tensor:
    """The cosine between mean gradients, (out, 1) by row or (1, 1) by tensor; 0 where one of them is zero."""
    axes = (1,) if by == "row" else (0, 1)
    product = (general * domain).sum(dim=axes, keepdim=True)
    lengths = general.square().sum(dim=axes, keepdim=True) * domain.square().sum(dim=axes, keepdim=True)
    return torch.where(lengths > _TINY**2, product / lengths.clamp_min(_TINY**2).sqrt(), 0.0).clamp(-1.0, 1.0)


def _on_one_scale(fisher: Tensor, scale: _FisherScale) -> Tensor:
    """A Fisher matrix relative to its own mean, so that a usual weight has 1; or to its largest value, so that all are below 1."""
    if scale == "raw":
        return fisher
    return fisher / (fisher.mean() if scale == "mean" else fisher.max()).clamp_min(_TINY)


def _dai(
    weight: Tensor,
    general: Tensor,
    domain: Tensor,
    aligned: Tensor,
    *,
    alpha: float = _ALPHA,
    beta: float = _BETA,
    gamma: float = _GAMMA,
    scale: _FisherScale = "mean",
) -> Tensor:
    """GAPrune's score from the Fisher matrices of both sides; `raw` is the paper's formula as printed."""
    size = weight.abs()
    net = _on_one_scale(domain, scale) - beta * _on_one_scale(general, scale)
    return (net * size + gamma * size.sqrt()) * (1 + alpha * aligned)


def _random_scores(weights: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """A throw of the dice for each weight, on the CPU, so that it falls the same way everywhere."""
    dice = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=dice).to(weight.device) for name, weight in weights.items()
    }


def _wanda(weight: Tensor, norms: Tensor) -> Tensor:
    """|θ| times the length of what enters its column over all tokens."""
    return weight.abs() * norms


def _how_many(weights: int, share: Fraction) -> int:
    """The whole number of weights a share of them is, rounded down, exactly."""
    return math.floor(weights * share)


def _lowest(scores: Tensor, count: int) -> Tensor:
    """True at exactly `count` of the lowest scores; among equals the first ones go."""
    flat = scores.flatten()
    gone = torch.zeros_like(flat, dtype=torch.bool)
    if count > 0:
        border = torch.kthvalue(flat, count).values
        torch.lt(flat, border, out=gone)
        equal = torch.nonzero(flat == border).flatten()
        gone[equal[: count - int(gone.sum())]] = True
    return gone.view_as(scores)


def _choose(scores: Mapping[str, Tensor], share: Fraction, selection: _Selection) -> dict[str, Tensor]:
    """Where weights go, by matrix: a share of all of them, of each matrix, or of each row."""
    if selection == "global":
        whole = torch.cat([score.flatten() for score in scores.values()])
        gone = _lowest(whole, _how_many(whole.numel(), share))
        parts = torch.split(gone, [score.numel() for score in scores.values()])
        return {name: part.view_as(score) for (name, score), part in zip(scores.items(), parts, strict=True)}
    if selection == "tensor":
        return {name: _lowest(score, _how_many(score.numel(), share)) for name, score in scores.items()}
    return {name: _lowest_in_rows(score, _how_many(score.shape[1], share)) for name, score in scores.items()}


def _lowest_in_rows(scores: Tensor, count: int) -> Tensor:
    """True at exactly `count` of the lowest scores of each row."""
    order = scores.argsort(dim=1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :count], True)


def _two_of_four(scores: Tensor) -> Tensor:
    """True at the two lowest of each four weights that stand side by side in a row."""
    rows, columns = scores.shape
    return _lowest_in_rows(scores.reshape(-1, 4), 2).view(rows, columns)


def _neuron_scores(
    scores: Mapping[str, Tensor], axes: Mapping[str, tuple[Sequence[str], Sequence[str]]]
) -> Tensor:
    """The summed scores of each MLP neuron of one block: its row in the maps before it, its column in the map after.

    `axes` are the plain axes along the rows and columns of each matrix; a fused matrix holds a neuron more than once.
    """
    total: Tensor | None = None
    for name, score in scores.items():
        rows, columns = axes[name]
        for along, sums in ((rows, score.sum(dim=1)), (columns, score.sum(dim=0))):
            if set(along) == {"mlp"}:
                found = sums.view(len(along), -1).sum(dim=0)
                total = found if total is None else total + found
    if total is None:
        raise ValueError("none of the matrices lies along the neurons of an MLP")
    return total


def _best_neurons(scores: Tensor, count: int) -> tuple[int, ...]:
    """The `count` neurons with the highest scores, in rising order."""
    gone = _lowest(scores, len(scores) - count)
    return tuple(torch.nonzero(~gone).flatten().tolist())


_GRADIENTS_OF: dict[_Score, tuple[_Name, ...]] = {
    "gaprune": ("domain", "general"),
    "domain-fisher": ("domain",),
    "general-fisher": ("general",),
}


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scores by matrix, as (out, in): the lower, the sooner a weight goes."""

    matrices: tuple[Matrix, ...]
    scores: dict[str, Tensor]
    aligned: dict[str, Tensor] | None
    """The cosines between the sides' gradients, where both were taken."""
    facts: dict[str, Any]


def _score_weights(
    model: SentenceTransformer, asked: WeightsOptions, sides: Mapping[_Name, _Side], context: Context
) -> _Scored:
    """Take what the method needs to know, and score."""
    backbone = transformer_of(model).model
    matrices = prunable(layout_of(backbone), attention=asked.attention)
    weights = {matrix.name: weight_of(backbone, matrix).float() for matrix in matrices}
    if asked.method in ("magnitude", "random"):
        return _Scored(
            matrices=matrices,
            scores=_without_samples(asked.method, weights, context.seed),
            aligned=None,
            facts={},
        )
    probe = _Probe(model, tuple(weights), asked, context)
    facts: dict[str, Any] = {}
    if asked.method == "wanda":
        samples, facts["domain"] = _draw_samples(model, sides["domain"], asked.samples, context)
        norms = probe.norms("domain", samples)
        return _Scored(
            matrices=matrices,
            scores={name: _wanda(weight, norms[name]) for name, weight in weights.items()},
            aligned=None,
            facts=facts,
        )
    needed = _GRADIENTS_OF[asked.method]
    found: dict[_Name, _Gradients] = {}
    for name in needed:
        samples, facts[name] = _draw_samples(model, sides[name], asked.samples, context)
        found[name] = probe.gradients(name, samples)
    if len(needed) == 1:
        return _Scored(matrices=matrices, scores=found[needed[0]].fisher, aligned=None, facts=facts)
    general, domain = found["general"], found["domain"]
    aligned = {
        name: _alignment(general.mean.pop(name), domain.mean.pop(name), asked.aligned_by) for name in weights
    }
    scores = {
        name: _dai(
            weight,
            general.fisher.pop(name),
            domain.fisher.pop(name),
            aligned[name],
            alpha=asked.alpha,
            beta=asked.beta,
            gamma=asked.gamma,
            scale=asked.fisher,
        )
        for name, weight in weights.items()
    }
    return _Scored(matrices=matrices, scores=scores, aligned=aligned, facts=facts)


def _without_samples(method: str, weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    if method == "magnitude":
        return {name: weight.abs() for name, weight in weights.items()}
    return _random_scores(weights, seed=seed)


class _Probe:
    """A copy of the model in fp32 that samples are sent through."""

    def __init__(
        self, model: SentenceTransformer, modules: tuple[str, ...], asked: WeightsOptions, context: Context
    ) -> None:
        self._model = copy_of(model).float()
        takes = self._model.max_seq_length or LONGEST
        self._model.max_seq_length = min(asked.max_length or LONGEST, takes)
        self._modules, self._asked, self._context = modules, asked, context

    def gradients(self, label: str, samples: list[Example]) -> _Gradients:
        """Fisher information and mean gradients."""
        return _measure_gradients(
            self._model,
            samples,
            self._modules,
            prompts=prompts_by_file(self._model, {}, samples),
            batch_size=self._asked.batch_size,
            dropout_seed=self._context.seed if any(one.source == DROPOUT for one in samples) else None,
            label=label,
            progress=self._context.progress,
        )

    def norms(self, label: str, samples: list[Example]) -> dict[str, Tensor]:
        """How strongly each input of each matrix is used."""
        return _measure_norms(
            self._model,
            samples,
            self._modules,
            prompts=prompts_by_file(self._model, {}, samples),
            batch_size=self._asked.batch_size,
            label=label,
            progress=self._context.progress,
        )


def _pruned_first(model: SentenceTransformer, scored: _Scored) -> dict[str, Tensor]:
    """The scores with everything that is zero already below all others, so that a share counts it in."""
    backbone = transformer_of(model).model
    return {
        matrix.name: scored.scores[matrix.name].masked_fill(weight_of(backbone, matrix) == 0, -math.inf)
        for matrix in scored.matrices
    }


def _neurons_by_layer(scored: _Scored) -> list[Tensor]:
    """The scores of the MLP neurons of each layer."""
    layers = max(matrix.block for matrix in scored.matrices) + 1
    found = []
    for layer in range(layers):
        here = [matrix for matrix in scored.matrices if matrix.block == layer]
        axes = {matrix.name: (matrix.rows.split("+"), matrix.columns.split("+")) for matrix in here}
        found.append(_neuron_scores({name: scored.scores[name] for name in axes}, axes))
    return found


_BINS = 40


def _count_alignment(aligned: Mapping[str, Tensor], sizes: Mapping[str, int]) -> GradientAlignment:
    """Weights by the cosine they were given; `sizes` are the weights of each matrix."""
    cosines = torch.cat([value.flatten().float().cpu() for value in aligned.values()])
    each = torch.cat(
        [torch.full((value.numel(),), sizes[name] // value.numel()) for name, value in aligned.items()]
    )
    bins = ((cosines + 1) / 2 * _BINS).long().clamp(0, _BINS - 1)
    counts = torch.zeros(_BINS, dtype=torch.long).scatter_add_(0, bins, each)
    shared, conflicting = int(each[cosines > NEUTRAL].sum()), int(each[cosines < -NEUTRAL].sum())
    return GradientAlignment(
        counts=tuple(counts.tolist()),
        shared=shared,
        specific=int(each.sum()) - shared - conflicting,
        conflicting=conflicting,
    )
