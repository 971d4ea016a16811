"""Fingerprints, samples and splits that are the same on every machine, every time.

Python's own `hash` changes from run to run and most of `random` may change between versions; only blake2b and
`random.Random(seed).random()` are relied on here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from hashlib import blake2b
from heapq import nsmallest
from operator import itemgetter
from random import Random
from typing import Any, Generic, TypeVar

from trundle.errors import BadInput

T = TypeVar("T")


class Fingerprinted(Generic[T]):
    """Passes items through while it hashes and counts them, so that one pass over the data does both.

    Items are strings, or records made of strings, numbers, None and sequences of them. Only content counts,
    not the file, its format or its place. Order counts, and so does where one item ends and the next begins.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._hash = blake2b(digest_size=16)
        self._encode = json.JSONEncoder(sort_keys=True, default=_fields).encode
        self.count = 0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
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
    hashed = Fingerprinted(items)
    for _ in hashed:
        pass
    return hashed.fingerprint


def sample(items: Iterable[T], n: int, seed: int) -> list[T]:
    """`n` items drawn evenly from a stream, in their order of appearance; all of them if there are fewer.

    Every item draws a number, and the n smallest stay: memory for n items only, and a larger sample with the
    same seed contains the smaller one.
    """
    if n < 0:
        raise BadInput(f"a sample of {n} can't be drawn; ask for 0 or more")
    draw = Random(seed).random
    drawn = nsmallest(n, ((draw(), index, item) for index, item in enumerate(items)))
    return [item for _, _, item in sorted(drawn, key=itemgetter(1))]


def held_out(key: str, share: float, seed: int) -> bool:
    """Whether `key` is among the `share` of all keys to hold out: the same answer for equal keys, always.

    What is held out for a small share is also held out for a larger one.
    """
    if not 0 <= share <= 1:
        raise BadInput(f"a share of {share} can't be held out; give a number from 0 to 1")
    return draw(key, seed) < share


def draw(key: str, seed: int) -> float:
    """A number from 0 to 1, evenly spread over keys and always the same for equal ones."""
    return (int.from_bytes(_digest(f"{seed}:{key}", 8)) >> 11) * 2.0**-53


def split(items: Iterable[T], share: float, seed: int, *, key: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """Items to train on and items held out; items with equal keys never end up on different sides."""
    sides: tuple[list[T], list[T]] = ([], [])
    for item in items:
        sides[held_out(key(item), share, seed)].append(item)
    return sides


def distinct(items: Iterable[T], key: Callable[[T], str]) -> Iterator[T]:
    """The first item for each key, in order; a seen key costs 16 bytes and its place in a set."""
    seen: set[bytes] = set()
    for item in items:
        digest = _digest(key(item), 16)
        if digest not in seen:
            seen.add(digest)
            yield item


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()
