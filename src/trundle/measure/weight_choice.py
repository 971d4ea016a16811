"""Which weights go: exact counts of the lowest scores, over all matrices, in each, in each row, in fours, or by neuron.

Pure functions of tensors, (out, in). Equal scores go in the order they stand in, so that a choice is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from trundle.measure.weight_names import Selection


def how_many(weights: int, share: Fraction) -> int:
    """The whole number of weights a share of them is, rounded down, exactly."""
    return math.floor(weights * share)


def lowest(scores: Tensor, count: int) -> Tensor:
    """True at exactly `count` of the lowest scores; among equals the first ones go."""
    flat = scores.flatten()
    gone = torch.zeros_like(flat, dtype=torch.bool)
    if count > 0:
        border = torch.kthvalue(flat, count).values
        torch.lt(flat, border, out=gone)
        equal = torch.nonzero(flat == border).flatten()
        gone[equal[: count - int(gone.sum())]] = True
    return gone.view_as(scores)


def choose(scores: Mapping[str, Tensor], share: Fraction, selection: Selection) -> dict[str, Tensor]:
    """Where weights go, by matrix: a share of all of them, of each matrix, or of each row."""
    if selection == "global":
        whole = torch.cat([score.flatten() for score in scores.values()])
        gone = lowest(whole, how_many(whole.numel(), share))
        parts = torch.split(gone, [score.numel() for score in scores.values()])
        return {name: part.view_as(score) for (name, score), part in zip(scores.items(), parts, strict=True)}
    if selection == "tensor":
        return {name: lowest(score, how_many(score.numel(), share)) for name, score in scores.items()}
    return {name: lowest_in_rows(score, how_many(score.shape[1], share)) for name, score in scores.items()}


def lowest_in_rows(scores: Tensor, count: int) -> Tensor:
    """True at exactly `count` of the lowest scores of each row."""
    order = scores.argsort(dim=1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :count], True)


def two_of_four(scores: Tensor) -> Tensor:
    """True at the two lowest of each four weights that stand side by side in a row."""
    rows, columns = scores.shape
    return lowest_in_rows(scores.reshape(-1, 4), 2).view(rows, columns)


def neuron_scores(
    scores: Mapping[str, Tensor], axes: Mapping[str, tuple[Sequence[str], Sequence[str]]]
) -> Tensor:
    """The summed scores of each MLP neuron of one block: its row in the maps before it, its column in the map after.

    `axes` are the plain axes along the rows and columns of each matrix; a fused matrix holds a neuron more than once.
    """
    total: Tensor | None = None
    for name, score in scores.items():
        rows, columns = axes[name]
        for along, sums in ((rows, score.sum(dim=1)), (columns, score.sum(dim=0))):
            if set(along) == {"mlp"}:
                found = sums.view(len(along), -1).sum(dim=0)
                total = found if total is None else total + found
    if total is None:
        raise ValueError("none of the matrices lies along the neurons of an MLP")
    return total


def best_neurons(scores: Tensor, count: int) -> tuple[int, ...]:
    """The `count` neurons with the highest scores, in rising order."""
    gone = lowest(scores, len(scores) - count)
    return tuple(torch.nonzero(~gone).flatten().tolist())
