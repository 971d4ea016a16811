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
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trundle.data.tuples import Example
from trundle.errors import BadInput
from trundle.model.tokenise import Features
from trundle.train.batches import Batches
from trundle.train.contrastive import TEMPERATURE, angle, cosine, distil, infonce
from trundle.train.grouped import ByGroup
from trundle.train.tuple_batches import Chunks, Prompts, TupleBatch, make_tuple_loader

Objective = Literal["infonce", "angle", "cosine", "infonce+angle", "distil"]
TEXTS_ON_GPU = 256
"""In one forward pass, at the least: the GPU of a small model waits for being told what to do, not for doing it."""
RANKING_WEIGHT = 20.0
"""How much ranking counts beside the order of pairs, where both are learned."""


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A student and how it is fed and judged."""

    student: nn.Module
    batches: Batches[TupleBatch]
    validation: Batches[TupleBatch] | None
    kind: Objective
    temperature: float
    cached: bool
    teacher: nn.Module | None = None
    """Whose similarities are imitated, with `distil`; it reads the same tokens."""

    def objective(self, batch: TupleBatch) -> Tensor:
        """The loss of one batch."""
        queries, documents = self._encode(batch.queries), self._encode(batch.documents)
        if self.kind == "infonce":
            return self._ranking(queries, documents, batch)
        loss = cosine if self.kind == "cosine" else angle
        left, right = queries[batch.pairs[:, 0]], documents[batch.pairs[:, 1]]
        if self.kind == "distil":
            return distil(left, right, self._as_taught(batch))
        ordered = loss(left, right, batch.labels, temperature=self.temperature)
        if self.kind == "infonce+angle":
            return RANKING_WEIGHT * self._ranking(queries, documents, batch) + ordered
        return ordered

    def _ranking(self, queries: Tensor, documents: Tensor, batch: TupleBatch) -> Tensor:
        return infonce(
            queries, documents, batch.answers, excluded=batch.excluded, temperature=self.temperature
        )

    @torch.no_grad()
    def _as_taught(self, batch: TupleBatch) -> tuple[Tensor, Tensor]:
        """The teacher's vectors of a batch's pairs."""
        assert self.teacher is not None
        taught = replace(self, student=self.teacher.eval())
        queries, documents = taught._encode(batch.queries), taught._encode(batch.documents)
        return queries[batch.pairs[:, 0]], documents[batch.pairs[:, 1]]

    def _encode(self, chunks: Chunks) -> Tensor:
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
    objective: Objective = "infonce",
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

    at_once = max(batch_size, TEXTS_ON_GPU) if torch.accelerator.is_available() else batch_size

    def batches(of: Sequence[Example]) -> Batches[TupleBatch]:
        load = make_tuple_loader(student, of, prompts, chunk=mini_batch or at_once, negatives=negatives)
        return Batches(order=ByGroup(sources_of(of), batch_size=batch_size, seed=seed), load=load)

    return Contrast(
        student=student,
        batches=batches(examples),
        validation=batches(validation) if validation else None,
        kind=objective,
        temperature=temperature,
        cached=mini_batch is not None,
        teacher=teacher,
    )


def sources_of(examples: Sequence[Example]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """A number for the source of each example."""
    numbers = {source: number for number, source in enumerate(dict.fromkeys(e.source for e in examples))}
    return np.asarray([numbers[example.source] for example in examples], dtype=np.int64)
