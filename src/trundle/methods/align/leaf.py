"""How a student learns the teacher's vectors: a closed-form start, and LEAF as a training task.

Ridge regression from the student's vectors to the teacher's on a few thousand texts takes seconds, makes a
cut model usable and is the best known start for training. The penalty pulls the map towards zero or, between
spaces of the same width, towards a multiple of the identity, because a model that was cut only a little
returns nearly its old vectors.

LEAF's loss is ‖y − ŷ‖₂, not squared, averaged over the batch; the targets are read from disk. Each text
carries the prompt of its kind, the same one the teacher saw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.methods.align.imitation import _Outputs, _same_shape
from trundle.methods.align.resident import Batch, _prompted, _Resident, _resident_on
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

_Rows = NDArray[np.float32]
_STRENGTHS = tuple(10.0**exponent for exponent in range(-6, 2))
"""Penalties tried, as shares of the mean variance of the inputs."""
_NEAR_IDENTITY = (*_STRENGTHS, 1e2, 1e3, 1e4, 1e5)
_AS_GOOD = 1e-9
"""Cosines that differ by no more than this count as equal."""
_HELD_OUT_SHARE = 0.1
_FEWEST = 10


@dataclass(frozen=True, kw_only=True)
class _LinearMap:
    """y ≈ weight · x + bias, with the penalty that predicts held-out rows best."""

    weight: _Rows
    bias: _Rows
    strength: float
    """Infinite if only a multiple of the identity is left, without a bias."""
    identity: float
    """The multiple of the identity that the penalty pulls towards."""
    held_out_cosine: float

    def __call__(self, inputs: _Rows) -> _Rows:
        """Maps the inputs into the other space."""
        return inputs @ self.weight.T + self.bias


def fit_ridge(
    inputs: _Rows,
    targets: _Rows,
    *,
    seed: int,
    strengths: Sequence[float] = _STRENGTHS,
    near_identity: Sequence[float] = _NEAR_IDENTITY,
) -> _LinearMap:
    """Fits on nine tenths of the rows, chooses the penalty by cosine on the rest, then fits on all rows."""
    if len(inputs) < _FEWEST:
        raise BadInput(f"{len(inputs)} texts are too few to fit a linear map; pass at least {_FEWEST}")
    order = np.random.default_rng(seed).permutation(len(inputs))
    held = max(1, int(len(inputs) * _HELD_OUT_SHARE))
    test, train = order[:held], order[held:]
    candidates = [(0.0, tuple(strengths))]
    if inputs.shape[1] == targets.shape[1] and near_identity:
        candidates.append((_scale(inputs[train], targets[train]), tuple(near_identity)))
    found = []
    for identity, penalties in candidates:
        base = _multiple(identity, inputs, targets)
        solver = _Solver(inputs[train], targets[train] - base[train])
        predictions = [solver.predict(inputs[test], strength) + base[test] for strength in penalties]
        scores = [_mean_cosine(predicted, targets[test]) for predicted in predictions]
        best = _strongest_good(scores, penalties)
        found.append((scores[best], identity, penalties[best]))
        if identity:
            found.append((_mean_cosine(base[test], targets[test]), identity, math.inf))
    score, identity, strength = max(found)
    weight, bias = np.zeros((inputs.shape[1], targets.shape[1])), np.zeros(targets.shape[1])
    if strength < math.inf:
        weight, bias = _Solver(inputs, targets - _multiple(identity, inputs, targets)).solve(strength)
    if identity:
        weight += identity * np.eye(len(weight))
    return _LinearMap(
        weight=weight.T.astype(np.float32),
        bias=bias.astype(np.float32),
        strength=strength,
        identity=identity,
        held_out_cosine=float(score),
    )


def _multiple(identity: float, inputs: _Rows, targets: _Rows) -> _Rows:
    return np.float32(identity) * inputs if identity else np.zeros_like(targets)


def _scale(inputs: _Rows, targets: _Rows) -> float:
    """The number that brings inputs closest to targets."""
    length = float(np.einsum("ij,ij->", inputs, inputs, dtype=np.float64))
    return float(np.einsum("ij,ij->", inputs, targets, dtype=np.float64)) / length if length else 0.0


def _strongest_good(scores: Sequence[float], strengths: Sequence[float]) -> int:
    """The strongest penalty that is as good as the best, so that rounding errors do not decide."""
    good = [number for number, score in enumerate(scores) if score >= max(scores) - _AS_GOOD]
    return max(good, key=lambda number: strengths[number])


class _Solver:
    """Ridge regression with one eigendecomposition for all penalties."""

    def __init__(self, inputs: _Rows, targets: _Rows) -> None:
        self._input_mean = inputs.mean(axis=0, dtype=np.float64)
        self._target_mean = targets.mean(axis=0, dtype=np.float64)
        centred = inputs.astype(np.float64) - self._input_mean
        self._values, self._vectors = np.linalg.eigh(centred.T @ centred)
        self._values = np.clip(self._values, 0.0, None)
        self._projected = self._vectors.T @ (centred.T @ (targets.astype(np.float64) - self._target_mean))
        self._scale = float(self._values.mean()) or 1.0

    def solve(self, strength: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        weight = self._vectors @ (self._projected / (self._values + strength * self._scale)[:, None])
        return weight, self._target_mean - self._input_mean @ weight

    def predict(self, inputs: _Rows, strength: float) -> NDArray[np.float64]:
        weight, bias = self.solve(strength)
        predicted: NDArray[np.float64] = inputs @ weight + bias
        return predicted


def _mean_cosine(one: NDArray[np.floating], other: NDArray[np.floating]) -> float:
    """The mean cosine between corresponding rows; a zero row counts as 0."""
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    dots = np.einsum("ij,ij->i", one, other, dtype=np.float64)
    return float(np.mean(np.divide(dots, norms, out=np.zeros_like(dots), where=norms > 0)))


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

    def batches(of: Targets, weights: Sequence[float], resident: _Resident | None) -> Batches[Batch]:
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
    resident = _resident_on(student.device, student, targets, context)
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
        tokenise(_prompted(targets, positions, prompts)),
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
