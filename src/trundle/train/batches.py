"""Which texts go into which batch, and their loading ahead of time.

The order is a pure function of the seed and the number of the batch: a resumed run asks for batch 5,000 and gets it
without replaying the 4,999 before. A batch is what one optimizer step sees, over all processes; how many
there are of these only decides how it is cut, so the same run gives the same model on other hardware.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trundle.errors import BadInput

_T = TypeVar("_T")


@dataclass(kw_only=True)
class _Divider(Generic[_T]):
    """How batches are cut, and how much may be in one part."""

    texts: Callable[[_T], int]
    size: Callable[[_T], int]
    """What a part takes, in any unit that grows with its memory; 0 for a batch that can't be cut."""
    halves: Callable[[_T], tuple[_T, _T]]
    say: Callable[[str], None]
    room: float = field(default=float("inf"), init=False)

    def parts(self, batch: _T) -> list[tuple[_T, float]]:
        """The batch as parts that have room, each with its share of the texts."""
        whole, waiting, found = self.texts(batch), [batch], []
        while waiting:
            part = waiting.pop()
            if self.size(part) <= self.room or self.texts(part) == 1:
                found.append((part, self.texts(part) / whole))
            else:
                waiting += reversed(self.halves(part))
        return found

    def give_way(self, batch: _T) -> bool:
        """Allow half of what the largest part of this batch took; False where nothing smaller is left to try."""
        largest, _ = max(self.parts(batch), key=lambda part: self.size(part[0]))
        if self.texts(largest) == 1 or self.size(largest) == 0:
            return False
        if self.room == float("inf"):
            self.say("a batch does not fit into memory, so it goes through in parts; only the time changes")
        self.room = self.size(largest) / 2
        return True


Indices = NDArray[np.int64]
_B = TypeVar("_B")

_POOL = 128
"""Batches sorted by length together: enough for little padding, few enough that batches differ in every epoch."""

_AHEAD = 4
"""Batches loaded before they are needed."""


class _Order(Protocol):
    """Which texts are in which batch."""

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        ...

    def batch(self, number: int) -> Indices:
        """The texts of batch `number`, counted from 0 over all epochs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Batches(Generic[_B]):
    """An order, and how the texts of one batch become what the objective takes (called in a background thread)."""

    order: _Order
    load: Callable[[Indices], _B]
    size: Callable[[int], int] | None = None
    """For an order that gives this process's own texts: how many all processes together have in a batch."""
    divider: _Divider[_B] | None = None
    """How a batch is cut where memory is short; None where its loss is no mean over texts."""


class ByLength:
    """Texts of similar length together, in batches that are shuffled anew in every epoch.

    Without weights every text comes exactly once per epoch. `kinds` says which kind each text is (0, 1, …) and
    `weights` how often a text of that kind comes per epoch: with 2 twice, with 0.5 in every second epoch.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int,
        seed: int = 0,
        kinds: ArrayLike | None = None,
        weights: Sequence[float] = (1.0,),
        batches: int | None = None,
    ) -> None:
        """`batches` cuts an epoch into so many, instead of by size: for processes that each have texts of their own."""
        self._lengths = np.asarray(lengths, dtype=np.int32)
        self._kinds = np.zeros(len(self._lengths), np.uint8) if kinds is None else np.asarray(kinds, np.uint8)
        self._weights = tuple(weights)
        self._seed = seed
        if batch_size < 1 or seed < 0:
            raise BadInput(f"batch size {batch_size} with seed {seed} can't be used; take at least 1 and 0")
        if len(self._kinds) != len(self._lengths):
            raise BadInput(
                f"{len(self._lengths)} texts have {len(self._kinds)} kinds; give one for each text"
            )
        if min(self._weights) < 0 or self._kinds.max(initial=0) >= len(self._weights):
            raise BadInput("the weights of the kinds don't fit; give one number, 0 or more, for each kind")
        drawn = _epoch_size(self._kinds, self._weights)
        if drawn < (batch_size if batches is None else batches):
            what = f"one batch of {batch_size}" if batches is None else f"this process's {batches} batches"
            raise BadInput(f"{drawn} texts are fewer than {what}; give more texts or a smaller batch")
        self._bounds = _batch_bounds(drawn, batch_size) if batches is None else _even_bounds(drawn, batches)
        self._in_step = batches is not None
        self._epoch = -1
        self._texts: Indices = np.empty(0, np.int64)

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self._bounds) - 1

    def batch(self, number: int) -> Indices:
        """The texts of one batch; the plan of its epoch is kept until another epoch is asked for."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 0, epoch])
            texts = _epoch_draws(self._kinds, self._weights, seed=self._seed, epoch=epoch)
            self._texts = _sort_in_pools(rng.permutation(texts), self._lengths, self._bounds)
            if self._in_step:  # whatever texts a process has, all take long batches at the same time
                rng = np.random.default_rng([self._seed, 2, epoch])
            self._places = rng.permutation(self.per_epoch)
            self._epoch = epoch
        start = self._places[place]
        return self._texts[self._bounds[start] : self._bounds[start + 1]]

    def place(self, number: int) -> int:
        """Which of its epoch's batches, in the order they were cut, a batch is."""
        self.batch(number)
        return int(self._places[number % self.per_epoch])


