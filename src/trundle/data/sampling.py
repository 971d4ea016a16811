"""Fingerprints, samples and splits that are the same on every machine, every time.

Python's own `hash` changes from run to run and most of `random` may change between versions; only blake2b and
`random.Random(seed).random()` are relied on here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from hashlib import blake2b
from heapq import nsmallest
from operator import itemgetter
from random import Random
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import BisectingKMeans, KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning

from trundle.errors import BadInput

_T = TypeVar("_T")


class _Fingerprinted(Generic[_T]):
    """Passes items through while it hashes and counts them, so that one pass over the data does both.

    Items are strings, or records made of strings, numbers, None and sequences of them. Only content counts,
    not the file, its format or its place. Order counts, and so does where one item ends and the next begins.
    """

    def __init__(self, items: Iterable[_T]) -> None:
        self._items = iter(items)
        self._hash = blake2b(digest_size=16)
        self._encode = json.JSONEncoder(sort_keys=True, default=_fields).encode
        self.count = 0

    def __iter__(self) -> Iterator[_T]:
        return self

    def __next__(self) -> _T:
        item = next(self._items)
        # JSON in ASCII never holds a line feed, so a line feed after each item keeps the borders plain.
        self._hash.update(self._encode(item).encode("ascii") + b"\n")
        self.count += 1
        return item

    @property
    def fingerprint(self) -> str:
        """The fingerprint of what has been passed through so far."""
        return self._hash.hexdigest()


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def fingerprint(items: Iterable[Any]) -> str:
    """The fingerprint of all items."""
    hashed = _Fingerprinted(items)
    for _ in hashed:
        pass
    return hashed.fingerprint


def sample(items: Iterable[_T], n: int, seed: int) -> list[_T]:
    """`n` items drawn evenly from a stream, in their order of appearance; all of them if there are fewer.

    Every item draws a number, and the n smallest stay: memory for n items only, and a larger sample with the
    same seed contains the smaller one.
    """
    if n < 0:
        raise BadInput(f"a sample of {n} can't be drawn; ask for 0 or more")
    draw = Random(seed).random
    drawn = nsmallest(n, ((draw(), index, item) for index, item in enumerate(items)))
    return [item for _, _, item in sorted(drawn, key=itemgetter(1))]


def _held_out(key: str, share: float, seed: int) -> bool:
    """Whether `key` is among the `share` of all keys to hold out: the same answer for equal keys, always.

    What is held out for a small share is also held out for a larger one.
    """
    if not 0 <= share <= 1:
        raise BadInput(f"a share of {share} can't be held out; give a number from 0 to 1")
    return draw(key, seed) < share


def draw(key: str, seed: int) -> float:
    """A number from 0 to 1, evenly spread over keys and always the same for equal ones."""
    return (int.from_bytes(_digest(f"{seed}:{key}", 8)) >> 11) * 2.0**-53


def _split(
    items: Iterable[_T], share: float, seed: int, *, key: Callable[[_T], str]
) -> tuple[list[_T], list[_T]]:
    """Items to train on and items held out; items with equal keys never end up on different sides."""
    sides: tuple[list[_T], list[_T]] = ([], [])
    for item in items:
        sides[_held_out(key(item), share, seed)].append(item)
    return sides


def distinct(items: Iterable[_T], key: Callable[[_T], str]) -> Iterator[_T]:
    """The first item for each key, in order; a seen key costs 16 bytes and its place in a set."""
    seen: set[bytes] = set()
    for item in items:
        digest = _digest(key(item), 16)
        if digest not in seen:
            seen.add(digest)
            yield item


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


_Vectors = NDArray[np.float32]
_Numbers = NDArray[np.int64]

_SMALL = 4096
"""So many vectors are clustered in one go; more are first split into groups of about this size."""
_ROUNDS = 20
_FEW = 400
"""Clusters up to which careful first centres (k-means++) are worth their time, which grows with their square."""


def representatives(vectors: _Vectors, count: int, *, seed: int) -> _Numbers:
    """The positions of the vectors nearest the centres of `count` clusters, by direction."""
    if count >= len(vectors):
        return np.arange(len(vectors))
    return np.sort(_nearest_to_centres(_directions(vectors), count, seed))


def nearest(vectors: _Vectors, targets: _Vectors) -> _Numbers:
    """For each vector, the position of the target with the most similar direction."""
    ends = _directions(targets).T
    parts = [
        np.argmax(_directions(vectors[start : start + _SMALL]) @ ends, axis=1)
        for start in range(0, len(vectors), _SMALL)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _directions(vectors: _Vectors) -> _Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _nearest_to_centres(vectors: _Vectors, count: int, seed: int) -> _Numbers:
    if len(vectors) <= _SMALL or count <= _FEW:
        return _one_per_cluster(vectors, count, seed)
    groups = 2 * -(-len(vectors) // _SMALL)
    split = BisectingKMeans(
        groups, n_init=1, max_iter=_ROUNDS, random_state=seed, bisecting_strategy="largest_cluster"
    )
    labels = split.fit_predict(vectors)
    members = [np.flatnonzero(labels == group) for group in range(groups)]
    found = [
        group[_one_per_cluster(vectors[group], share, seed)]
        for group, share in zip(members, _shares([len(group) for group in members], count), strict=True)
        if share
    ]
    return np.concatenate(found)


def _one_per_cluster(vectors: _Vectors, count: int, seed: int) -> _Numbers:
    """One position for each cluster; where a cluster came out empty, others fill its place."""
    if count >= len(vectors):
        return np.arange(len(vectors))
    method = KMeans if len(vectors) <= _SMALL else MiniBatchKMeans
    with warnings.catch_warnings():
        # Equal vectors leave clusters empty; their places are filled below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        first = "k-means++" if count <= _FEW else "random"
        fitted = method(count, init=first, n_init=1, max_iter=_ROUNDS, random_state=seed).fit(vectors)
    off_centre = np.linalg.norm(vectors - fitted.cluster_centers_[fitted.labels_], axis=1)
    order = np.lexsort((off_centre, fitted.labels_))
    _, nearest_of_each = np.unique(fitted.labels_[order], return_index=True)
    chosen = order[nearest_of_each]
    others = np.setdiff1d(np.argsort(off_centre, kind="stable"), chosen, assume_unique=True)
    return np.concatenate([chosen, others[: count - len(chosen)]])


def _shares(sizes: list[int], count: int) -> list[int]:
    """`count` shared out by size, exactly: the largest remainders get what rounding down leaves."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -(count * sizes[group] % total))
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares
