"""Labelled rows as batches and an objective for the one loop: learn a class, or a number, for each text or pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

from trundle.model.tokenise import Features, check_fast_tokenizer, make_tokeniser
from trundle.train.batches import Batches, ByLength, Indices

Input = str | tuple[str, str]
Batch = tuple[Features, Tensor]


@dataclass(frozen=True, kw_only=True)
class HeadTask:
    """A student whose vectors are scores, and how it is fed and judged."""

    student: nn.Module
    batches: Batches[Batch]
    validation: Batches[Batch] | None

    def objective(self, batch: Batch) -> Tensor:
        """Cross-entropy where answers are classes, squared error where they are numbers."""
        features, right = batch
        scores: Tensor = self.student(dict(features))["sentence_embedding"].float()
        if right.is_floating_point():
            return functional.mse_loss(scores[:, 0], right)
        return functional.cross_entropy(scores, right)


def make_head_task(
    student: SentenceTransformer,
    inputs: Sequence[Input],
    answers: Sequence[float],
    validation: tuple[Sequence[Input], Sequence[float]] | None,
    *,
    classes: bool,
    batch_size: int,
    seed: int = 0,
) -> HeadTask:
    """Put rows into batches of similar length; an answer is the number of a class, or a number to be met."""
    check_fast_tokenizer(student)
    paired = isinstance(inputs[0], tuple)
    # The short cut knows of no second segment, so pairs go the library's way.
    tokenise: Callable[[list[Any]], Features] = student.preprocess if paired else make_tokeniser(student)

    def batches(of: Sequence[Input], right: Sequence[float]) -> Batches[Batch]:
        lengths = [len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in of]
        targets = torch.tensor(right, dtype=torch.int64 if classes else torch.float32)

        def load(rows: Indices) -> Batch:
            return tokenise([of[row] for row in rows]), targets[rows]

        return Batches(order=ByLength(lengths, batch_size=min(batch_size, len(of)), seed=seed), load=load)

    return HeadTask(
        student=student,
        batches=batches(inputs, answers),
        validation=None if validation is None else batches(*validation),
    )
