"""Axes and marks: positions of values, and names that do not cover each other."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trundle.records import CandidateRecord, PlanningRecord, TrialRecord
from trundle.report.making import _search
from trundle.report.markup import (
    _LEFT,
    _RIGHT,
    _WIDTH,
    _around,
    _around_log,
    _Axis,
    _count,
    _megabytes,
    _milliseconds,
    _one_line,
    _percent,
    _Plot,
    _round_step,
    _short,
    _spread,
    _times,
)
from trundle.report.page import _frontier, _ratio

values = st.floats(1e-3, 1e9)


@given(st.lists(values, min_size=1, max_size=9), st.booleans())
def test_values_lie_within_their_axis(found: list[float], log: bool) -> None:
    low, high = _around_log(found) if log else _around(found)
    axis = _Axis(label="", low=low, high=high, log=log)
    assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in found)
    assert all(low * (1 - 1e-9) <= tick <= high * (1 + 1e-9) for tick in axis.ticks() if tick > 0)


@given(values, values)
def test_an_axis_has_some_ticks_but_not_many(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assume(high > low * 1.01)
    assert 1 <= len(_Axis(label="", low=low, high=high).ticks()) <= 11
    assert 1 <= len(_Axis(label="", low=low, high=high, log=True).ticks()) <= 14


@given(values)
def test_steps_are_round(span: float) -> None:
    step = _round_step(span)
    assert (
        step / 10 ** math.floor(math.log10(step) + 1e-9) == pytest.approx(1) or str(f"{step:e}")[0] in "125"
    )
    assert span / 11 <= step <= span


@given(st.lists(st.floats(0, 300), min_size=1, max_size=12), st.floats(1, 20))
def test_names_are_moved_apart_and_keep_their_order(places: list[float], gap: float) -> None:
    moved = _spread(sorted(places), gap)
    assert all(b - a >= gap - 1e-6 for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(places), abs=1e-6)


def test_names_far_apart_are_not_moved() -> None:
    assert _spread([10, 50, 90], 16) == [10, 50, 90]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_the_frontier_has_no_dominated_points(points: list[tuple[int, int]]) -> None:
    best = set(_frontier(points))
    for point in points:
        beaten = any(other[0] <= point[0] and other[1] >= point[1] and other != point for other in points)
        assert (point in best) == (not beaten)


def test_marks_are_at_their_values() -> None:
    plot = _Plot(
        title="a & b", across=_Axis(label="x <", low=1, high=100, log=True), up=_Axis(label="", low=0, high=1)
    )
    plot.dot((10, 0.5), "c0", says='10 < "20"')
    drawn = plot.svg()
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    assert f'cx="{middle:.1f}"' in drawn
    assert "<title>10 &lt; &quot;20&quot;</title>" in drawn
    assert 'aria-label="a &amp; b"' in drawn
    assert "x &lt;" in drawn


def test_a_name_without_room_stays_near_its_mark() -> None:
    plot = _Plot(title="", across=_Axis(label="", low=0, high=1), up=_Axis(label="", low=0, high=1))
    for number in range(40):
        plot.dot((0.05 * (number % 8), 0.4 + 0.04 * (number // 8)), "run0")
    plot.name((0.05, 0.48), "together", "run0")
    found = re.search(r'text-anchor="(\w+)" x="([\d.]+)"[^>]*>together', plot.svg())
    assert found is not None
    assert abs(float(found[2]) - plot.x(0.05)) < 80


def test_names_of_close_marks_do_not_cover_each_other() -> None:
    plot = _Plot(title="", across=_Axis(label="", low=0, high=1), up=_Axis(label="", low=0, high=1))
    for point in ((0.5, 0.5), (0.5, 0.52), (0.51, 0.5)):
        plot.dot(point, "c0")
    for number, point in enumerate(((0.5, 0.5), (0.5, 0.52), (0.51, 0.5))):
        plot.name(point, f"name {number}", "c0")
    places = re.findall(r'<text class="name c0" text-anchor="(\w+)" x="([\d.]+)" y="([\d.]+)">', plot.svg())
    assert len(set(places)) == 3


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (_megabytes(11_834_000), "11.8 MB"),
        (_megabytes(437_967_672), "438 MB"),
        (_megabytes(2_100_000_000), "2.10 GB"),
        (_megabytes(42_000), "42.0 kB"),
        (_megabytes(None), "–"),
        (_count(109_486_464), "109M"),
        (_count(8_000), "8,000"),
        (_milliseconds(0.8234), "0.823 ms"),
        (_milliseconds(34.21), "34.2 ms"),
        (_percent(0.7342), "73.4%"),
        (_times(438, 23), "19.0×"),
        (_times(None, 23), "–"),
        (_short(1234.5), "1,234"),
        (_one_line("a\n b   c", 9), "a b c"),
        (_one_line("abcdefghij", 5), "abcd…"),
    ],
)
def test_figures_have_sensible_digits(written: str, wanted: str) -> None:
    assert written == wanted


@pytest.mark.parametrize(
    ("large", "small", "told"), [(90, 30, "\n÷ 3.00"), (30, 90, "\n× 3.00"), (None, 3, ""), (3, None, "")]
)
def test_a_larger_result_is_not_called_smaller(large: float | None, small: float | None, told: str) -> None:
    assert _ratio(large, small) == told


def test_steps_have_whole_ticks() -> None:
    axis = _Axis(label="steps", low=0, high=2, whole=True)
    assert axis.ticks() == [0, 1, 2]


def one_tried(name: str, rungs: int) -> CandidateRecord:
    rung = TrialRecord(steps=4, distance=0.04)
    return CandidateRecord(
        name=name,
        parameters=1,
        bytes=1,
        milliseconds=None,
        outcome="",
        rungs=tuple(rung for _ in range(rungs)),
    )


@pytest.mark.parametrize(
    ("rungs", "says", "drawn"),
    [
        ((0, 0), "2 candidates were compared by predicted size and speed; a was chosen.", False),
        ((1, 0), "1 was tried in 1 short training; a was chosen.", False),
        ((2, 1), "2 were tried in 3 short trainings; a was chosen.", True),
    ],
)
def test_trials_are_listed_and_speeds_are_drawn(rungs: tuple[int, int], says: str, drawn: bool) -> None:
    nothing = {"bytes": 1.0, "parameters": None, "milliseconds": None}
    plan = PlanningRecord(
        budget=nothing,
        teacher=nothing,
        candidates=tuple(map(one_tried, "ab", rungs)),
        chosen="a",
        predicted=nothing,
        measured=nothing,
    )
    block = _search(0, plan)
    assert says in block
    assert ("Successive halving" in block) is drawn
