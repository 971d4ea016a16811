"""Which texts are run together: pure arithmetic on lengths."""

from __future__ import annotations

from collections.abc import Sequence

FINE_STEP, COARSE_STEP, FINE_UP_TO = 8, 16, 64
CHUNKS_PER_WORKER = 4
SMALLEST_CHUNK, LARGEST_CHUNK = 4096, 32_768
"""Characters handed to a worker at once."""


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


def in_powers_of_two(group: Sequence[int]) -> list[list[int]]:
    """A group cut into parts of 1, 2, 4, 8, … members, the largest first."""
    parts, start = [], 0
    while start < len(group):
        count = 1 << ((len(group) - start).bit_length() - 1)
        parts.append(list(group[start : start + count]))
        start += count
    return parts


def rounded_up(length: int, limit: int) -> int:
    """A width for texts of this length out of few: steps of 8 for short texts, of 16 for longer ones.

    It is not above `limit` unless the length itself is.
    """
    step = FINE_STEP if length <= FINE_UP_TO else COARSE_STEP
    return max(length, min(limit, -(-length // step) * step))


def chunk_size(work: int, workers: int) -> int:
    """How much work to hand out at once, so that all workers are busy to the end and each hand-out is worth it."""
    return min(LARGEST_CHUNK, max(SMALLEST_CHUNK, work // (workers * CHUNKS_PER_WORKER)))
