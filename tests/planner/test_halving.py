"""The time is shared, not exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.planner.halving import SHORTEST_GPU_TRIAL, SHORTEST_TRIAL, plan_time, time_left


@given(minutes=st.floats(0.1, 10_000), candidates=st.integers(1, 50), on_gpu=st.booleans())
def test_no_more_time_is_given_than_there_is(minutes: float, candidates: int, on_gpu: bool) -> None:
    times = plan_time(minutes, candidates, on_gpu=on_gpu)
    tried = sum(rung.candidates * rung.seconds for rung in times.rungs)
    assert times.labelling + tried + times.finishing <= 60 * minutes
    assert times.finishing >= 0.35 * 60 * minutes - 1e-9
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
    assert [rung.candidates for rung in plan_time(30, 16).rungs] == [8, 4, 2]


def test_a_gpu_tries_as_many_in_a_quarter_of_the_time() -> None:
    assert [rung.candidates for rung in plan_time(7, 16, on_gpu=True).rungs] == [8, 4, 2]
    assert [rung.candidates for rung in plan_time(7, 16).rungs] == [3, 2]


def test_with_no_time_for_two_none_is_tried() -> None:
    times = plan_time(1, 16)
    assert times.rungs == ()
    assert times.finishing == 39.0


def test_time_lost_in_the_trials_is_taken_from_the_end() -> None:
    assert time_left(10, 300) == pytest.approx(240)
    assert time_left(10, 5000) == SHORTEST_TRIAL
