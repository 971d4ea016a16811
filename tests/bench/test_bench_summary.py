from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import median_abs_deviation

from trundle.bench.rounds import _rotated
from trundle.bench.workload import _of_rounds, _of_samples

samples = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=40)


@given(samples)
def test_median_and_spread_are_scipys(values: list[float]) -> None:
    measured = _of_rounds(values)
    assert measured.value == pytest.approx(np.median(values))
    assert measured.spread == pytest.approx(median_abs_deviation(values), abs=1e-9)
    assert measured.rounds == tuple(values)


def test_one_disturbed_round_does_not_change_the_result() -> None:
    assert _of_rounds([10.0, 10.2, 500.0, 9.9, 10.1]).value == 10.1


def test_a_fast_round_with_many_samples_counts_once() -> None:
    measured = _of_samples([[1.0] * 100, [3.0, 3.0], [5.0]], 50)
    assert measured.value == 3.0
    assert measured.rounds == (1.0, 3.0, 5.0)


@given(st.integers(1, 8))
def test_every_model_takes_every_position_once(count: int) -> None:
    rounds = [_rotated(count, turn) for turn in range(count)]
    for order in rounds:
        assert sorted(order) == list(range(count))
    for place in range(count):
        assert sorted(order[place] for order in rounds) == list(range(count))
