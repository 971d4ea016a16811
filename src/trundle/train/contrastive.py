"""Supervised training as batches and an objective for the one loop: right texts near, wrong ones far.

Large batches in little memory: with `cached`, each chunk of a batch is encoded without keeping what a backward pass needs, and
encoded again when its turn in the backward pass comes. The loss sees all vectors at once, so gradients are those of
the plain way; memory is that of one chunk. (Gradient caching, done by torch's own checkpointing.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.model.encode import Features
from trundle.train.batches import Batches, Indices, _batch_bounds
from trundle.train.tuples import Prompts, _Chunks, _make_tuple_loader, _TupleBatch

TEMPERATURE = 0.05


def _infonce(
    queries: Tensor,
    documents: Tensor,
    answers: Tensor,
    *,
    excluded: Tensor | None = None,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """The mean cross-entropy of finding each query's document among all documents by cosine over temperature.

    `answers[i]` is the row of query i's document. Where `excluded` is true, a document is no rival for a query.
    """
    with torch.autocast(queries.device.type, enabled=False):
        scores = directions(queries) @ directions(documents).T / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return functional.cross_entropy(scores, answers)


def _cosine(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """CoSENT: pairs ordered by their cosine."""
    return _ordering((directions(left) * directions(right)).sum(dim=-1) / temperature, labels)


def _distil(left: Tensor, right: Tensor, like: tuple[Tensor, Tensor]) -> Tensor:
    """Vanilla distillation: the squared error of pairs' cosines against those of a teacher's vectors."""
    ours = (directions(left) * directions(right)).sum(dim=-1)
    theirs = (directions(like[0]) * directions(like[1])).sum(dim=-1)
    return functional.mse_loss(ours, theirs)


def _angle(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """AnglE: pairs ordered by the angle between two complex vectors, whose slope does not fade where a cosine's does."""
    return _ordering(_angle_similarity(left, right) / temperature, labels)


def _angle_similarity(left: Tensor, right: Tensor) -> Tensor:
    """|cos(x, y) + Σ(bc − ad)/(‖x‖‖y‖)| with x = a + ib and y = c + id, halves of a vector being its two parts."""
    if left.shape[-1] % 2:
        raise BadInput(
            f"the angle loss splits vectors in halves, and {left.shape[-1]} is odd; use the objective infonce or cosine"
        )
    x, y = directions(left), directions(right)
    (a, b), (c, d) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    return ((x * y).sum(dim=-1) + (b * c - a * d).sum(dim=-1)).abs()


def _ordering(scores: Tensor, labels: Tensor) -> Tensor:
    """log(1 + Σ exp(s_i − s_j)) over all pairs i, j of scores in the wrong order's way: label_i < label_j."""
    differences = scores[:, None] - scores[None, :]
    wrong_way = labels[:, None] < labels[None, :]
    terms = differences.masked_fill(~wrong_way, -torch.inf).flatten()
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)


def directions(vectors: Tensor) -> Tensor:
    """Vectors of length 1, in full precision: half precision can't tell cosines of near texts apart."""
    return functional.normalize(vectors.float(), dim=-1)


