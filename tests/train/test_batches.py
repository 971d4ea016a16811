from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.errors import BadInput
from trundle.train.batches import Batches, ByLength, Indices, _load_part, _share

LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=400)


def epoch(order: ByLength, number: int) -> list[Indices]:
    return [order.batch(number * order.per_epoch + place) for place in range(order.per_epoch)]


@given(lengths=LENGTHS, batch_size=st.integers(1, 40), seed=st.integers(0, 2**31), number=st.integers(0, 3))
def test_each_epoch_covers_every_text_once(lengths: list[int], batch_size: int, seed: int, number: int):
    if len(lengths) < batch_size:
        with pytest.raises(BadInput, match="fewer than one batch"):
            ByLength(lengths, batch_size=batch_size, seed=seed)
        return
    batches = epoch(ByLength(lengths, batch_size=batch_size, seed=seed), number)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    sizes = {len(batch) for batch in batches}
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1


@given(batch_size=st.integers(1, 16), seed=st.integers(0, 99), numbers=st.permutations(range(12)))
def test_a_batch_depends_on_seed_and_number_alone(batch_size: int, seed: int, numbers: list[int]):
    lengths = np.arange(50) % 7
    straight = ByLength(lengths, batch_size=batch_size, seed=seed)
    jumping = ByLength(lengths, batch_size=batch_size, seed=seed)
    expected = [straight.batch(number).tolist() for number in range(12)]
    assert {number: jumping.batch(number).tolist() for number in numbers} == dict(enumerate(expected))


@given(size=st.integers(1, 64), processes=st.integers(1, 8))
def test_shares_are_disjoint_and_complete(size: int, processes: int):
    batch = np.arange(100, 100 + size)
    if size < processes:
        with pytest.raises(BadInput, match="larger batch"):
            _share(batch, rank=0, processes=processes)
        return
    shares = [_share(batch, rank=rank, processes=processes) for rank in range(processes)]
    assert all(len(part) for part in shares)
    assert sorted(np.concatenate(shares).tolist()) == batch.tolist()


@given(size=st.integers(6, 64), processes=st.integers(1, 4))
def test_weighted_means_of_the_parts_are_the_mean_of_the_batch(size: int, processes: int):
    values = np.random.default_rng(size).normal(size=size)
    batches = Batches(order=ByLength(np.ones(size), batch_size=size), load=lambda texts: values[texts].mean())
    loaded = [_load_part(batches, 0, rank=rank, processes=processes) for rank in range(processes)]
    assert np.mean([each.part * each.weight for each in loaded]) == pytest.approx(values.mean())


def test_epochs_and_seeds_differ():
    lengths = np.ones(100)
    first, second = (np.concatenate(epoch(ByLength(lengths, batch_size=10), number)) for number in (0, 1))
    other = np.concatenate(epoch(ByLength(lengths, batch_size=10, seed=1), 0))
    assert first.tolist() != second.tolist()
    assert first.tolist() != other.tolist()


def test_weights_say_how_often_a_kind_comes():
    kinds = [0] * 10 + [1] * 40 + [2] * 5
    order = ByLength(np.ones(55), batch_size=5, kinds=kinds, weights=(2.5, 0.5, 0.0))
    epochs = [Counter(np.concatenate(epoch(order, number)).tolist()) for number in range(2)]
    for counts in epochs:
        assert {counts[text] for text in range(10)} == {2, 3}
        assert sum(counts[text] for text in range(10)) == 25
        assert sum(counts[text] for text in range(10, 50)) == 20
    both = epochs[0] + epochs[1]
    assert {both[text] for text in range(10)} == {5}, "over two epochs the halves even out"
    assert {both[text] for text in range(10, 50)} == {1}
    assert not any(both[text] for text in range(50, 55))


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"batch_size": 0}, "at least 1"),
        ({"seed": -1}, "at least 1 and 0"),
        ({"weights": (0.25,)}, "fewer than one batch"),
    ],
)
def test_invalid_batch_options_are_rejected(changes: dict[str, object], fix: str):
    with pytest.raises(BadInput, match=fix):
        ByLength([3, 1, 2, 4], **({"batch_size": 2} | changes))


def test_a_million_texts_waste_little_padding():
    lengths = np.random.default_rng(0).lognormal(3.5, 0.8, 1_000_000).clip(1, 256).astype(np.int32)
    order = ByLength(lengths, batch_size=32)
    seen = np.zeros(len(lengths), np.int8)
    padded = 0
    for number in range(order.per_epoch):
        batch = order.batch(number)
        seen[batch] += 1
        padded += len(batch) * int(lengths[batch].max())
    assert (seen == 1).all()
    assert padded < 1.03 * lengths.sum()


@given(
    lengths=st.lists(st.lists(st.integers(0, 300), min_size=12, max_size=90), min_size=1, max_size=4),
    count=st.integers(1, 12),
    seed=st.integers(0, 2**31),
    number=st.integers(0, 2),
)
def test_processes_with_their_own_texts_make_the_same_steps(
    lengths: list[list[int]], count: int, seed: int, number: int
):
    orders = [ByLength(own, batch_size=7, seed=seed, batches=count) for own in lengths]
    for order, own in zip(orders, lengths, strict=True):
        batches = epoch(order, number)
        assert len(batches) == count
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(own)))
    places = [[order.place(number * count + step) for step in range(count)] for order in orders]
    assert sorted(places[0]) == list(range(count))
    assert all(each == places[0] for each in places), "all take the long batches at the same time"


def test_more_batches_than_own_texts_are_rejected():
    with pytest.raises(BadInput, match="2 texts are fewer than this process's 3 batches"):
        ByLength([1, 2], batch_size=1, batches=3)
