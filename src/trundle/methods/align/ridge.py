"""The closed-form linear map from one model's vectors into another's space.

Ridge regression on a few thousand texts takes seconds, makes a cut model usable and is the best known start
for training. The penalty pulls the map towards zero or, between spaces of the same width, towards a
multiple of the identity, because a model that was cut only a little returns nearly its old vectors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trundle.errors import BadInput

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
