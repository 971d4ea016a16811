"""Fingerprints, samples, clusters and augmented texts that are reproducible on every machine.

Python's own `hash` changes from run to run and most of `random` may change between versions, so samples rely
only on blake2b and `random.Random(seed).random()`. What an augmentation draws depends on the seed and the
text alone, so a text always gives the same pieces. Only `joins` depends on the order of reading: it joins
short texts that follow each other.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from hashlib import blake2b
from heapq import nsmallest
from operator import itemgetter
from random import Random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trundle.data.texts import Text
from trundle.errors import BadInput

_T = TypeVar("_T")
_Vectors = NDArray[np.float32]
_Numbers = NDArray[np.int64]
_BITS = 2**64 - 1
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"'(])")
_SENTENCE_WORDS = range(4, 60)
_SENTENCES_PER_TEXT = 2
_SPAN_WORDS = (4, 24)
_LONG_ENOUGH = 12
"""A span is taken only from texts with more words than this."""
_JOINED = 3
_SHORT = 12
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]{2,}")


def fingerprint(items: Iterable[Any]) -> str:
    """Return a fingerprint of the content and order of strings, or of records of strings and numbers."""

    def as_dict(record: Any) -> dict[str, Any]:
        return {field.name: getattr(record, field.name) for field in fields(record)}

    encode = json.JSONEncoder(sort_keys=True, default=as_dict).encode
    digest = blake2b(digest_size=16)
    for item in items:
        # JSON in ASCII contains no line feed, so a line feed after each item marks the boundaries.
        digest.update(encode(item).encode("ascii") + b"\n")
    return digest.hexdigest()


def sample(items: Iterable[_T], n: int, seed: int) -> list[_T]:
    """Sample `n` items uniformly from a stream, in their order; a larger sample contains the smaller one."""
    if n < 0:
        raise BadInput(f"a sample of {n} is not possible; request 0 or more")
    if isinstance(items, range):  # the same numbers, drawn at once
        if not 0 < n < len(items):
            return [*items[:n]]
        *key, place = Random(seed).getstate()[1]
        twister = np.random.MT19937()
        twister.state = {"bit_generator": "MT19937", "state": {"key": np.array(key, "u4"), "pos": place}}
        draws = np.random.Generator(twister).random(len(items))
        limit = np.partition(draws, n - 1)[n - 1]
        chosen = np.concatenate([np.flatnonzero(draws < limit), np.flatnonzero(draws == limit)])[:n]
        return [items[place] for place in np.sort(chosen).tolist()]
    draw = Random(seed).random
    drawn = nsmallest(n, ((draw(), index, item) for index, item in enumerate(items)))
    return [item for _, _, item in sorted(drawn, key=itemgetter(1))]


def draw(key: str, seed: int) -> float:
    """Return a number from 0 to 1, uniform over keys and the same for equal keys."""
    return float(_drawn(key_bits(key), seed))


def key_bits(key: str) -> int:
    """Return 64 bits that are the same for equal keys."""
    return int.from_bytes(_digest(key, 16)[:8], "little")


def _drawn(bits: Any, seed: int) -> Any:
    """What `draw` returns for keys whose hashes start with these 64 bits (SplitMix64)."""
    bits = (bits + (seed * 0x9E3779B97F4A7C15 & _BITS)) & _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return ((bits ^ (bits >> 31)) >> 11) * 2.0**-53


def distinct(items: Iterable[_T], key: Callable[[_T], str]) -> Iterator[_T]:
    """Yield the first item of each key, in order; stores 16 bytes per key."""
    seen: set[bytes] = set()
    for item in items:
        digest = _digest(key(item), 16)
        if digest not in seen:
            seen.add(digest)
            yield item


def _digest(text: str, size: int) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=size).digest()


_SMALL = 4096
"""Up to this many vectors are clustered at once; more are first split into groups of about this size."""
_ROUNDS = 20
_FEW = 400
"""Up to this many clusters are initialised with k-means++, whose time grows with their square."""


def representatives(vectors: _Vectors, count: int, *, seed: int) -> _Numbers:
    """Return the positions of the vectors closest in direction to the centres of `count` clusters."""
    directions = _directions(vectors)
    if len(vectors) <= _SMALL or count <= _FEW or count >= len(vectors):
        return np.sort(_one_per_cluster(directions, count, seed))
    from sklearn.cluster import BisectingKMeans  # the server imports this file without sklearn

    groups = 2 * -(-len(vectors) // _SMALL)
    options = {"n_init": 1, "max_iter": _ROUNDS, "random_state": seed}
    split = BisectingKMeans(groups, bisecting_strategy="largest_cluster", **options)
    labels = split.fit_predict(directions)
    members = [np.flatnonzero(labels == group) for group in range(groups)]
    found = [
        group[_one_per_cluster(directions[group], share, seed)]
        for group, share in zip(members, _shares([len(group) for group in members], count), strict=True)
        if share
    ]
    return np.sort(np.concatenate(found))


def nearest(vectors: _Vectors, targets: _Vectors) -> _Numbers:
    """Return, for each vector, the position of the target with the most similar direction."""
    ends, found = _directions(targets).T, np.zeros(len(vectors), np.int64)
    for start in range(0, len(vectors), _SMALL):
        found[start : start + _SMALL] = np.argmax(_directions(vectors[start : start + _SMALL]) @ ends, axis=1)
    return found


def _directions(vectors: _Vectors) -> _Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _one_per_cluster(vectors: _Vectors, count: int, seed: int) -> _Numbers:
    if count >= len(vectors):
        return np.arange(len(vectors))
    from sklearn.cluster import KMeans, MiniBatchKMeans
    from sklearn.exceptions import ConvergenceWarning

    method = KMeans if len(vectors) <= _SMALL else MiniBatchKMeans
    with warnings.catch_warnings():
        # Equal vectors leave clusters empty; other vectors take their places below.
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
    """`count` distributed by size; the largest remainders get what rounding down leaves."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -(count * sizes[group] % total))
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares


