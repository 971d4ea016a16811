"""Which texts are run together: pure arithmetic on lengths."""

from __future__ import annotations

from collections.abc import Sequence


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


def rounded_up(length: int, step: int, limit: int) -> int:
    """The next multiple of `step`, but not above `limit` unless the length itself is."""
    return max(length, min(limit, -(-length // step) * step))
