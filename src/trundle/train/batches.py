"""Which texts belong to each batch, how batches are loaded in advance, and how they are split.

The order is a pure function of the seed and the batch number: a resumed run requests batch 5,000 without
replaying the first 4,999. A batch is what one optimizer step sees over all processes. The number of
processes only decides how it is divided, so the same run gives the same model on other hardware.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from trundle.errors import BadInput

_B = TypeVar("_B")
Indices = NDArray[np.int64]

_IN_PARTS = "a batch does not fit into memory, so it is processed in parts; only the time changes"
_POOL = 128
"""Batches sorted by length together: many, for little padding, but few enough that every epoch differs."""
_AHEAD = 4
"""Batches loaded before they are needed."""


@dataclass(kw_only=True)
class BatchSplitter(Generic[_B]):
    """Splits batches that do not fit into memory, and remembers how large a part may be."""

    texts: Callable[[_B], int]
    size: Callable[[_B], int]
    """Memory use of a part, in any unit that grows with it; 0 for a batch that can't be split."""
    halves: Callable[[_B], tuple[_B, _B]]
    say: Callable[[str], None]
    limit: float = field(default=float("inf"), init=False)

    def parts(self, batch: _B) -> list[tuple[_B, float]]:
        """Returns the parts of a batch that are within the limit, each with its share of the texts."""
        total, waiting, found = self.texts(batch), [batch], []
        while waiting:
            part = waiting.pop()
            if self.size(part) <= self.limit or self.texts(part) == 1:
                found.append((part, self.texts(part) / total))
            else:
                waiting += reversed(self.halves(part))
        return found

    def lower_limit(self, batch: _B) -> bool:
        """Sets the limit to half of the batch's largest part; returns False if it can't be split further."""
        largest, _ = max(self.parts(batch), key=lambda part: self.size(part[0]))
        if self.texts(largest) == 1 or self.size(largest) == 0:
            return False
        if self.limit == float("inf"):
            self.say(_IN_PARTS)
        self.limit = self.size(largest) / 2
        return True


@dataclass(frozen=True, kw_only=True)
class Batches(Generic[_B]):
    """The data of a training: an order of texts, and a function that loads a batch in a background thread."""

    order: ByLength | ByGroup | ByBucket
    load: Callable[[Indices], _B]
    gather: Callable[[Tensor, int], _B] | None = None
    """For texts in the device's memory, with the order `ByBucket`: makes the batch of these positions there,
    padded to this length, in operations that a CUDA graph can hold."""
    size: Callable[[int], int] | None = None
    """If the texts are sharded over processes: the size of a batch over all of them."""
    splitter: BatchSplitter[_B] | None = None
    """How to split a batch that does not fit into memory; None if its loss is not a mean over texts."""


class ByLength:
    """Texts of similar length together, in batches that are shuffled again in every epoch.

    Without weights every text comes exactly once per epoch. `kinds` is the kind of each text (0, 1, …) and
    `weights` how often a text of that kind comes per epoch: 2 is twice, 0.5 is in every second epoch.
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
        """`batches` sets the number of batches per epoch, not their size, for texts that are sharded."""
        self._lengths = np.asarray(lengths, dtype=np.int32)
        self._seed = seed
        _check_order(batch_size, seed)
        self._epochs = _Epochs(len(self._lengths), kinds, weights, seed)
        what = f"one batch of {batch_size}" if batches is None else f"this process's {batches} batches"
        count = self._epochs.at_least(batch_size if batches is None else batches, what)
        self._bounds = _batch_bounds(count, batch_size) if batches is None else _even_bounds(count, batches)
        self._sharded = batches is not None
        self._epoch = -1
        self._texts: Indices = np.empty(0, np.int64)

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self._bounds) - 1

    def batch(self, number: int) -> Indices:
        """Returns the texts of batch `number`, counted over all epochs; keeps the order of the last epoch."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 0, epoch])
            texts = rng.permutation(self._epochs.texts(epoch))
            self._texts = _sort_in_pools(texts, self._lengths, self._bounds)
            if self._sharded:  # all processes take long batches at the same time, whatever texts they have
                rng = np.random.default_rng([self._seed, 2, epoch])
            self._places = rng.permutation(self.per_epoch)
            self._epoch = epoch
        start = self._places[place]
        return self._texts[self._bounds[start] : self._bounds[start + 1]]

    def place(self, number: int) -> int:
        """Returns the position of a batch in its epoch before the batches were shuffled."""
        self.batch(number)
        return int(self._places[number % self.per_epoch])


_WIDTHS = 12
"""Padded lengths of one training: each is a graph in the GPU's memory."""
_STEP = 8
"""Padded lengths are multiples of this, as tensor cores prefer."""


