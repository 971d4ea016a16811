"""LEAF as batches and an objective for the one loop: learn to give the teacher's vector for each text.

The loss is ‖y − ŷ‖₂, not squared, averaged over the batch; targets come from disk. Texts carry the prompt of their kind,
the same one the teacher saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.data.labelling import role_of
from trundle.data.targets import Targets
from trundle.model.prompts import prompts_by_role
from trundle.model.tokenise import check_fast_tokenizer, make_tokeniser
from trundle.progress import SILENT, Progress
from trundle.train.batches import Batches, ByLength, Indices
from trundle.train.dividing import Divider
from trundle.train.imitation import Outputs
from trundle.train.losses import leaf
from trundle.train.own_texts import batches_of_shares
from trundle.train.resident import Resident, fits, make_resident

Batch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """A student and how it is fed and judged."""

    student: nn.Module
    batches: Batches[Batch]
    validation: Batches[Batch] | None
    imitate: Callable[[Mapping[str, Any], Outputs], Tensor] | None = None
    """What is added to the distance while training, to compare with losses that look inside both models."""

    def objective(self, batch: Batch) -> Tensor:
        """The mean distance of the student's vectors from the teacher's."""
        features, targets = batch
        outputs = self.student(dict(features))
        distance = leaf(outputs["sentence_embedding"], targets)
        if self.imitate is None or not torch.is_grad_enabled():
            return distance
        return distance + self.imitate(features, outputs)


def make_alignment(
    student: SentenceTransformer,
    targets: Targets,
    validation: Targets | None,
    *,
    batch_size: int,
    query_weight: float = 1.0,
    seed: int = 0,
    imitate: Callable[[Mapping[str, Any], Outputs], Tensor] | None = None,
    progress: Progress = SILENT,
) -> Alignment:
    """Put targets into batches of similar length; a query counts `query_weight` times as often as another text."""

    def batches(of: Targets, weights: Sequence[float], resident: Resident | None) -> Batches[Batch]:
        lengths = of.lengths if resident is None else resident.lengths
        load = _loader(student, of) if resident is None else resident.load
        kinds = is_query(of)
        if of.is_share:
            return batches_of_shares(
                lengths, load, batch_size=batch_size, seed=seed, kinds=kinds, weights=weights
            )
        size = min(batch_size, len(of))
        order = ByLength(lengths, batch_size=size, seed=seed, kinds=kinds, weights=weights)
        return Batches(order=order, load=load, divider=divider)

    check_fast_tokenizer(student)
    divider = None if imitate is not None else make_divider(progress.say)
    resident, device = None, student.device
    if device.type == "cuda" and fits(targets, torch.cuda.mem_get_info(device)[0]):
        resident = make_resident(student, targets, device, progress=progress)
    return Alignment(
        student=student,
        batches=batches(targets, (1.0, query_weight), resident),
        validation=None if validation is None else batches(validation, (1.0, 1.0), None),
        imitate=imitate,
    )


def make_divider(say: Callable[[str], None]) -> Divider[Batch]:
    """Each text's distance is its own, so any part of a batch can be taken by itself; what memory it takes goes by its tokens."""

    def rows(batch: Batch) -> int:
        return len(batch[1])

    def size(batch: Batch) -> int:
        features, targets = batch
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        # A static model's tokens lie one after the other, not in rows.
        by_row = all(len(tensor) == len(targets) for tensor in tensors)
        return max((tensor.numel() for tensor in tensors), default=0) if by_row else 0

    def halves(batch: Batch) -> tuple[Batch, Batch]:
        middle = rows(batch) // 2
        return _rows(batch, slice(None, middle)), _rows(batch, slice(middle, None))

    return Divider(texts=rows, size=size, halves=halves, say=say)


def _rows(batch: Batch, chosen: slice) -> Batch:
    features, targets = batch
    cut = {key: value[chosen] if isinstance(value, Tensor) else value for key, value in features.items()}
    return cut, targets[chosen]


def is_query(targets: Targets) -> NDArray[np.uint8]:
    """1 for each text that is a query."""
    return targets.of_kind("query").astype(np.uint8)


def _loader(student: SentenceTransformer, targets: Targets) -> Callable[[Indices], Batch]:
    prompts, tokenise = prompts_by_role(student), make_tokeniser(student)

    def load(positions: Indices) -> Batch:
        texts, kinds = targets.texts(positions), targets.kinds(positions)
        prompted = [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]
        return tokenise(prompted), torch.from_numpy(targets.vectors(positions))

    return load
