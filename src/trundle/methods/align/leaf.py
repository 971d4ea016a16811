"""LEAF as a training task: the student learns to reproduce the teacher's vector of each text.

The loss is ‖y − ŷ‖₂, not squared, averaged over the batch; the targets are read from disk. Each text
carries the prompt of its kind, the same one the teacher saw.
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

from trundle.methods.align.imitation import _Outputs, _same_shape
from trundle.model.encode import ShortCut, check_fast_tokenizer, find_short_cut, make_tokeniser
from trundle.model.heads import prompts_by_role
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import role_of
from trundle.teacher.targets import Targets
from trundle.train.batches import Batches, BatchSplitter, ByLength, Indices, sharded_batches
from trundle.train.loop import TrainingTask

_CHUNK = 16_384
"""Texts tokenised at once: enough for all cores."""
_TOKENS_PER_TEXT = 512
"""No text is expected to have more tokens than this when its memory is estimated."""
_SHARE_OF_FREE_MEMORY = 0.25
_DTYPES = {"float16": torch.float16, "float32": torch.float32}

_Batch = tuple[dict[str, Any], Tensor]


def make_align_task(
    student: SentenceTransformer,
    targets: Targets,
    validation: Targets | None,
    *,
    batch_size: int,
    query_weight: float = 1.0,
    seed: int = 0,
    imitate: Callable[[Mapping[str, Any], _Outputs], Tensor] | None = None,
    progress: Progress = SILENT,
) -> TrainingTask[_Batch]:
    """Makes batches of texts of similar length, with the LEAF loss.

    A query comes `query_weight` times as often as another text. `imitate` is added to the loss while
    training. On a GPU, targets that fit into its memory are copied there once.
    """

    def batches(of: Targets, weights: Sequence[float], resident: _Resident | None) -> Batches[_Batch]:
        lengths = of.lengths if resident is None else resident.lengths
        load = _loader(student, of) if resident is None else resident.load
        is_query = of.of_kind("query").astype(np.uint8)
        if of.is_share:
            return sharded_batches(
                lengths, load, batch_size=batch_size, seed=seed, kinds=is_query, weights=weights
            )
        size = min(batch_size, len(of))
        order = ByLength(lengths, batch_size=size, seed=seed, kinds=is_query, weights=weights)
        return Batches(order=order, load=load, splitter=splitter)

    check_fast_tokenizer(student)
    splitter = None if imitate is not None else _make_splitter(progress.say)
    resident, device = None, student.device
    if device.type == "cuda" and _fits(targets, torch.cuda.mem_get_info(device)[0]):
        resident = _make_resident(student, targets, device, progress=progress)
    return TrainingTask(
        name="align",
        losses=(_make_loss(imitate),),
        batches=batches(targets, (1.0, query_weight), resident),
        validation=None if validation is None else batches(validation, (1.0, 1.0), None),
    )


def _make_loss(
    imitate: Callable[[Mapping[str, Any], _Outputs], Tensor] | None = None,
) -> Callable[[nn.Module, _Batch], Tensor]:
    def loss(model: nn.Module, batch: _Batch) -> Tensor:
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


def _loader(student: SentenceTransformer, targets: Targets) -> Callable[[Indices], _Batch]:
    prompts, tokenise = prompts_by_role(student), make_tokeniser(student)
    return lambda positions: (
        tokenise(_prompted(targets, positions, prompts)),
        torch.from_numpy(targets.vectors(positions)),
    )


def _prompted(targets: Targets, positions: Indices, prompts: Mapping[Any, str]) -> list[str]:
    texts, kinds = targets.texts(positions), targets.kinds(positions)
    return [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]


def _make_splitter(say: Callable[[str], None]) -> BatchSplitter[_Batch]:
    def rows(batch: _Batch) -> int:
        return len(batch[1])

    def size(batch: _Batch) -> int:
        features, targets = batch
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        # A static model's tokens are concatenated, not in rows.
        by_row = all(len(tensor) == len(targets) for tensor in tensors)
        return max((tensor.numel() for tensor in tensors), default=0) if by_row else 0

    def part(batch: _Batch, chosen: slice) -> _Batch:
        features, targets = batch
        cut = {key: value[chosen] if isinstance(value, Tensor) else value for key, value in features.items()}
        return cut, targets[chosen]

    def halves(batch: _Batch) -> tuple[_Batch, _Batch]:
        middle = rows(batch) // 2
        return part(batch, slice(None, middle)), part(batch, slice(middle, None))

    return BatchSplitter(texts=rows, size=size, halves=halves, say=say)


@dataclass(frozen=True)
class _Resident:
    """All texts of a store, tokenised once, and their vectors, in the memory of a device."""

    short_cut: ShortCut
    tokens: Tensor
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    vectors: Tensor

    def load(self, positions: Indices) -> _Batch:
        features = self.short_cut.features(self.tokens, self.starts[positions], self.lengths[positions])
        rows = torch.from_numpy(positions).to(self.vectors.device)
        return features, self.vectors[rows].float()


def _fits(targets: Targets, free_bytes: int) -> bool:
    """Whether a store certainly fits into memory, by an estimate of at most one token per character."""
    characters = np.minimum(targets.lengths, _TOKENS_PER_TEXT)
    value_bytes = np.dtype(targets.manifest.dtype).itemsize
    needed = 4 * int(characters.sum()) + value_bytes * targets.width * len(targets)
    return needed < _SHARE_OF_FREE_MEMORY * free_bytes


def _make_resident(
    model: SentenceTransformer, targets: Targets, device: torch.device, *, progress: Progress = SILENT
) -> _Resident | None:
    """Copies a store to a device; returns None if the fast path can't reproduce the model's tokens."""
    short_cut = find_short_cut(model)
    if short_cut is None:
        return None
    prompts = prompts_by_role(model)
    vectors = torch.empty((len(targets), targets.width), dtype=_DTYPES[targets.manifest.dtype], device=device)
    tokens, lengths = [], []
    with progress.task("tokenising", len(targets)) as advance:
        for start in range(0, len(targets), _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, len(targets)))
            flat, counts = short_cut.flat(_prompted(targets, positions, prompts))
            tokens.append(torch.from_numpy(flat).to(device))
            lengths.append(counts)
            stop = start + len(positions)
            vectors[start:stop] = torch.from_numpy(targets.rows(start, stop)).to(device)
            advance(len(positions))
    counts = np.concatenate(lengths)
    return _Resident(short_cut, torch.cat(tokens), counts, counts.cumsum() - counts, vectors)
