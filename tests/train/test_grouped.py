from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trundle.errors import BadInput
from trundle.train.batches import ByGroup


@given(
    groups=st.lists(st.integers(0, 3), min_size=1, max_size=80),
    batch_size=st.integers(1, 20),
    seed=st.integers(0, 5),
)
@settings(max_examples=60)
def test_an_epoch_holds_every_item_once_in_batches_of_one_group(
    groups: list[int], batch_size: int, seed: int
):
    order = ByGroup(groups, batch_size=batch_size, seed=seed)
    for epoch in range(2):
        numbers = range(epoch * order.per_epoch, (epoch + 1) * order.per_epoch)
        batches = [order.batch(number) for number in numbers]
        assert sorted(np.concatenate(batches)) == list(range(len(groups)))
        for batch in batches:
            assert 1 <= len(batch) <= batch_size
            assert len({groups[item] for item in batch}) == 1


def test_batches_can_be_requested_in_any_order():
    groups = [0] * 30 + [1] * 11
    straight, jumping = ByGroup(groups, batch_size=4, seed=2), ByGroup(groups, batch_size=4, seed=2)
    wanted = [list(straight.batch(number)) for number in range(3 * straight.per_epoch)]
    for number in reversed(range(3 * jumping.per_epoch)):
        assert list(jumping.batch(number)) == wanted[number]
    assert wanted[: straight.per_epoch] != wanted[straight.per_epoch : 2 * straight.per_epoch]


def test_empty_groups_and_batches_are_rejected():
    with pytest.raises(BadInput, match="nothing to make batches of"):
        ByGroup([], batch_size=4)
    with pytest.raises(BadInput, match="batch size 0"):
        ByGroup([0, 1], batch_size=0)
