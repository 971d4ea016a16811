"""A score for every weight that may be pruned, by any of the methods: samples in, one tensor a matrix out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.measure.weight_names import Method
from trundle.model.limits import LONGEST
from trundle.steps.contract import Context
from trundle.steps.file_prompts import prompts_by_file
from trundle.steps.weight_options import WeightsOptions
from trundle.steps.weight_samples import Name, Side, draw_samples

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from torch import Tensor

    from trundle.data import Example
    from trundle.model import Matrix
    from trundle.train import Gradients

GRADIENTS_OF: dict[Method, tuple[Name, ...]] = {
    "gaprune": ("domain", "general"),
    "domain-fisher": ("domain",),
    "general-fisher": ("general",),
}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores by matrix, as (out, in): the lower, the sooner a weight goes."""

    matrices: tuple[Matrix, ...]
    scores: dict[str, Tensor]
    aligned: dict[str, Tensor] | None
    """The cosines between the sides' gradients, where both were taken."""
    facts: dict[str, Any]


def score_weights(
    model: SentenceTransformer, asked: WeightsOptions, sides: Mapping[Name, Side], context: Context
) -> Scored:
    """Take what the method needs to know, and score."""
    backbone = body.transformer_of(model).model
    matrices = body.prunable(body.layout_of(backbone), attention=asked.attention)
    weights = {matrix.name: body.weight_of(backbone, matrix).float() for matrix in matrices}
    if asked.method in ("magnitude", "random"):
        return Scored(
            matrices=matrices,
            scores=_without_samples(asked.method, weights, context.seed),
            aligned=None,
            facts={},
        )
    probe = _Probe(model, tuple(weights), asked, context)
    facts: dict[str, Any] = {}
    if asked.method == "wanda":
        samples, facts["domain"] = draw_samples(model, sides["domain"], asked.samples, context)
        norms = probe.norms("domain", samples)
        return Scored(
            matrices=matrices,
            scores={name: measure.wanda(weight, norms[name]) for name, weight in weights.items()},
            aligned=None,
            facts=facts,
        )
    needed = GRADIENTS_OF[asked.method]
    found: dict[Name, Gradients] = {}
    for name in needed:
        samples, facts[name] = draw_samples(model, sides[name], asked.samples, context)
        found[name] = probe.gradients(name, samples)
    if len(needed) == 1:
        return Scored(matrices=matrices, scores=found[needed[0]].fisher, aligned=None, facts=facts)
    general, domain = found["general"], found["domain"]
    aligned = {
        name: measure.alignment(general.mean.pop(name), domain.mean.pop(name), asked.aligned_by)
        for name in weights
    }
    scores = {
        name: measure.dai(
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
    return Scored(matrices=matrices, scores=scores, aligned=aligned, facts=facts)


def _without_samples(method: str, weights: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    if method == "magnitude":
        return {name: weight.abs() for name, weight in weights.items()}
    return measure.random_scores(weights, seed=seed)


class _Probe:
    """A copy of the model in fp32 that samples are sent through."""

    def __init__(
        self, model: SentenceTransformer, modules: tuple[str, ...], asked: WeightsOptions, context: Context
    ) -> None:
        self._model = body.copy_of(model).float()
        takes = self._model.max_seq_length or LONGEST
        self._model.max_seq_length = min(asked.max_length or LONGEST, takes)
        self._modules, self._asked, self._context = modules, asked, context

    def gradients(self, label: str, samples: list[Example]) -> Gradients:
        """Fisher information and mean gradients."""
        return train.measure_gradients(
            self._model,
            samples,
            self._modules,
            prompts=prompts_by_file(self._model, {}, samples),
            batch_size=self._asked.batch_size,
            dropout_seed=self._context.seed if any(one.source == data.DROPOUT for one in samples) else None,
            label=label,
            progress=self._context.progress,
        )

    def norms(self, label: str, samples: list[Example]) -> dict[str, Tensor]:
        """How strongly each input of each matrix is used."""
        return train.measure_norms(
            self._model,
            samples,
            self._modules,
            prompts=prompts_by_file(self._model, {}, samples),
            batch_size=self._asked.batch_size,
            label=label,
            progress=self._context.progress,
        )


def pruned_first(model: SentenceTransformer, scored: Scored) -> dict[str, Tensor]:
    """The scores with everything that is zero already below all others, so that a share counts it in."""
    backbone = body.transformer_of(model).model
    return {
        matrix.name: scored.scores[matrix.name].masked_fill(body.weight_of(backbone, matrix) == 0, -math.inf)
        for matrix in scored.matrices
    }


def neurons_by_layer(scored: Scored) -> list[Tensor]:
    """The scores of the MLP neurons of each layer."""
    layers = max(matrix.block for matrix in scored.matrices) + 1
    found = []
    for layer in range(layers):
        here = [matrix for matrix in scored.matrices if matrix.block == layer]
        axes = {matrix.name: (matrix.rows.split("+"), matrix.columns.split("+")) for matrix in here}
        found.append(measure.neuron_scores({name: scored.scores[name] for name in axes}, axes))
    return found
