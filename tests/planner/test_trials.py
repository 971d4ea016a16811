"""Who goes on in a contest of candidates, told from distances alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trundle.planner.halving import plan_time
from trundle.planner.outcome import Tried
from trundle.planner.trials import Trials
from trundle.progress import SILENT


def contest(
    monkeypatch: pytest.MonkeyPatch, distances: dict[str, Sequence[float]]
) -> tuple[list[Tried], list[str]]:
    """Eight minutes are enough for all rounds; what each candidate reaches in them is given."""
    asked: list[str] = []

    def trial(_self: Trials, tried: Tried, number: int, seconds: float) -> Tried:
        asked.append(tried.candidate.name)
        reached = distances[tried.candidate.name][number]
        return replace(tried, distances=(*tried.distances, reached), seconds=(*tried.seconds, seconds))

    monkeypatch.setattr(Trials, "_trial", trial)
    unused: Any = None
    trials = Trials(
        source="", corpus=unused, texts=0, work=Path(), seed=0, trust_remote_code=False, progress=SILENT
    )
    entered = [Tried(candidate=SimpleNamespace(name=name)) for name in distances]  # type: ignore[arg-type]
    found = trials.contest(entered, plan_time(60, len(entered)), until=math.inf)
    return found, asked


def test_the_better_half_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = contest(monkeypatch, {"a": [0.53, 0.50], "b": [0.52, 0.51], "c": [0.55], "d": [0.56]})
    assert asked == ["a", "b", "c", "d", "b", "a"]
    assert [each.candidate.name for each in found] == ["a", "b", "c", "d"]
    assert [each.outcome for each in found] == [
        "chosen",
        *["dropped in round 2"],
        *2 * ["dropped in round 1"],
    ]


def test_the_hopeless_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = contest(monkeypatch, {"a": [0.7], "b": [0.5], "c": [0.66], "d": [0.9]})
    assert asked == ["a", "b", "c", "d"], "all others are far behind, so the leader needs no second round"
    assert [each.candidate.name for each in found] == ["b", "c", "a", "d"]
    assert [each.outcome for each in found[1:]] == 3 * ["dropped in round 1"]
