from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trundle.train.trainer import _constant, _learning_rate, _steps_that_fit, cosine, leaf_cycles, linear


def leaf_rates(epoch_steps: int, steps: int) -> list[float]:
    shape = leaf_cycles(epoch_steps)
    return [_learning_rate(step, steps, peak=1e-4, warmup=0, schedule=shape) for step in range(steps)]


def test_leaf_as_published_has_three_cycles_of_ten_epochs():
    rates = leaf_rates(epoch_steps=4, steps=120)
    one_cycle = [1e-4, 9e-5, 8e-5, 7e-5, 6e-5, 5e-5, 4e-5, 3e-5, 2e-5, 1e-5]
    assert rates == pytest.approx([rate for rate in one_cycle * 3 for _ in range(4)])


def test_leaf_shorter_than_a_cycle_decreases_at_every_step():
    assert leaf_rates(epoch_steps=100, steps=4) == pytest.approx([1e-4, 7e-5, 4e-5, 1e-5])


@pytest.mark.parametrize(
    ("steps", "peaks"),
    [(100, [0]), (140, [0]), (160, [0, 80]), (250, [0, 125]), (270, [0, 90, 180]), (600, [0, 200, 400])],
)
def test_leaf_takes_the_nearest_number_of_whole_cycles(steps: int, peaks: list[int]):
    rates = leaf_rates(epoch_steps=10, steps=steps)
    rises = [0, *(step for step in range(1, steps) if rates[step] > rates[step - 1])]
    assert rises == peaks
    assert rates[-1] == pytest.approx(1e-5)


@given(epoch_steps=st.integers(1, 50), steps=st.integers(2, 2000), cycles=st.integers(1, 4))
def test_leaf_stays_in_range_starts_high_and_ends_low(epoch_steps: int, steps: int, cycles: int):
    shape = leaf_cycles(epoch_steps, cycles=cycles)
    shares = [shape(step, steps) for step in range(steps)]
    assert shares[0] == 1.0
    assert shares[-1] == pytest.approx(0.1)
    assert all(0.0999 < share <= 1.0 for share in shares)
    assert sum(after > before for before, after in itertools.pairwise(shares)) < cycles


def test_warmup_and_linear_equal_torchs_own_schedulers():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=4)
    descent = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.25, total_iters=9)
    theirs = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, descent], milestones=[5])
    expected = []
    for _ in range(15):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = [_learning_rate(step, 15, peak=1.0, warmup=5, schedule=linear(end=0.25)) for step in range(15)]
    assert ours == pytest.approx(expected)


def test_a_run_too_short_for_its_warmup_warms_up_for_half_of_it():
    rates = [_learning_rate(step, 4, peak=1.0, warmup=100, schedule=_constant) for step in range(4)]
    assert rates == [0.5, 1.0, 1.0, 1.0]


def test_one_step_has_the_peak_rate():
    assert _learning_rate(0, 1, peak=0.3, warmup=10, schedule=linear()) == 0.3


def test_steps_that_fit():
    assert _steps_that_fit(20, seconds_left=10.0, seconds_per_step=0.5) == 40
    assert _steps_that_fit(20, seconds_left=-3.0, seconds_per_step=0.5) == 20


def test_a_cosine_starts_at_the_peak_and_ends_low():
    shares = [cosine(end=0.02)(step, 101) for step in range(101)]
    assert (shares[0], shares[50], shares[100]) == pytest.approx((1.0, 0.51, 0.02))
    assert shares == sorted(shares, reverse=True)
