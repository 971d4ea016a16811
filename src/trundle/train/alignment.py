"""LEAF as batches and an objective for the one loop: learn to give the teacher's vector for each text.

The loss is ‖y − ŷ‖₂, not squared, averaged over the batch; targets come from disk. Texts carry the prompt of their kind,
the same one the teacher saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import ArrayLike, NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.methods.align.imitation import Outputs, _same_shape
from trundle.model.encode import ShortCut, check_fast_tokenizer, find_short_cut, make_tokeniser
from trundle.model.heads import prompts_by_role
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import role_of
from trundle.teacher.targets import Targets
from trundle.train.batches import (
    Batches,
    ByLength,
    Indices,
    _batch_count,
    _Divider,
    _epoch_size,
    _even_bounds,
)

_CHUNK = 16_384
"""Texts tokenised at once: enough for all cores."""
_TOKENS_PER_TEXT = 512
"""No more than this is expected of a text when room is looked for."""
_SHARE_OF_FREE_MEMORY = 0.25
_DTYPES = {"float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class _Resident:
    """All texts of a store, tokenised once."""

    short_cut: ShortCut
    tokens: Tensor
    lengths: NDArray[np.int64]
    starts: NDArray[np.int64]
    vectors: Tensor

    def load(self, positions: NDArray[np.int64]) -> tuple[dict[str, Any], Tensor]:
        """The features and targets of some texts, on the device."""
        features = self.short_cut.features(self.tokens, self.starts[positions], self.lengths[positions])
        rows = torch.from_numpy(positions).to(self.vectors.device)
        return features, self.vectors[rows].float()


def _fits(targets: Targets, free_bytes: int) -> bool:
    """Whether a store surely fits into memory of which so many bytes are free."""
    characters = np.minimum(targets.lengths, _TOKENS_PER_TEXT)
    number = np.dtype(targets.manifest.dtype).itemsize
    needed = 4 * int(characters.sum()) + number * targets.width * len(targets)
    return needed < _SHARE_OF_FREE_MEMORY * free_bytes


def _make_resident(
    model: SentenceTransformer, targets: Targets, device: torch.device, *, progress: Progress = SILENT
) -> _Resident | None:
    """Bring a store to a device, or None where the model's tokens can't be had the fast way."""
    short_cut = find_short_cut(model)
    if short_cut is None:
        return None
    prompts = prompts_by_role(model)
    vectors = torch.empty((len(targets), targets.width), dtype=_DTYPES[targets.manifest.dtype], device=device)
    tokens, lengths = [], []
    with progress.task("tokenising", len(targets)) as advance:
        for start in range(0, len(targets), _CHUNK):
            positions = np.arange(start, min(start + _CHUNK, len(targets)))
            texts, kinds = targets.texts(positions), targets.kinds(positions)
            prompted = [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]
            flat, counts = short_cut.flat(prompted)
            tokens.append(torch.from_numpy(flat).to(device))
            lengths.append(counts)
            vectors[start : start + len(positions)] = torch.from_numpy(targets.vectors(positions)).to(device)
            advance(len(positions))
    counts = np.concatenate(lengths)
    return _Resident(
        short_cut=short_cut,
        tokens=torch.cat(tokens),
        lengths=counts,
        starts=counts.cumsum() - counts,
        vectors=vectors,
    )


_B = TypeVar("_B")
_T = TypeVar("_T")


def _batches_of_shares(
    lengths: ArrayLike,
    load: Callable[[Indices], _B],
    *,
    batch_size: int,
    seed: int,
    kinds: NDArray[Any],
    weights: Sequence[float],
) -> Batches[_B]:
    """The batches of this process; all processes must call this together."""
    everyone = _of_all_processes([_epoch_size(kinds, weights)])
    count = _batch_count(sum(everyone), min(batch_size, sum(everyone)))
    order = ByLength(lengths, batch_size=batch_size, seed=seed, kinds=kinds, weights=weights, batches=count)
    bounds = [_even_bounds(texts, count) for texts in everyone]

    def size(number: int) -> int:
        place = order.place(number)
        return sum(int(bound[place + 1] - bound[place]) for bound in bounds)

    return Batches(order=order, load=load, size=size)


def _of_all_processes(own: list[_T]) -> list[_T]:
    """What each process has, in the order of processes, the same for all; all processes must call this together."""
    PartialState(cpu=not torch.accelerator.is_available())
    everyone: list[_T] = gather_object(own)
    return everyone


def rows_of_all_processes(own: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rows of all processes, for what is too small a matter to be computed from one process's texts alone."""
    return np.concatenate(_of_all_processes([own]))