class ByBucket:
    """Batches of exactly `batch_size` texts that are padded to one of a few lengths, shuffled in every epoch.

    Every text comes once per epoch, or as often as the weight of its kind says (see `ByLength`). The
    last batch repeats texts to be full. A batch between two lengths is padded to the longer one.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        batch_size: int,
        seed: int = 0,
        kinds: ArrayLike | None = None,
        weights: Sequence[float] = (1.0,),
        longest: int | None = None,
    ) -> None:
        """`longest` is the most tokens that the model takes, padding included."""
        sizes = np.asarray(lengths, dtype=np.int32)
        self._seed, self.batch_size = seed, batch_size
        _check_order(batch_size, seed)
        self._epochs = _Epochs(len(sizes), kinds, weights, seed)
        self._count = self._epochs.at_least(batch_size, f"one batch of {batch_size}")
        self.widths = sorted({min(width, longest or width) for width in _padded_lengths(sizes)})
        """The padded lengths, ascending."""
        self.shortest = int(sizes.argmin())
        buckets = np.searchsorted(self.widths, sizes, side="right")
        self._buckets = np.minimum(buckets, len(self.widths) - 1).astype(np.int8)
        self._epoch = -1

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return -(-self._count // self.batch_size)

    def batch(self, number: int) -> Indices:
        """Returns the texts of batch `number`, counted over all epochs; keeps the order of the last epoch."""
        start = self._start(number)
        return self._texts[start : start + self.batch_size]

    def width(self, number: int) -> int:
        """Returns the padded length of batch `number`."""
        last = self._texts[self._start(number) + self.batch_size - 1]
        return self.widths[int(self._buckets[last])]

    def _start(self, number: int) -> int:
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, 0, epoch])
            texts = rng.permutation(self._epochs.texts(epoch))
            self._texts: Indices = texts[np.argsort(self._buckets[texts], kind="stable")]
            self._places = rng.permutation(self.per_epoch)
            self._epoch = epoch
        return min(int(self._places[place]) * self.batch_size, self._count - self.batch_size)


def _padded_lengths(lengths: NDArray[np.integer], most: int = _WIDTHS) -> list[int]:
    """Returns up to `most` lengths to pad texts to, with the least padding in all."""
    cells = lengths // _STEP + 1  # at least one token of padding, so that every batch has a mask
    counts = np.bincount(cells)
    used = np.flatnonzero(counts)
    texts = np.concatenate([[0], np.cumsum(counts[used])])
    # cost[j]: the least number of padded tokens of the texts up to used[j - 1], with the lengths chosen
    cost = np.concatenate([[0.0], np.full(len(used), np.inf)])
    cuts: list[NDArray[np.int64]] = []
    for _ in range(min(most, len(used))):
        new, cut = np.full_like(cost, np.inf), np.zeros(len(cost), np.int64)
        for end in range(1, len(cost)):
            totals = cost[:end] + (texts[end] - texts[:end]) * used[end - 1]
            cut[end] = int(totals.argmin())
            new[end] = totals[cut[end]]
        cost = new
        cuts.append(cut)
    found, end = [], len(used)
    for cut in reversed(cuts):
        if end == 0:
            break
        found.append(int(used[end - 1]) * _STEP)
        end = int(cut[end])
    return found[::-1]


class ByGroup:
    """Each item once per epoch, in batches of one group each; both are shuffled again in every epoch."""

    def __init__(self, groups: ArrayLike, *, batch_size: int, seed: int = 0) -> None:
        _check_order(batch_size, seed)
        kinds = np.asarray(groups)
        if not len(kinds):
            raise BadInput("there is nothing to make batches of; pass at least one example")
        self._seed = seed
        self._members: list[Indices] = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        self._bounds = [_batch_bounds(len(members), batch_size) for members in self._members]
        self._places = [
            (group, place) for group, bounds in enumerate(self._bounds) for place in range(len(bounds) - 1)
        ]
        self._epoch = -1
        self._shuffled: list[Indices] = []

    @property
    def per_epoch(self) -> int:
        """Batches in one epoch."""
        return len(self._places)

    def batch(self, number: int) -> Indices:
        """Returns the items of batch `number`, counted over all epochs; keeps the order of the last epoch."""
        epoch, place = divmod(number, self.per_epoch)
        if epoch != self._epoch:
            rng = np.random.default_rng([self._seed, epoch])
            self._shuffled = [rng.permutation(members) for members in self._members]
            self._order = rng.permutation(self.per_epoch)
            self._epoch = epoch
        group, at = self._places[self._order[place]]
        bounds = self._bounds[group]
        chosen: Indices = self._shuffled[group][bounds[at] : bounds[at + 1]]
        return chosen


def _check_order(batch_size: int, seed: int) -> None:
    if batch_size < 1 or seed < 0:
        raise BadInput(f"batch size {batch_size} with seed {seed} can't be used; pass at least 1 and 0")


def _batch_bounds(texts: int, batch_size: int) -> Indices:
    """Where each batch begins and the last one ends; sizes differ by one at most, so none is a small rest."""
    return _even_bounds(texts, -(-texts // batch_size))


def _even_bounds(texts: int, count: int) -> Indices:
    return np.arange(count + 1, dtype=np.int64) * texts // count


class _Epochs:
    """The texts of each epoch: each kind is a shuffled ring that continues where the last epoch ended."""

    def __init__(self, texts: int, kinds: ArrayLike | None, weights: Sequence[float], seed: int) -> None:
        self._kinds = np.zeros(texts, np.uint8) if kinds is None else np.asarray(kinds, np.uint8)
        counts = np.bincount(self._kinds, minlength=len(weights))
        self._per_kind = [round(float(count) * weight) for count, weight in zip(counts, weights, strict=True)]
        self._seed = seed
        self.size = sum(self._per_kind)

    def at_least(self, needed: int, what: str) -> int:
        """Returns the number of texts in an epoch; rejects fewer than are `needed` for `what`."""
        if self.size < needed:
            raise BadInput(
                f"{self.size} texts are fewer than {what}; pass more texts or a smaller batch size"
            )
        return self.size

    def texts(self, epoch: int) -> Indices:
        parts = []
        for kind, count in enumerate(self._per_kind):
            members = np.flatnonzero(self._kinds == kind)
            ring = np.random.default_rng([self._seed, 1, kind]).permutation(members)
            if count:
                parts.append(ring[(epoch * count + np.arange(count)) % len(ring)])
        return np.concatenate(parts)


def _sort_in_pools(texts: Indices, lengths: NDArray[np.int32], bounds: Indices) -> Indices:
    batch_of = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    return texts[np.lexsort((lengths[texts], batch_of // _POOL))]


def sharded_batches(
    lengths: ArrayLike,
    load: Callable[[Indices], _B],
    *,
    batch_size: int,
    seed: int,
    kinds: NDArray[Any],
    weights: Sequence[float],
) -> Batches[_B]:
    """Returns the batches of texts that are sharded over processes; all processes must call this together."""
    sizes = _gather(_Epochs(len(kinds), kinds, weights, seed).size)
    count = -(-sum(sizes) // min(batch_size, sum(sizes)))
    order = ByLength(lengths, batch_size=batch_size, seed=seed, kinds=kinds, weights=weights, batches=count)
    bounds = [_even_bounds(texts, count) for texts in sizes]

    def size(number: int) -> int:
        place = order.place(number)
        return sum(int(bound[place + 1] - bound[place]) for bound in bounds)

    return Batches(order=order, load=load, size=size)


def gather_rows(own: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the rows of all processes, in the order of processes; all processes must call this together."""
    return np.concatenate(_gather(own))


