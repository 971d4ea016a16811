"""Successive halving of candidates with given distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trundle.errors import BadModel, ImpossibleCut
from trundle.pipeline.run import Request
from trundle.search import budget
from trundle.search.budget import _plan_time
from trundle.search.trials import _Trials, _Tried

PACE = 2.0
"""Steps a second where a trial goes by the clock."""


RATE = 1e6
"""Texts a second: reading takes no time."""

NEAR = 0.02
"""One that is as near to the teacher as this learns nothing."""


def contest(
    monkeypatch: pytest.MonkeyPatch, distances: dict[str, Sequence[float]]
) -> tuple[list[_Tried], list[str]]:
    """An hour is enough for all rounds; the distances of each candidate are given, none if it is rejected."""
    asked: list[str] = []

    def trial(_self: _Trials, tried: _Tried, number: int, seconds: float, steps: int | None) -> _Tried:
        asked.append(tried.candidate.name)
        if len(distances[tried.candidate.name]) <= number:
            raise ImpossibleCut(f"{tried.candidate.name} can't be cut")
        reached = distances[tried.candidate.name][number]
        made = (
            0
            if distances[tried.candidate.name][number] < NEAR
            else round(PACE * seconds)
            if steps is None
            else steps
        )
        return replace(tried, distances=(*tried.distances, reached), steps=(*tried.steps, made))

    monkeypatch.setattr(_Trials, "_trial", trial)
    entered = [named(name) for name in distances]
    found = some_trials().contest(entered, _plan_time(60, len(entered), rate=RATE), until=math.inf)
    return found, asked


def some_trials() -> _Trials:
    return _Trials(source="", request=Request(source=""), texts=0, mapped=0, work=Path())


def named(name: str) -> _Tried:
    return _Tried(candidate=SimpleNamespace(name=name))  # type: ignore[arg-type]


def test_the_better_half_reaches_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = contest(monkeypatch, {"a": [0.53, 0.50], "b": [0.52, 0.51], "c": [0.55], "d": [0.56]})
    assert asked == ["a", "b", "c", "d", "b", "a"]
    assert [each.candidate.name for each in found] == ["a", "b", "c", "d"]
    assert [each.outcome for each in found] == [
        "chosen",
        *["dropped in round 2"],
        *2 * ["dropped in round 1"],
    ]


def test_all_candidates_make_as_many_steps_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the others are; and twice as many where they have twice the time."""
    monkeypatch.setattr(budget, "_TRIED", 4)
    found, _ = contest(monkeypatch, {"a": [], "b": [0.53, 0.50], "c": [0.52, 0.51], "d": [0.55], "e": [0.56]})
    first, second = (round(PACE * rung.seconds) for rung in _plan_time(60, 4, rate=RATE).rungs)
    assert second == 2 * first
    assert {each.candidate.name: each.steps for each in found} == {
        "a": (),
        "b": (first, second),
        "c": (first, second),
        "d": (first,),
        "e": (first,),
    }


def test_a_candidate_already_close_enough_does_not_set_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = contest(monkeypatch, {"a": [0.01], "b": [0.5], "c": [0.4]})
    first = round(PACE * _plan_time(60, 3, rate=RATE).rungs[0].seconds)
    assert {each.candidate.name: each.steps for each in found} == {"a": (0,), "b": (first,), "c": (first,)}


def test_far_behind_candidates_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = contest(monkeypatch, {"a": [0.7], "b": [0.5], "c": [0.66], "d": [0.9]})
    assert asked == ["a", "b", "c", "d"], "all others are far behind, so the leader needs no second round"
    assert [each.candidate.name for each in found] == ["b", "c", "a", "d"]
    assert [each.outcome for each in found[1:]] == 3 * ["dropped in round 1"]


def test_a_rejected_candidate_is_listed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "_TRIED", 2)
    found, asked = contest(monkeypatch, {"a": [], "b": [0.6], "c": [0.5], "d": [0.4]})
    assert asked == ["a", "b", "c"], "the third comes in for the first, and two are enough"
    assert [(each.candidate.name, each.outcome) for each in found] == [
        ("c", "chosen"),
        ("b", "dropped in round 1"),
        ("a", "refused: a can't be cut"),
        ("d", "not tried"),
    ]


def test_a_candidate_rejected_in_a_later_round_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = contest(monkeypatch, {"a": [0.5], "b": [0.51], "c": [0.52], "d": [0.9]})
    assert [(each.candidate.name, each.outcome) for each in found] == [
        ("d", "chosen"),
        *((name, f"refused: {name} can't be cut") for name in "abc"),
    ]


def test_if_all_candidates_are_rejected_the_first_error_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImpossibleCut, match="a can't be cut"):
        contest(monkeypatch, {"a": [], "b": []})


def test_the_next_best_is_trained_if_the_best_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    able = {"c"}

    def finish(_self: _Trials, chosen: _Tried, seconds: float, *_: object, **__: object) -> str:
        if chosen.candidate.name not in able:
            raise BadModel(f"{chosen.candidate.name} is no good")
        return f"{chosen.candidate.name} in {seconds} s"

    monkeypatch.setattr(_Trials, "finish", finish)
    ranked = [named("a"), replace(named("b"), outcome="refused: no"), named("c"), named("d")]
    run, found = some_trials().finish_best(ranked, lambda _: 3.0)
    assert str(run) == "c in 3.0 s"
    assert [(each.candidate.name, each.outcome) for each in found] == [
        ("c", "chosen"),
        ("a", "refused: a is no good"),
        ("b", "refused: no"),
        ("d", "not tried"),
    ]
    able.clear()
    with pytest.raises(BadModel, match="a is no good"):
        some_trials().finish_best(ranked, lambda _: 3.0)
