"""LEAF as batches and an objective for the one loop: learn to give the teacher's vector for each text.

The loss is ‖y − ŷ‖₂, not squared, averaged over the batch; targets come from disk. Texts carry the prompt of their kind,
the same one the teacher saw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.data.labelling import role_of
from trundle.data.targets import Targets
from trundle.model.prompts import prompts_by_role
from trundle.model.tokenise import check_fast_tokenizer, make_tokeniser
from trundle.train.batches import Batches, ByLength, Indices
from trundle.train.losses import leaf

Batch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """A student and how it is fed and judged."""

    student: SentenceTransformer
    batches: Batches[Batch]
    validation: Batches[Batch] | None

    def objective(self, batch: Batch) -> Tensor:
        """The mean distance of the student's vectors from the teacher's."""
        features, targets = batch
        return leaf(self.student(dict(features))["sentence_embedding"], targets)


def make_alignment(
    student: SentenceTransformer,
    targets: Targets,
    validation: Targets | None,
    *,
    batch_size: int,
    query_weight: float = 1.0,
    seed: int = 0,
) -> Alignment:
    """Put targets into batches of similar length; a query counts `query_weight` times as often as another text."""

    def batches(of: Targets, weights: Sequence[float]) -> Batches[Batch]:
        kinds = is_query(of)
        order = ByLength(
            of.lengths, batch_size=min(batch_size, len(of)), seed=seed, kinds=kinds, weights=weights
        )
        return Batches(order=order, load=_loader(student, of))

    return Alignment(
        student=student,
        batches=batches(targets, (1.0, query_weight)),
        validation=None if validation is None else batches(validation, (1.0, 1.0)),
    )


def is_query(targets: Targets) -> NDArray[np.uint8]:
    """1 for each text that is a query."""
    return np.asarray([kind == "query" for kind in targets.kinds(np.arange(len(targets)))], dtype=np.uint8)


def _loader(student: SentenceTransformer, targets: Targets) -> Callable[[Indices], Batch]:
    check_fast_tokenizer(student)
    prompts, tokenise = prompts_by_role(student), make_tokeniser(student)

    def load(positions: Indices) -> Batch:
        texts, kinds = targets.texts(positions), targets.kinds(positions)
        prompted = [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]
        return tokenise(prompted), torch.from_numpy(targets.vectors(positions))

    return load