class _ByGroup:
    """Each item once per epoch, in batches of one group each; both are shuffled anew in every epoch."""

    def __init__(self, groups: ArrayLike, *, batch_size: int, seed: int = 0) -> None:
        if batch_size < 1 or seed < 0:
            raise BadInput(f"batch size {batch_size} with seed {seed} can't be used; take at least 1 and 0")
        kinds = np.asarray(groups)
        if not len(kinds):
            raise BadInput("there is nothing to make batches of; give at least one example")
        self._seed = seed
        self._members: list[Indices] = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        self._bounds = [_batch_bounds(len(members), batch_size) for members in self._members]
        self._places = [
            (group, place) for group, bounds in enumerate(self._bounds) for place in range(len(bounds) - 1)
        ]
        self._epoch = -1
        self._shuffled: list[Indices] = []

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self._places)

    def batch(self, number: int) -> Indices:
        """The items of one batch; the shuffle of its epoch is kept until another epoch is asked for."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._shuffled = [rng.permutation(members) for members in self._members]
            self._order = rng.permutation(self.per_epoch)
            self._epoch = epoch
        group, at = self._places[self._order[place]]
        members, bounds = self._shuffled[group], self._bounds[group]
        chosen: Indices = members[bounds[at] : bounds[at + 1]]
        return chosen


_Objective = Literal["infonce", "angle", "cosine", "infonce+angle", "distil"]
_TEXTS_ON_GPU = 256
"""In one forward pass, at the least: the GPU of a small model waits for being told what to do, not for doing it."""
_RANKING_WEIGHT = 20.0
"""How much ranking counts beside the order of pairs, where both are learned."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A student and how it is fed and judged."""

    student: nn.Module
    batches: Batches[_TupleBatch]
    validation: Batches[_TupleBatch] | None
    kind: _Objective
    temperature: float
    cached: bool
    teacher: nn.Module | None = None
    """Whose similarities are imitated, with `distil`; it reads the same tokens."""

    def objective(self, batch: _TupleBatch) -> Tensor:
        """The loss of one batch."""
        queries, documents = self._encode(batch.queries), self._encode(batch.documents)
        if self.kind == "infonce":
            return self._ranking(queries, documents, batch)
        loss = _cosine if self.kind == "cosine" else _angle
        left, right = queries[batch.pairs[:, 0]], documents[batch.pairs[:, 1]]
        if self.kind == "distil":
            return _distil(left, right, self._as_taught(batch))
        ordered = loss(left, right, batch.labels, temperature=self.temperature)
        if self.kind == "infonce+angle":
            return _RANKING_WEIGHT * self._ranking(queries, documents, batch) + ordered
        return ordered

    def _ranking(self, queries: Tensor, documents: Tensor, batch: _TupleBatch) -> Tensor:
        return _infonce(
            queries, documents, batch.answers, excluded=batch.excluded, temperature=self.temperature
        )

    @torch.no_grad()
    def _as_taught(self, batch: _TupleBatch) -> tuple[Tensor, Tensor]:
        """The teacher's vectors of a batch's pairs."""
        assert self.teacher is not None
        taught = replace(self, student=self.teacher.eval())
        queries, documents = taught._encode(batch.queries), taught._encode(batch.documents)
        return queries[batch.pairs[:, 0]], documents[batch.pairs[:, 1]]

    def _encode(self, chunks: _Chunks) -> Tensor:
        vectors = [
            checkpoint(self._vectors, features, use_reentrant=False)
            if self.cached and torch.is_grad_enabled()
            else self._vectors(features)
            for features in chunks.features
        ]
        return torch.cat(vectors)[chunks.rows]

    def _vectors(self, features: Features) -> Tensor:
        vectors: Tensor = self.student(dict(features))["sentence_embedding"]
        return vectors


def make_contrast(
    student: SentenceTransformer,
    examples: Sequence[Example],
    validation: Sequence[Example],
    *,
    prompts: Mapping[str, Prompts],
    objective: _Objective = "infonce",
    batch_size: int,
    mini_batch: int | None = None,
    negatives: int | None = None,
    temperature: float = TEMPERATURE,
    teacher: SentenceTransformer | None = None,
    seed: int = 0,
) -> Contrast:
    """Put tuples into batches of one source each; with `mini_batch` no more texts than that are in memory at once."""
    if len(examples) < 2:
        raise BadInput(
            f"{len(examples)} labelled tuple can't teach what belongs together; give at least 2, better thousands"
        )

    at_once = max(batch_size, _TEXTS_ON_GPU) if torch.accelerator.is_available() else batch_size

    def batches(of: Sequence[Example]) -> Batches[_TupleBatch]:
        load = _make_tuple_loader(student, of, prompts, chunk=mini_batch or at_once, negatives=negatives)
        return Batches(order=_ByGroup(_sources_of(of), batch_size=batch_size, seed=seed), load=load)

    return Contrast(
        student=student,
        batches=batches(examples),
        validation=batches(validation) if validation else None,
        kind=objective,
        temperature=temperature,
        cached=mini_batch is not None,
        teacher=teacher,
    )


def _sources_of(examples: Sequence[Example]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number for the source of each example."""
    numbers = {source: number for number, source in enumerate(dict.fromkeys(e.source for e in examples))}
    return np.asarray([numbers[example.source] for example in examples], dtype=np.int64)