_Batch = tuple[dict[str, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """A student and how it is fed and judged."""

    student: nn.Module
    batches: Batches[_Batch]
    validation: Batches[_Batch] | None
    imitate: Callable[[Mapping[str, Any], Outputs], Tensor] | None = None
    """What is added to the distance while training, to compare with losses that look inside both models."""

    def objective(self, batch: _Batch) -> Tensor:
        """The mean distance of the student's vectors from the teacher's."""
        features, targets = batch
        outputs = self.student(dict(features))
        distance = _leaf(outputs["sentence_embedding"], targets)
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

    def batches(of: Targets, weights: Sequence[float], resident: _Resident | None) -> Batches[_Batch]:
        lengths = of.lengths if resident is None else resident.lengths
        load = _loader(student, of) if resident is None else resident.load
        kinds = _is_query(of)
        if of.is_share:
            return _batches_of_shares(
                lengths, load, batch_size=batch_size, seed=seed, kinds=kinds, weights=weights
            )
        size = min(batch_size, len(of))
        order = ByLength(lengths, batch_size=size, seed=seed, kinds=kinds, weights=weights)
        return Batches(order=order, load=load, divider=divider)

    check_fast_tokenizer(student)
    divider = None if imitate is not None else _make_divider(progress.say)
    resident, device = None, student.device
    if device.type == "cuda" and _fits(targets, torch.cuda.mem_get_info(device)[0]):
        resident = _make_resident(student, targets, device, progress=progress)
    return Alignment(
        student=student,
        batches=batches(targets, (1.0, query_weight), resident),
        validation=None if validation is None else batches(validation, (1.0, 1.0), None),
        imitate=imitate,
    )


def _make_divider(say: Callable[[str], None]) -> _Divider[_Batch]:
    """Each text's distance is its own, so any part of a batch can be taken by itself; what memory it takes goes by its tokens."""

    def rows(batch: _Batch) -> int:
        return len(batch[1])

    def size(batch: _Batch) -> int:
        features, targets = batch
        tensors = [value for value in features.values() if isinstance(value, Tensor)]
        # A static model's tokens lie one after the other, not in rows.
        by_row = all(len(tensor) == len(targets) for tensor in tensors)
        return max((tensor.numel() for tensor in tensors), default=0) if by_row else 0

    def halves(batch: _Batch) -> tuple[_Batch, _Batch]:
        middle = rows(batch) // 2
        return _rows(batch, slice(None, middle)), _rows(batch, slice(middle, None))

    return _Divider(texts=rows, size=size, halves=halves, say=say)


def _rows(batch: _Batch, chosen: slice) -> _Batch:
    features, targets = batch
    cut = {key: value[chosen] if isinstance(value, Tensor) else value for key, value in features.items()}
    return cut, targets[chosen]


def _is_query(targets: Targets) -> NDArray[np.uint8]:
    """1 for each text that is a query."""
    return targets.of_kind("query").astype(np.uint8)


def _loader(student: SentenceTransformer, targets: Targets) -> Callable[[Indices], _Batch]:
    prompts, tokenise = prompts_by_role(student), make_tokeniser(student)

    def load(positions: Indices) -> _Batch:
        texts, kinds = targets.texts(positions), targets.kinds(positions)
        prompted = [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]
        return tokenise(prompted), torch.from_numpy(targets.vectors(positions))

    return load


def _leaf(student: Tensor, target: Tensor) -> Tensor:
    """LEAF: the mean distance ‖y − ŷ‖₂ of a text, not squared.

    At distance zero the slope of a norm is undefined; torch's vector norm gives 0 there, which is what is wanted.
    """
    _same_shape("vectors", student, target)
    distances: Tensor = torch.linalg.vector_norm(student.float() - target.float(), dim=-1)
    return distances.mean()
