"""Reading ahead gives the same items, earlier."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.progress import ahead


@given(st.lists(st.integers()), st.integers(1, 5))
def test_the_same_items_in_the_same_order(items, count):
    with ahead(iter(items), count=count) as found:
        assert list(found) == items


def test_an_error_comes_after_the_items_before_it():
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("no second one")

    with ahead(items()) as found:
        assert next(found) == 1
        with pytest.raises(ValueError, match="no second one"):
            next(found)


def test_stopping_early_leaves_no_thread():
    made, before = [], threading.active_count()

    def items() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    with ahead(items(), count=2) as found:
        assert next(found) == 0
    assert threading.active_count() == before
    assert len(made) < 10


def test_items_are_made_in_advance():
    reached = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        reached.set()
        yield 2

    with ahead(items()) as found:
        next(found)
        assert reached.wait(timeout=10)
