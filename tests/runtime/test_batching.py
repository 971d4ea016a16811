from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trundle.runtime.model import _HEIGHTS, _RUN_COST, _batches, _in_few_heights, _largest_height, _rounded_up

LENGTHS = st.lists(st.integers(0, 300), max_size=80)


@given(LENGTHS, st.integers(1, 2000), st.integers(1, 40))
def test_every_text_is_in_one_batch_within_its_limits(lengths: list[int], tokens: int, texts: int) -> None:
    groups = _batches(lengths, tokens=tokens, texts=texts)
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[place] for place in group)
        assert lengths[group[0]] == longest
        assert len(group) == 1 or (len(group) <= texts and longest * len(group) <= tokens)


@given(LENGTHS)
def test_texts_in_a_batch_have_similar_lengths(lengths: list[int]) -> None:
    flat = [lengths[place] for group in _batches(lengths, tokens=512, texts=8) for place in group]
    assert flat == sorted(lengths, reverse=True)


@given(st.integers(1, 600), st.integers(1, 512))
def test_rounding_up_a_width_never_truncates_or_exceeds_the_limit(length: int, limit: int) -> None:
    width = _rounded_up(length, limit)
    assert length <= width <= max(length, limit)
    assert width < length + 16


@given(st.integers(0, 200), st.integers(1, 512))
def test_few_batch_sizes_keep_every_text_and_waste_little(count: int, width: int) -> None:
    parts = _in_few_heights(range(count), width)
    assert [member for part, _ in parts for member in part] == list(range(count))
    assert {height for _, height in parts} <= set(_HEIGHTS)
    assert all(len(part) <= height for part, height in parts)
    assert sum(height - len(part) for part, height in parts) * width <= _RUN_COST


@given(st.integers(1, 200))
def test_the_largest_height_fits(count: int) -> None:
    height = _largest_height(count)
    assert height <= count
    assert not [other for other in _HEIGHTS if height < other <= count]
