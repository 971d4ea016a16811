"""Arithmetic of repeated measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure, how far the rounds lie from it (median absolute deviation), and the rounds themselves."""

    value: float
    spread: float
    rounds: tuple[float, ...]


def percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed, interpolated between neighbours."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def of_rounds(rounds: Sequence[float]) -> Measured:
    """One value a round: their median, which one disturbed round can't move far."""
    middle = median(rounds)
    return Measured(value=middle, spread=median(abs(each - middle) for each in rounds), rounds=tuple(rounds))


def of_samples(rounds: Sequence[Sequence[float]], percent: float) -> Measured:
    """Many samples a round: the median of the rounds' percentiles.

    Not the percentile of all samples together: a fast round has more of them, so it would count for more.
    """
    return of_rounds([percentile(samples, percent) for samples in rounds])


def rotated(count: int, turn: int) -> list[int]:
    """Who goes when in this round: everyone is first, second and last equally often."""
    return [(turn + place) % count for place in range(count)]
