"""Budgets as users write them."""

from __future__ import annotations

import pytest

from trundle.errors import BadInput
from trundle.search.limits import _Budget, parse_budget


@pytest.mark.parametrize(
    ("words", "limits"),
    [
        (["12MB"], _Budget(bytes=12_000_000)),
        (["1.5 gb"], _Budget(bytes=1_500_000_000)),
        (["800kB"], _Budget(bytes=800_000)),
        (["10x"], _Budget(bytes=43_800_000)),
        (["20M-params"], _Budget(parameters=20_000_000)),
        (["500k-parameters"], _Budget(parameters=500_000)),
        (["5ms"], _Budget(milliseconds=5.0)),
        (["12MB,5ms", "20M-params"], _Budget(bytes=12_000_000, milliseconds=5.0, parameters=20_000_000)),
    ],
)
def test_limits_are_parsed(words: list[str], limits: _Budget) -> None:
    assert parse_budget(words, whole_bytes=438_000_000) == limits


@pytest.mark.parametrize("word", ["", "small", "12", "-3MB", "0x", "12 parsecs", "5Mms2"])
def test_an_invalid_budget_error_names_valid_ones(word: str) -> None:
    with pytest.raises(BadInput, match="12MB, 10x, 20M-params or 5ms"):
        parse_budget([word], whole_bytes=1)


def test_the_same_limit_twice_is_a_contradiction() -> None:
    with pytest.raises(BadInput, match="12MB and 10x both limit the bytes; keep one"):
        parse_budget(["12MB", "10x"], whole_bytes=1000)


def test_all_limits_hold_and_an_unknown_speed_is_allowed() -> None:
    limits = _Budget(bytes=10, parameters=10, milliseconds=1.0)
    assert limits.allows(file_bytes=10, parameters=10, milliseconds=1.0)
    assert limits.allows(file_bytes=10, parameters=10)
    assert not limits.allows(file_bytes=11, parameters=10)
    assert not limits.allows(file_bytes=10, parameters=11)
    assert not limits.allows(file_bytes=10, parameters=10, milliseconds=1.1)


def test_the_excess_over_a_limit_is_reported() -> None:
    limits = _Budget(bytes=12_000_000, parameters=10, milliseconds=5.0)
    assert limits.exceeded(file_bytes=12_000_100, parameters=1011, milliseconds=6.25) == (
        "the file has 12.0001 MB, over the budget of 12 MB",
        "there are 1,011 parameters, over the budget of 10",
        "a query takes 6.25 ms, over the budget of 5 ms",
    )
    assert limits.exceeded(file_bytes=12_000_000, parameters=10, milliseconds=5.0) == ()