def _batch_bounds(texts: int, batch_size: int) -> Indices:
    """Where each batch begins and the last one ends: sizes differ by one at most, so that none is a small rest."""
    return _even_bounds(texts, _batch_count(texts, batch_size))


def _batch_count(texts: int, batch_size: int) -> int:
    """How many batches so many texts make."""
    return -(-texts // batch_size)


def _even_bounds(texts: int, count: int) -> Indices:
    """Where each of so many batches begins and the last one ends."""
    return np.arange(count + 1, dtype=np.int64) * texts // count


def _epoch_size(kinds: NDArray[np.uint8], weights: Sequence[float]) -> int:
    """How many texts come in an epoch."""
    return sum(_draws(kinds, weights))


def _draws(kinds: NDArray[np.uint8], weights: Sequence[float]) -> list[int]:
    counts = np.bincount(kinds, minlength=len(weights))
    return [round(float(count) * weight) for count, weight in zip(counts, weights, strict=True)]


def _epoch_draws(kinds: NDArray[np.uint8], weights: Sequence[float], *, seed: int, epoch: int) -> Indices:
    """The texts of one epoch: each kind is a shuffled ring, and every epoch goes on where the last one stopped."""
    parts = []
    for kind, draws in enumerate(_draws(kinds, weights)):
        members = np.flatnonzero(kinds == kind)
        ring = np.random.default_rng([seed, 1, kind]).permutation(members)
        if draws:
            parts.append(ring[(epoch * draws + np.arange(draws)) % len(ring)])
    return np.concatenate(parts)


def _sort_in_pools(texts: Indices, lengths: NDArray[np.int32], bounds: Indices) -> Indices:
    """Sort by length inside each pool of batches, so that a batch holds texts of similar length."""
    batch_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return texts[np.lexsort((lengths[texts], batch_of // _POOL))]


def _share(batch: Indices, *, rank: int, processes: int) -> Indices:
    """What one process takes of a batch: disjoint, and together the whole batch."""
    if len(batch) < processes:
        raise BadInput(
            f"a batch of {len(batch)} texts can't be cut for {processes} processes; "
            "take a larger batch or fewer of these"
        )
    return batch[rank::processes]


@dataclass(frozen=True, kw_only=True)
class _Loaded(Generic[_B]):
    """One process's part of a batch, its weight in the mean over the batch, and the size of it all."""

    part: _B
    weight: float
    texts: int


def _load_part(batches: Batches[_B], number: int, *, rank: int, processes: int) -> _Loaded[_B]:
    """Load what one process needs of one batch; weights make the mean over processes the batch's mean."""
    batch = batches.order.batch(number)
    size, place, sharing = len(batch), rank, processes
    if batches.size is not None:
        size, place, sharing = batches.size(number), 0, 1
    part = _share(batch, rank=place, processes=sharing)
    return _Loaded(part=batches.load(part), weight=len(part) * processes / size, texts=size)


class _Feed(Generic[_B]):
    """Loads batches one after the other in a background thread, a few ahead of the one that is asked for.

    Tokenizers leave Python's lock while they work, so the training goes on. But one tokenizer must not be used by two threads at once: whoever else needs it works inside `paused`.
    """

    def __init__(self, load: Callable[[int], _B], *, start: int) -> None:
        self._load = load
        self._next = start
        self._lock = threading.Lock()
        self._waiting: deque[Future[_B]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")

    def take(self) -> _B:
        """The next batch; an error while loading it is raised here."""
        while len(self._waiting) <= _AHEAD:
            self._waiting.append(self._pool.submit(self._load_alone, self._next))
            self._next += 1
        return self._waiting.popleft().result()

    def paused(self) -> AbstractContextManager[object]:
        """No batch is loaded while the block runs."""
        return self._lock

    def _load_alone(self, number: int) -> _B:
        with self._lock:
            return self._load(number)

    def __enter__(self) -> _Feed[_B]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
