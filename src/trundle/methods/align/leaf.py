"""LEAF as a training task: the student learns to reproduce the teacher's vector of each text.

The loss is ‖y − ŷ‖₂, not squared, averaged over the batch; the targets are read from disk. Each text
carries the prompt of its kind, the same one the teacher saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.methods.align.imitation import _Outputs, _same_shape
from trundle.methods.align.resident import Batch, Resident, prompted, resident_on
from trundle.methods.contract import Context
from trundle.model.heads import prompts_by_role
from trundle.model.layout import token_limit
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of
from trundle.model.tokens import check_fast_tokenizer, make_tokeniser
from trundle.progress import process_count
from trundle.teacher.targets import Targets
from trundle.train.batches import Batches, BatchSplitter, ByBucket, ByLength, Indices, sharded_batches
from trundle.train.loop import TrainingTask


def make_align_task(
    student: SentenceTransformer,
    targets: Targets,
    validation: Targets | None,
    *,
    batch_size: int,
    query_weight: float = 1.0,
    imitate: Callable[[Mapping[str, Any], _Outputs], Tensor] | None = None,
    context: Context,
) -> TrainingTask[Batch]:
    """Makes batches of texts of similar length, with the LEAF loss.

    A query comes `query_weight` times as often as another text. `imitate` is added to the loss while
    training. On a GPU, targets that fit into its memory are copied there once.
    """
    seed = context.seed

    def batches(of: Targets, weights: Sequence[float], resident: Resident | None) -> Batches[Batch]:
        lengths = of.lengths if resident is None else resident.lengths.cpu().numpy()
        load = _loader(student, of) if resident is None else resident.load
        is_query = of.of_kind("query").astype(np.uint8)
        if of.is_share:
            return sharded_batches(
                lengths, load, batch_size=batch_size, seed=seed, kinds=is_query, weights=weights
            )
        size = min(batch_size, len(of))
        if resident is not None and imitate is None and size % process_count() == 0:
            bucketed = ByBucket(
                lengths,
                batch_size=size,
                seed=seed,
                kinds=is_query,
                weights=weights,
                longest=_longest(student),
            )
            return Batches(order=bucketed, load=load, gather=resident.gather, splitter=splitter)
        order = ByLength(lengths, batch_size=size, seed=seed, kinds=is_query, weights=weights)
        return Batches(order=order, load=load, splitter=splitter)

    check_fast_tokenizer(student)
    splitter = None if imitate is not None else _make_splitter(context.progress.say)
    resident = resident_on(student.device, student, targets, context)
    return TrainingTask(
        name="align",
        losses=(_make_loss(imitate),),
        batches=batches(targets, (1.0, query_weight), resident),
        validation=None if validation is None else batches(validation, (1.0, 1.0), None),
    )


def _longest(student: SentenceTransformer) -> int | None:
    """The most tokens that a student has positions for, padding included; None if there is no limit."""
    if static_table(student) is not None:
        return None
    return token_limit(transformer_of(student).model)


def _make_loss(
    imitate: Callable[[Mapping[str, Any], _Outputs], Tensor] | None = None,
) -> Callable[[nn.Module, Batch], Tensor]:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        features, targets = batch
        outputs = model(dict(features))
        distance = _leaf(outputs["sentence_embedding"], targets)
        if imitate is None or not torch.is_grad_enabled():
            return distance
        return distance + imitate(features, outputs)

    return loss


def _leaf(student: Tensor, target: Tensor) -> Tensor:
    """The mean distance ‖y − ŷ‖₂, not squared; torch's vector norm has gradient 0 at distance 0."""
    _same_shape("vectors", student, target)
    distances: Tensor = torch.linalg.vector_norm(student.float() - target.float(), dim=-1)
    return distances.mean()


def _loader(student: SentenceTransformer, targets: Targets) -> Callable[[Indices], Batch]:
    prompts, tokenise = prompts_by_role(student), make_tokeniser(student)
    return lambda positions: (
        tokenise(prompted(targets, positions, prompts)),
        torch.from_numpy(targets.vectors(positions)),
    )


def _make_splitter(say: Callable[[str], None]) -> BatchSplitter[Batch]:
    def rows(batch: Batch) -> int:
        return len(batch[1])

    def size(batch: Batch) -> int:
        features, targets = batch
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        # A static model's tokens are concatenated, not in rows.
        by_row = all(len(tensor) == len(targets) for tensor in tensors)
        return max((tensor.numel() for tensor in tensors), default=0) if by_row else 0

    def part(batch: Batch, chosen: slice) -> Batch:
        features, targets = batch
        cut = {key: value[chosen] if isinstance(value, Tensor) else value for key, value in features.items()}
        return cut, targets[chosen]

    def halves(batch: Batch) -> tuple[Batch, Batch]:
        middle = rows(batch) // 2
        return part(batch, slice(None, middle)), part(batch, slice(middle, None))

    return BatchSplitter(texts=rows, size=size, halves=halves, say=say)
