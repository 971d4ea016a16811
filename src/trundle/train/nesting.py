"""A wide model and the narrow ones inside it, trained together (NML): λ·Σ students + (1 − λ)·wide.

Each size gives its own objective to the loop, which adds them up and holds one size's graph in memory at a time. When many
sizes would make a step long, `per_step` of them are trained in each: the narrowest always, the others drawn by the batch
(the sandwich rule), weighed so that over many steps each counts as much as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.model.nested import NarrowModel
from trundle.train.alignment import Alignment
from trundle.train.batches import Batches, Indices
from trundle.train.contrast_task import Contrast

B = TypeVar("B")
Weighed = tuple[B, tuple[float, ...]]
"""A batch and what each model's loss on it counts, the wide one's first."""


MEASURED_BATCHES = 32


class Nest(nn.Module):
    """One set of weights, and all the models in it, the wide one first."""

    def __init__(self, wide: SentenceTransformer, narrow: Sequence[NarrowModel]) -> None:
        super().__init__()
        self.wide = wide
        self.narrow = nn.ModuleList(narrow)

    @property
    def models(self) -> tuple[nn.Module, ...]:
        """The wide model and the narrow ones, widest first."""
        return (self.wide, *self.narrow)


@dataclass(frozen=True, kw_only=True)
class Nesting(Generic[B]):
    """A nest and how it is fed and judged."""

    nest: Nest
    loss: Callable[[nn.Module, B], Tensor]
    batches: Batches[Weighed[B]]
    validation: Batches[Weighed[B]] | None

    @property
    def objectives(self) -> tuple[Callable[[Weighed[B]], Tensor], ...]:
        """One for each model, in the order of `nest.models`."""
        return tuple(partial(self._objective, number) for number in range(len(self.nest.models)))

    def _objective(self, number: int, batch: Weighed[B]) -> Tensor:
        inner, weights = batch
        if not weights[number]:
            return torch.zeros((), device=self.nest.wide.device)
        return weights[number] * self.loss(self.nest.models[number], inner)

    @torch.no_grad()
    def losses(self) -> tuple[float, ...]:
        """Each model's own loss, over some validation batches."""
        if self.validation is None:
            return ()
        order, totals, texts = self.validation.order, np.zeros(len(self.nest.models)), 0
        self.nest.eval()
        for indices in map(order.batch, range(min(order.per_epoch, MEASURED_BATCHES))):
            inner, _ = send_to_device(self.validation.load(indices), self.nest.wide.device)
            totals += len(indices) * np.asarray(
                [float(self.loss(model, inner)) for model in self.nest.models]
            )
            texts += len(indices)
        return tuple((totals / texts).tolist())


def make_nesting(
    nest: Nest,
    task: Alignment | Contrast,
    *,
    student_weight: float,
    per_step: int | None = None,
    seed: int = 0,
) -> Nesting[Any]:
    """Give every model of a nest the task that the wide one was given."""
    narrow = len(nest.narrow)

    def loss(model: nn.Module, batch: object) -> Tensor:
        judged: Any = replace(task, student=model)
        found: Tensor = judged.objective(batch)
        return found

    def weighed(batches: Batches[Any], count: int | None) -> Batches[Weighed[Any]]:
        def load(indices: Indices) -> Weighed[Any]:
            drawn = (1.0,) * narrow if count is None else drawn_sizes(narrow, count, indices, seed=seed)
            return batches.load(indices), (1 - student_weight, *(student_weight * one for one in drawn))

        return Batches(order=batches.order, load=load)

    return Nesting(
        nest=nest,
        loss=loss,
        batches=weighed(task.batches, per_step),
        validation=None if task.validation is None else weighed(task.validation, None),
    )


def drawn_sizes(narrow: int, count: int, batch: Indices, *, seed: int) -> tuple[float, ...]:
    """How often each narrow model counts for a batch: the last always once, `count` − 1 of the others in the others' stead."""
    others = narrow - 1
    chosen = min(count - 1, others)
    dice = np.random.default_rng([seed, *np.asarray(batch[:8]).tolist()])
    drawn = set(dice.permutation(others)[:chosen].tolist())
    return (*(others / chosen if number in drawn else 0.0 for number in range(others)), 1.0)
