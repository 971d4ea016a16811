"""The time plan shares the time and does not exceed it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.methods.align.teacher_vectors import RIDGE_TEXTS
from trundle.search.budget import (
    _CLOSING,
    _ENOUGH_TEXTS,
    _FEWEST_MAPPED,
    _FEWEST_NEAR_STEPS,
    _FEWEST_STEPS,
    _SHORTEST_GPU_TRIAL,
    _SHORTEST_TRIAL,
    _plan_time,
    _time_left,
)

FAST, SLOW = 1e5, 110.0
"""Texts a second: of a GPU, and of MiniLM on two slow cores."""


@given(
    minutes=st.floats(0.1, 10_000),
    candidates=st.integers(1, 50),
    rate=st.floats(0.1, 1e6),
    on_gpu=st.booleans(),
    near=st.booleans(),
)
def test_the_time_plan_fits_the_total(
    minutes: float, candidates: int, rate: float, on_gpu: bool, near: bool
) -> None:
    times = _plan_time(minutes, candidates, rate=rate, on_gpu=on_gpu, near=near)
    tried = sum(rung.candidates * rung.seconds for rung in times.rungs)
    if times.rungs:
        tried += times.rungs[0].candidates * times.mapped / rate
    assert times.labelling <= 0.25 * 60 * minutes * (1 + 1e-9) or times.texts <= _ENOUGH_TEXTS
    planned = times.labelling + tried + times.finishing + times.closing
    assert planned <= 60 * minutes * (1 + 1e-9) or times.finishing in (0, _SHORTEST_TRIAL)
    assert times.trains or not (on_gpu or times.rungs)
    assert on_gpu or times.closing >= 0.1 * 60 * minutes - 1e-6
    assert 0 < times.mapped <= min(times.texts, RIDGE_TEXTS)
    counts = [rung.candidates for rung in times.rungs]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    assert all(2 <= count <= candidates for count in counts)
    shortest = _SHORTEST_GPU_TRIAL if on_gpu else _SHORTEST_TRIAL
    assert all(rung.seconds >= shortest for rung in times.rungs)
    assert all(
        before.seconds < after.seconds for before, after in zip(times.rungs, times.rungs[1:], strict=False)
    )


def test_thirty_minutes_try_eight() -> None:
    assert [rung.candidates for rung in _plan_time(30, 16, rate=FAST).rungs] == [8, 4, 2]


def test_a_gpu_spends_its_time_on_the_winner() -> None:
    assert _plan_time(7, 16, rate=FAST, on_gpu=True).rungs == ()
    assert [rung.candidates for rung in _plan_time(20, 16, rate=FAST, on_gpu=True).rungs] == [2]
    assert [rung.candidates for rung in _plan_time(60, 16, rate=FAST, on_gpu=True).rungs] == [4, 2]
    for minutes in (10, 20, 60):
        times = _plan_time(minutes, 16, rate=30_000, on_gpu=True)
        assert times.finishing >= 0.8 * 60 * minutes


def test_without_time_for_two_trials_none_runs() -> None:
    times = _plan_time(2, 16, rate=FAST)
    assert times.rungs == ()
    assert times.finishing == pytest.approx(120 - 30 - _CLOSING, abs=1)


def test_a_cpu_trains_only_where_it_makes_enough_steps() -> None:
    """A model that starts near its teacher needs more of them, a model with little work makes more."""
    slow = _plan_time(3, 16, rate=15)
    assert (slow.trains, slow.rungs) == (False, ())
    assert 0 < slow.steps < _FEWEST_STEPS
    assert slow.texts == slow.mapped
    assert _plan_time(3, 16, rate=15, work=0.01).trains
    assert _plan_time(3, 16, rate=15, on_gpu=True).trains
    cut, near = _plan_time(5, 1, rate=SLOW), _plan_time(5, 1, rate=SLOW, near=True)
    assert _FEWEST_STEPS < cut.steps < _FEWEST_NEAR_STEPS
    assert (cut.trains, near.trains) == (True, False)
    assert near.labelling < cut.labelling / 2
    assert near.mapping == 0
    assert near.proved == cut.proved
    assert _plan_time(60, 1, rate=SLOW, near=True).trains


def test_few_texts_leave_more_time_for_training() -> None:
    many, few = _plan_time(2, 1, rate=SLOW), _plan_time(2, 1, rate=SLOW, there=1000)
    assert few.texts == few.mapped == 1000
    assert few.labelling < many.labelling
    assert few.finishing > many.finishing


def test_a_slow_teacher_leaves_less_time_for_trials() -> None:
    """Its candidates encode slowly, too: each one for its linear map, the best one for the report."""
    assert [rung.candidates for rung in _plan_time(15, 16, rate=SLOW).rungs] == [3, 2]
    times = _plan_time(4, 16, rate=SLOW)
    assert times.rungs == ()
    assert times.closing == pytest.approx(_CLOSING + 4 * times.proved / SLOW)
    assert times.finishing == pytest.approx(240 - times.labelling - times.mapped / SLOW - times.closing)


def test_a_map_is_fitted_on_fewer_texts_only_if_encoding_is_slow() -> None:
    assert _plan_time(4, 16, rate=SLOW).mapped == _FEWEST_MAPPED
    assert _FEWEST_MAPPED < _plan_time(60, 16, rate=SLOW).mapped < RIDGE_TEXTS
    assert _plan_time(300, 16, rate=SLOW).mapped == _plan_time(4, 16, rate=FAST).mapped == RIDGE_TEXTS


def test_time_lost_in_the_trials_is_taken_from_the_last_training() -> None:
    assert _time_left(10, 300, 60) == pytest.approx(240)
    assert _time_left(10, 5000, 60) == _SHORTEST_TRIAL
