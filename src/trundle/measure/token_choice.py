"""Which tokens to keep: scores in, ids out.

In a BPE vocabulary a token is only as good as the tokens it is merged from, so a score is passed down to them: then a
token never ranks above its halves, and the best n are closed by themselves. Counting occurrences this way is counting
merges, and the n tokens with the most merges leave the fewest tokens any closed choice of n can leave: a text has
one token per byte, less one for each merge.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from trundle.model.merge_tree import MergeTree

Scores = NDArray[np.float64]


def passed_down(scores: Scores, tree: MergeTree) -> Scores:
    """Each token's score plus the scores of all tokens it is a part of."""
    total = scores.copy()
    found = tree.with_halves(np.flatnonzero(scores > 0).tolist())
    for token in _largest_first(found, tree):
        for half in tree.halves(token) or ():
            total[half] += total[token]
    return total


def best_tokens(order: Sequence[int], needed: Collection[int], count: int, tree: MergeTree) -> list[int]:
    """The first tokens in order that fit into `count` together with what they are merged from."""
    kept = tree.with_halves(needed)
    for token in order:
        if len(kept) >= count:
            break
        if token in kept:
            continue
        missing = tree.with_halves([token]) - kept
        if len(kept) + len(missing) <= count:
            kept |= missing
    return sorted(kept)


def _largest_first(tokens: Collection[int], tree: MergeTree) -> list[int]:
    """The tokens in an order in which each comes before its halves."""
    depth: dict[int, int] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting[-1]
        halves = [half for half in tree.halves(token) or () if half not in depth]
        if halves:
            waiting.extend(halves)
            continue
        waiting.pop()
        depth[token] = 1 + max((depth[half] for half in tree.halves(token) or ()), default=0)
    return sorted(tokens, key=lambda token: -depth[token])