class _Draws:
    """Whole numbers that depend on a seed and a text, one after another."""

    def __init__(self, seed: int, text: str) -> None:
        self._state = blake2b(f"{seed}\0{text}".encode(), digest_size=8)

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` − 1."""
        self._state.update(b"\0")
        return int.from_bytes(self._state.digest(), "big") % count

    def between(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)


def _sentences(text: Text, draws: _Draws) -> Iterator[Text]:
    found = [part.strip() for part in _SENTENCE_END.split(text.text)]
    usable = [part for part in found if len(part.split()) in _SENTENCE_WORDS]
    if len(found) > 1:
        for _ in range(min(_SENTENCES_PER_TEXT, len(usable))):
            yield Text(text=usable.pop(draws.below(len(usable))), kind="document")


def _spans(text: Text, draws: _Draws) -> Iterator[Text]:
    words = text.text.split()
    if len(words) > _LONG_ENOUGH:
        size = draws.between(_SPAN_WORDS[0], min(_SPAN_WORDS[1], len(words) - 1))
        start = draws.below(len(words) - size + 1)
        yield Text(text=" ".join(words[start : start + size]), kind="query")


def _prefixes(text: Text, draws: _Draws) -> Iterator[Text]:
    words = text.text.split()
    if len(words) >= 4:
        size = draws.between(2, min(_SPAN_WORDS[1], len(words) - 1))
        yield Text(text=" ".join(words[:size]), kind=text.kind)


def _words(text: Text, draws: _Draws) -> Iterator[Text]:
    if found := _WORD.findall(text.text):
        yield Text(text=found[draws.below(len(found))], kind="query")


_PIECES: dict[str, Callable[[Text, _Draws], Iterator[Text]]] = {
    "sentences": _sentences,
    "spans": _spans,
    "prefixes": _prefixes,
    "words": _words,
}
_JOINS = "joins"
_AUGMENTATIONS = (*_PIECES, _JOINS)


def check_augmentations(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names if all of them are known augmentations."""
    for name in names:
        if name not in _AUGMENTATIONS:
            raise BadInput(f"there is no augmentation {name!r}; choose from {', '.join(_AUGMENTATIONS)}")
    return tuple(names)


def augmented(
    texts: Iterable[Text],
    names: Sequence[str],
    *,
    seed: int,
    allowed: Callable[[str], bool] = lambda _text: True,
) -> Iterator[Text]:
    """Yield every text, followed by the texts that are made from it and `allowed`."""
    chosen = [_PIECES[name] for name in _PIECES if name in names]
    waiting: list[str] = []
    for text in texts:
        yield text
        if chosen:
            draws = _Draws(seed, text.text)
            yield from (piece for make in chosen for piece in make(text, draws) if allowed(piece.text))
        if _JOINS in names and 0 < len(text.text.split()) <= _SHORT:
            waiting.append(text.text)
            if len(waiting) == _JOINED:
                if allowed(joined := " ".join(waiting)):
                    yield Text(text=joined, kind="document")
                waiting = []
