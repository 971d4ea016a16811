"""Which texts are run together: pure arithmetic on lengths."""

from __future__ import annotations

from collections.abc import Sequence

STEPS = ((32, 4), (64, 8))
"""Up to so many tokens, widths go in steps of so many."""
COARSE_STEP = 16
HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RUN_COST = 32
"""Tokens of padding that take about as long as a run of its own."""


def longest_first(lengths: Sequence[int]) -> list[int]:
    """The order in which neighbours have nearly the same length and the heaviest work comes first."""
    return sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))


def batches(lengths: Sequence[int], *, tokens: int, texts: int) -> list[list[int]]:
    """Groups of places whose texts padded to their longest hold at most `tokens` tokens and `texts` texts.

    Texts of nearly one length meet in one group, so little is computed on padding. A text that is longer than
    `tokens` gets a group of its own.
    """
    groups: list[list[int]] = []
    width = 0
    for place in longest_first(lengths):
        group = groups[-1] if groups else None
        if group is None or len(group) == texts or width * (len(group) + 1) > tokens:
            groups.append([place])
            width = max(1, lengths[place])
        else:
            group.append(place)
    return groups


def in_few_heights(group: Sequence[int], width: int) -> list[tuple[list[int], int]]:
    """A group cut into parts, each with the number of rows it is run as, which is one of `HEIGHTS`.

    A part may have fewer members than rows, where the empty rows cost less than another run would.
    """
    parts, start = [], 0
    while start < len(group):
        left = len(group) - start
        lower = largest_height(left)
        upper = min((height for height in HEIGHTS if height >= left), default=lower)
        height = upper if (upper - left) * width <= RUN_COST else lower
        parts.append((list(group[start : start + height]), height))
        start += height
    return parts


def largest_height(count: int) -> int:
    """The most rows a run of so many texts can have without an empty one."""
    return max(height for height in HEIGHTS if height <= count)


def rounded_up(length: int, limit: int) -> int:
    """A width for texts of this length out of few: in steps of 4 for short texts, of 16 for long ones.

    It is not above `limit` unless the length itself is.
    """
    step = next((step for most, step in STEPS if length <= most), COARSE_STEP)
    return max(length, min(limit, -(-length // step) * step))
