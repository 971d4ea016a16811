from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trundle.runtime.batching import batches, chunk_size, in_powers_of_two, rounded_up

LENGTHS = st.lists(st.integers(0, 300), max_size=80)


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 40))
def test_every_text_is_in_one_batch_within_its_limits(lengths: list[int], tokens: int, texts: int) -> None:
    groups = batches(lengths, tokens=tokens, texts=texts)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[place] for place in group)
        assert lengths[group[0]] == longest
        assert len(group) == 1 or (len(group) <= texts and longest * len(group) <= tokens)


@given(LENGTHS)
def test_neighbours_are_alike(lengths: list[int]) -> None:
    flat = [lengths[place] for group in batches(lengths, tokens=512, texts=8) for place in group]
    assert flat == sorted(lengths, reverse=True)


@given(st.integers(1, 600), st.integers(1, 512))
def test_rounding_never_cuts_and_never_passes_the_limit_by_itself(length: int, limit: int) -> None:
    width = rounded_up(length, limit)
    assert length <= width <= max(length, limit)
    assert width < length + 16


@given(st.integers(0, 200))
def test_powers_of_two_lose_nobody(count: int) -> None:
    parts = in_powers_of_two(range(count))
    assert [member for part in parts for member in part] == list(range(count))
    sizes = [len(part) for part in parts]
    assert all(size & (size - 1) == 0 for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_chunks_are_enough_for_everyone_or_small(work: int, workers: int) -> None:
    size = chunk_size(work, workers)
    assert 4096 <= size <= 32_768
    assert size == 4096 or work / size >= workers
