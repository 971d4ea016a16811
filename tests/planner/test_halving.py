"""The time is shared, not exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.planner.halving import (
    CLOSING,
    ENOUGH_TEXTS,
    FEWEST_MAPPED,
    RIDGE_TEXTS,
    SHORTEST_GPU_TRIAL,
    SHORTEST_TRIAL,
    plan_time,
    time_left,
)

FAST, SLOW = 1e5, 110.0
"""Texts a second: of a GPU, and of MiniLM on two slow cores."""


@given(
    minutes=st.floats(0.1, 10_000),
    candidates=st.integers(1, 50),
    rate=st.floats(0.1, 1e6),
    on_gpu=st.booleans(),
)
def test_no_more_time_is_given_than_there_is(
    minutes: float, candidates: int, rate: float, on_gpu: bool
) -> None:
    times = plan_time(minutes, candidates, rate=rate, on_gpu=on_gpu)
    tried = sum(rung.candidates * rung.seconds for rung in times.rungs)
    if times.rungs:
        tried += times.rungs[0].candidates * times.mapped / rate
    assert times.labelling <= 0.25 * 60 * minutes * (1 + 1e-9) or times.texts <= ENOUGH_TEXTS
    planned = times.labelling + tried + times.finishing + times.closing
    assert planned <= 60 * minutes * (1 + 1e-9) or times.finishing == SHORTEST_TRIAL
    assert times.closing >= 0.1 * 60 * minutes - 1e-6
    assert 0 < times.mapped <= min(times.texts, RIDGE_TEXTS)
    counts = [rung.candidates for rung in times.rungs]
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == len(counts)
    assert all(2 <= count <= candidates for count in counts)
    shortest = SHORTEST_GPU_TRIAL if on_gpu else SHORTEST_TRIAL
    assert all(rung.seconds >= shortest for rung in times.rungs)
    assert all(
        before.seconds < after.seconds for before, after in zip(times.rungs, times.rungs[1:], strict=False)
    )


def test_thirty_minutes_try_eight() -> None:
    assert [rung.candidates for rung in plan_time(30, 16, rate=FAST).rungs] == [8, 4, 2]


def test_a_gpu_tries_as_many_in_a_quarter_of_the_time() -> None:
    assert [rung.candidates for rung in plan_time(7, 16, rate=FAST, on_gpu=True).rungs] == [8, 4, 2]
    assert [rung.candidates for rung in plan_time(7, 16, rate=FAST).rungs] == [3, 2]


def test_with_no_time_for_two_none_is_tried() -> None:
    times = plan_time(2, 16, rate=FAST)
    assert times.rungs == ()
    assert times.finishing == pytest.approx(120 - 30 - CLOSING, abs=1)


def test_few_texts_leave_their_time_to_the_training() -> None:
    many, few = plan_time(2, 1, rate=SLOW), plan_time(2, 1, rate=SLOW, there=1000)
    assert few.texts == few.mapped == 1000
    assert few.labelling < many.labelling
    assert few.finishing > many.finishing


def test_a_slow_teacher_leaves_less_to_the_trials_and_more_to_the_end() -> None:
    """Its candidates are slow to read, too: each for its linear map, the best one to be compared and shown."""
    assert [rung.candidates for rung in plan_time(15, 16, rate=SLOW).rungs] == [3, 2]
    times = plan_time(4, 16, rate=SLOW)
    assert times.rungs == ()
    assert times.closing == pytest.approx(CLOSING + 4 * times.proved / SLOW)
    assert times.finishing == pytest.approx(240 - times.labelling - times.mapped / SLOW - times.closing)


def test_a_map_is_fitted_on_fewer_texts_only_where_reading_takes_long() -> None:
    assert plan_time(4, 16, rate=SLOW).mapped == FEWEST_MAPPED
    assert FEWEST_MAPPED < plan_time(60, 16, rate=SLOW).mapped < RIDGE_TEXTS
    assert plan_time(300, 16, rate=SLOW).mapped == plan_time(4, 16, rate=FAST).mapped == RIDGE_TEXTS


def test_time_lost_in_the_trials_is_taken_from_the_last_training() -> None:
    assert time_left(10, 300, 60) == pytest.approx(240)
    assert time_left(10, 5000, 60) == SHORTEST_TRIAL