def _gather(own: _B) -> list[_B]:
    PartialState(cpu=not torch.accelerator.is_available())
    everyone: list[_B] = gather_object([own])
    return everyone


def _share(batch: Indices, *, rank: int, processes: int) -> Indices:
    if len(batch) < processes:
        raise BadInput(f"{len(batch)} texts are too few for {processes} processes; pass a larger batch size")
    return batch[rank::processes]


@dataclass(frozen=True, kw_only=True)
class _LoadedPart(Generic[_B]):
    """One process's part of a batch, its weight in the mean over the batch, and the size of the batch."""

    part: _B
    weight: float
    texts: int


def _load_part(batches: Batches[_B], number: int, *, rank: int, processes: int) -> _LoadedPart[_B]:
    """Loads one process's part of a batch; with its weight, the mean over processes is that of the batch."""
    batch = batches.order.batch(number)
    if batches.size is None:
        size, part = len(batch), _share(batch, rank=rank, processes=processes)
    else:
        size, part = batches.size(number), batch
    return _LoadedPart(part=batches.load(part), weight=len(part) * processes / size, texts=size)


class _Prefetcher(Generic[_B]):
    """Loads batches in a background thread, a few ahead of the requested one.

    Tokenizers release Python's lock while they work, so training continues. But two threads must not use one
    tokenizer at once: other code that needs it runs inside `paused`, where no batch is loaded.
    """

    def __init__(self, load: Callable[[int], _B], *, start: int) -> None:
        self._load = load
        self._next = start
        self._lock = threading.Lock()
        self._waiting: deque[Future[_B]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")

    def take(self) -> _B:
        while len(self._waiting) <= _AHEAD:
            self._waiting.append(self._pool.submit(self._load_locked, self._next))
            self._next += 1
        return self._waiting.popleft().result()

    def paused(self) -> AbstractContextManager[object]:
        return self._lock

    def _load_locked(self, number: int) -> _B:
        with self._lock:
            return self._load(number)

    def __enter__(self) -> _Prefetcher[_B]:
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(cancel_futures=True)
