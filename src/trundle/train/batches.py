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
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trundle.errors import BadInput
from trundle.train.dividing import Divider

Indices = NDArray[np.int64]
B = TypeVar("B")

POOL = 128
"""Batches sorted by length together: enough for little padding, few enough that batches differ in every epoch."""

AHEAD = 4
"""Batches loaded before they are needed."""


class Order(Protocol):
    """Which texts are in which batch."""

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        ...

    def batch(self, number: int) -> Indices:
        """The texts of batch `number`, counted from 0 over all epochs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Batches(Generic[B]):
    """An order, and how the texts of one batch become what the objective takes (called in a background thread)."""

    order: Order
    load: Callable[[Indices], B]
    size: Callable[[int], int] | None = None
    """For an order that gives this process's own texts: how many all processes together have in a batch."""
    divider: Divider[B] | None = None
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
        drawn = epoch_size(self._kinds, self._weights)
        if drawn < (batch_size if batches is None else batches):
            what = f"one batch of {batch_size}" if batches is None else f"this process's {batches} batches"
            raise BadInput(f"{drawn} texts are fewer than {what}; give more texts or a smaller batch")
        self._bounds = batch_bounds(drawn, batch_size) if batches is None else even_bounds(drawn, batches)
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
            texts = epoch_draws(self._kinds, self._weights, seed=self._seed, epoch=epoch)
            self._texts = sort_in_pools(rng.permutation(texts), self._lengths, self._bounds)
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


def batch_bounds(texts: int, batch_size: int) -> Indices:
    """Where each batch begins and the last one ends: sizes differ by one at most, so that none is a small rest."""
    return even_bounds(texts, batch_count(texts, batch_size))


def batch_count(texts: int, batch_size: int) -> int:
    """How many batches so many texts make."""
    return -(-texts // batch_size)


def even_bounds(texts: int, count: int) -> Indices:
    """Where each of so many batches begins and the last one ends."""
    return np.arange(count + 1, dtype=np.int64) * texts // count


def epoch_size(kinds: NDArray[np.uint8], weights: Sequence[float]) -> int:
    """How many texts come in an epoch."""
    return sum(_draws(kinds, weights))


def _draws(kinds: NDArray[np.uint8], weights: Sequence[float]) -> list[int]:
    counts = np.bincount(kinds, minlength=len(weights))
    return [round(float(count) * weight) for count, weight in zip(counts, weights, strict=True)]


def epoch_draws(kinds: NDArray[np.uint8], weights: Sequence[float], *, seed: int, epoch: int) -> Indices:
    """The texts of one epoch: each kind is a shuffled ring, and every epoch goes on where the last one stopped."""
    parts = []
    for kind, draws in enumerate(_draws(kinds, weights)):
        members = np.flatnonzero(kinds == kind)
        ring = np.random.default_rng([seed, 1, kind]).permutation(members)
        if draws:
            parts.append(ring[(epoch * draws + np.arange(draws)) % len(ring)])
    return np.concatenate(parts)


def sort_in_pools(texts: Indices, lengths: NDArray[np.int32], bounds: Indices) -> Indices:
    """Sort by length inside each pool of batches, so that a batch holds texts of similar length."""
    batch_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return texts[np.lexsort((lengths[texts], batch_of // POOL))]


def share(batch: Indices, *, rank: int, processes: int) -> Indices:
    """What one process takes of a batch: disjoint, and together the whole batch."""
    if len(batch) < processes:
        raise BadInput(
            f"a batch of {len(batch)} texts can't be cut for {processes} processes; "
            "take a larger batch or fewer of these"
        )
    return batch[rank::processes]


@dataclass(frozen=True, kw_only=True)
class Loaded(Generic[B]):
    """One process's part of a batch, its weight in the mean over the batch, and the size of it all."""

    part: B
    weight: float
    texts: int


def load_part(batches: Batches[B], number: int, *, rank: int, processes: int) -> Loaded[B]:
    """Load what one process needs of one batch; weights make the mean over processes the batch's mean."""
    batch = batches.order.batch(number)
    size, place, sharing = len(batch), rank, processes
    if batches.size is not None:
        size, place, sharing = batches.size(number), 0, 1
    part = share(batch, rank=place, processes=sharing)
    return Loaded(part=batches.load(part), weight=len(part) * processes / size, texts=size)


class Feed(Generic[B]):
    """Loads batches one after the other in a background thread, a few ahead of the one that is asked for.

    Tokenizers leave Python's lock while they work, so the training goes on. But one tokenizer must not be used by two threads at once: whoever else needs it works inside `paused`.
    """

    def __init__(self, load: Callable[[int], B], *, start: int) -> None:
        self._load = load
        self._next = start
        self._lock = threading.Lock()
        self._waiting: deque[Future[B]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="feed")

    def take(self) -> B:
        """The next batch; an error while loading it is raised here."""
        while len(self._waiting) <= AHEAD:
            self._waiting.append(self._pool.submit(self._load_alone, self._next))
            self._next += 1
        return self._waiting.popleft().result()

    def paused(self) -> AbstractContextManager[object]:
        """No batch is loaded while the block runs."""
        return self._lock

    def _load_alone(self, number: int) -> B:
        with self._lock:
            return self._load(number)

    def __enter__(self) -> Feed[B]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
