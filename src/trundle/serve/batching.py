"""Dynamic batching: the texts of several requests run together.

A free worker takes whatever waits, so no request waits for a batch to fill up, and batches grow under load.
There is one worker per core: under load each runs its own batch on one core. Tokenising and inference run in
the workers' threads; the event loop is notified once per batch.

Large requests have a queue of their own, and workers give each a short turn: they tokenise a part (all of it
before anything is computed, because it may have too many tokens), run a batch, or write a part of the answer.
While small requests come, only further workers of low priority take these turns, and batches are shorter: the
system then gives a core to small requests first. When none has come for a second, only the others take them.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from threading import Condition, RLock, Thread
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel
from trundle.runtime.encoder import Encoder
from trundle.runtime.engines import _release_memory
from trundle.serve.settings import ServerSettings
from trundle.serve.wire import _RequestError

_SHARE = 32
"""Most texts of one request in one batch."""
_BATCH_TEXTS = 128
_BATCH_TOKENS, _SHORT_BATCH_TOKENS = 1024, 64
"""Tokens after which a batch is full, and a batch of large requests for which small ones may have to wait."""
_RECENT_SECONDS = 1.0
"""For this long after a small request, others are expected."""
_SMALL_CHARACTERS = 4096
"""A request with more characters, or with more texts than one share, is large."""
_READ_CHARACTERS = 32_768
"""Characters of a large request that are tokenised at once."""
_LEAST_BATCH = 8
"""Batches up to this size are not split between free workers."""
_WORTH_ALL_THREADS = 128
"""Tokens from which a batch that runs alone is faster on all threads."""
_LONGEST_RETRY = 60
_NICENESS = 10
"""Added to that of the process: one tenth of the share of a core that others get."""
_RELEASE_SECONDS = 5.0
"""After a large request, memory is given back to the system this much later, once for all until then."""

_Write = Callable[["_Pending"], Iterator[bytes]]


class _Busy(_RequestError):
    def __init__(self, seconds: int) -> None:
        full, headers = f"the queue is full; try again in {seconds} s", {"Retry-After": str(seconds)}
        super().__init__(429, full, code="too_many_requests", headers=headers)
        self.seconds = seconds


@dataclass(kw_only=True, eq=False)
class _Pending:
    """One request: its texts, and the vectors that are ready. `answer` is done when all are."""

    texts: Sequence[str]
    vectors: Vectors
    answer: asyncio.Future[_Pending]
    large: bool
    rows: list[NDArray[np.int32]] | None = None
    """The token ids of a large request; the texts of a small one are tokenised in their batch."""
    work: Iterator[object] | None = None
    """Tokenises a large request or writes its answer, a part per turn; None while it is computed."""
    write: _Write | None = None
    """Returns the parts of a large request's answer; None when that has begun."""
    body: list[bytes] = field(default_factory=list)
    taken: int = 0
    """Texts that workers have taken from the queue."""
    done: int = 0
    tokens: int = 0
    dropped: bool = False
    failure: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether the rest need not be computed."""
        return self.dropped or self.failure is not None

    def size(self, place: int) -> int:
        """The tokens of a text, estimated if it has not been tokenised."""
        if self.rows is not None:
            return len(self.rows[place])
        text = self.texts[place]
        return 2 + len(text) // (4 if text.isascii() else 2)

    @property
    def ready(self) -> bool:
        finished = self.done == len(self.texts) and not (self.work or self.write)
        return self.failure is not None or finished


class _Slice(NamedTuple):
    """The part of a request that is in one batch."""

    pending: _Pending
    start: int
    texts: Sequence[str]


@dataclass(kw_only=True, eq=False)
class _WorkerGroup:
    """The threads of one priority; those of low priority run large requests while small ones come."""

    low: bool
    count: int
    changed: Condition
    busy: int = 0


class _Batcher:
    """One encoder, shared by all requests. Must be created and called inside a running event loop."""

    def __init__(
        self, encoder: Encoder, settings: ServerSettings, watch: Callable[[int, float], None]
    ) -> None:
        """`watch` is called after every batch with its number of texts and its seconds."""
        self._encoder, self._settings, self._watch = encoder, settings, watch
        self._small: deque[_Pending] = deque()
        self._large: deque[_Pending] = deque()
        self._last_small = -math.inf
        self._lock = RLock()
        self._waiting = {False: 0, True: 0}  # texts that no worker has taken yet, of small and large requests
        self._closing = False
        self._rate = 0.0
        self._loop = asyncio.get_running_loop()
        self._release: asyncio.TimerHandle | None = None
        # At least two: one tokenises while the other computes.
        count = max(2, encoder.threads)
        self._normal = _WorkerGroup(low=False, count=count, changed=Condition(self._lock))
        self._low = _WorkerGroup(low=True, count=count - 1, changed=Condition(self._lock))
        self._threads = [
            Thread(target=self._work, args=(own,), name=f"batch-{number}{'-low' * own.low}")
            for own in (self._normal, self._low)
            for number in range(own.count)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    @property
    def works(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, texts: Sequence[str], write: _Write | None = None) -> _Pending:
        """Queues texts that include their prompt; the `body` of a large request gets the parts of `write`."""
        pending = _Pending(
            texts=texts,
            vectors=np.empty((len(texts), self._encoder.dimensions), dtype=np.float32),
            answer=self._loop.create_future(),
            large=len(texts) > _SHARE or sum(map(len, texts)) > _SMALL_CHARACTERS,
        )
        with self._lock:
            if self._closing:
                raise _RequestError(503, "the server is shutting down; use another one", code="closing")
            # Apart from each other: few large requests fill a queue, and small ones must not be refused then.
            if self._waiting[pending.large] + len(texts) > self._settings.waiting:
                seconds = self.waiting / self._rate if self._rate else 1.0
                raise _Busy(max(1, min(_LONGEST_RETRY, math.ceil(seconds))))
            self._waiting[pending.large] += len(texts)
            if pending.large:
                pending.work, pending.write = self._read(pending), write
                self._large.append(pending)
            else:
                self._small.append(pending)
                self._last_small = time.monotonic()
            self._wake()
        return pending

    def drop(self, pending: _Pending) -> None:
        """Cancels a request: texts that no worker has taken are not computed."""
        with self._lock:
            pending.dropped = True
            queue = self._large if pending.large else self._small
            if pending in queue:
                queue.remove(pending)
                self._waiting[pending.large] -= len(pending.texts) - pending.taken
        if pending.large:
            self._release_later()

    def _read(self, pending: _Pending) -> Iterator[None]:
        rows: list[NDArray[np.int32]] = []
        for part in _parts(pending.texts):
            found = self._encoder.read(part)
            self._check_rows(pending, found)
            rows += [np.array(row, dtype=np.int32) for row in found]
            yield
        pending.rows = rows

    def _check_rows(self, pending: _Pending, rows: Sequence[Sequence[int]]) -> None:
        """Counts the tokens of a request; raises an error if a text has none or the request too many."""
        pending.tokens += sum(map(len, rows))
        if not all(map(len, rows)):
            raise BadInput("a text has nothing to embed; leave it out")
        if pending.tokens > (most := self._settings.most_tokens):
            raise BadInput(f"there are more than {most:,} tokens; send fewer texts")

    async def encode(self, texts: Sequence[str]) -> _Pending:
        return await self.finished(self.submit(texts))

    async def finished(self, pending: _Pending) -> _Pending:
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self.drop(pending)
            raise

    async def close(self) -> None:
        """Rejects new requests, answers the queued ones, and stops the workers."""
        with self._lock:
            self._closing = True
            for workers in (self._normal, self._low):
                workers.changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)
        if self._release is not None:
            self._release.cancel()

    def _work(self, own: _WorkerGroup) -> None:
        if own.low and sys.platform == "linux":  # elsewhere all threads of a process have one priority
            os.nice(_NICENESS)
        while batch := self._next(own):
            first = batch[0].pending
            if first.work is not None:
                self._advance(first, first.work)
            else:
                started = time.perf_counter()
                self._run(batch)
                texts, seconds = sum(len(part.texts) for part in batch), time.perf_counter() - started
                self._watch(texts, seconds)
                rate = own.count * texts / max(seconds, 1e-6)
                self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
            with self._lock:
                own.busy -= 1
                ready = [part.pending for part in batch if part.pending.ready]
            if ready:
                self._loop.call_soon_threadsafe(self._settle, ready)

    def _settle(self, finished: Sequence[_Pending]) -> None:
        if any(pending.large for pending in finished):
            self._release_later()
        for pending in finished:
            if pending.answer.done():
                continue
            if pending.failure is not None:
                pending.answer.set_exception(pending.failure)
            else:
                pending.answer.set_result(pending)

    def _release_later(self) -> None:
        if self._release is None:
            self._release = self._loop.call_later(_RELEASE_SECONDS, self._release_now)

    def _release_now(self) -> None:
        self._release = None
        self._loop.run_in_executor(None, _release_memory)

    def _advance(self, pending: _Pending, work: Iterator[object]) -> None:
        try:
            if next(work, self) is self:
                pending.work = None
        except Exception as error:
            self._fail(pending, error)
        with self._lock:
            if pending.over:
                self._waiting[True] -= len(pending.texts) - pending.taken
            elif not pending.ready:  # to the front if it is being written, so that few answers are in memory
                (self._large.appendleft if pending.done else self._large.append)(pending)

    def _next(self, own: _WorkerGroup) -> list[_Slice]:
        """Waits for the next batch; empty if the server shuts down and the queue is empty."""
        with self._lock:
            while True:
                free = own.count - own.busy
                batch = self._gather(own, min(_BATCH_TEXTS, max(_LEAST_BATCH, -(-self.waiting // free))))
                own.busy += bool(batch)
                self._wake()
                if batch or self._closing:
                    return batch
                own.changed.wait()

    def _for_large(self) -> _WorkerGroup:
        """The workers that large requests are for now."""
        return self._low if time.monotonic() < self._last_small + _RECENT_SECONDS else self._normal

    def _wake(self) -> None:
        """Wakes a worker for each queue in which requests wait."""
        if self._small:
            self._normal.changed.notify()
        if self._large:
            self._for_large().changed.notify()

    def _gather(self, own: _WorkerGroup, most: int) -> list[_Slice]:
        """Takes up to `most` texts from one queue; an unfinished request goes to the queue's end."""
        if self._small and (self._closing or not own.low):  # at the end, others may have stopped
            queue = self._small
        elif self._closing or own is self._for_large():
            queue = self._large
        else:
            return []
        full = _SHORT_BATCH_TOKENS if own.low else _BATCH_TOKENS
        batch: list[_Slice] = []
        unfinished: list[_Pending] = []
        texts = tokens = 0
        while queue and texts < most and tokens < full and not (batch and queue[0].work):
            pending = queue.popleft()
            start, count = pending.taken, len(pending.texts)
            if pending.over:
                self._waiting[pending.large] -= count - start
                continue
            if pending.work is not None:
                return [_Slice(pending=pending, start=start, texts=())]
            while pending.taken < min(count, start + _SHARE, start + most - texts):
                size = pending.size(pending.taken)
                if tokens and tokens + size > full:
                    tokens = full
                    break
                tokens += size
                pending.taken += 1
            if pending.taken == start:
                queue.appendleft(pending)
                break
            share = pending.texts[start : pending.taken]
            batch.append(_Slice(pending=pending, start=start, texts=share))
            self._waiting[pending.large] -= len(share)
            texts += len(share)
            if pending.taken < count:
                unfinished.append(pending)
        queue.extend(unfinished)
        return batch

    def _run(self, batch: Sequence[_Slice]) -> None:
        try:
            self._fill(batch)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0].pending, error)
            else:  # run each part separately, so that only the request that causes the error fails
                for part in batch:
                    self._run([part])

    def _fill(self, batch: Sequence[_Slice]) -> None:
        unread = [text for part in batch if part.pending.rows is None for text in part.texts]
        rows = iter(self._encoder.read(unread) if unread else [])
        good: list[tuple[_Slice, Sequence[Sequence[int]]]] = []
        for part in batch:
            known, end = part.pending.rows, part.start + len(part.texts)
            own = cast("Any", known[part.start : end]) if known else list(islice(rows, len(part.texts)))
            try:
                if not known:
                    self._check_rows(part.pending, own)
            except BadInput as error:
                self._fail(part.pending, error)
            if not part.pending.over:
                good.append((part, own))
        if not good:
            return
        inputs = [row for _, own in good for row in own]
        # The further threads have no low priority, so a worker of low priority does not use them.
        alone = self._normal.busy == 1 and not self._low.busy
        together = alone and sum(map(len, inputs)) >= _WORTH_ALL_THREADS
        vectors = self._encoder.vectors_of(inputs, together=together)
        place = 0
        for part, own in good:
            found = vectors[place : place + len(own)]
            place += len(own)
            if np.isfinite(found).all():
                part.pending.vectors[part.start : part.start + len(own)] = found
                with self._lock:
                    part.pending.done += len(own)
                    if part.pending.write is not None and part.pending.done == len(part.pending.texts):
                        part.pending.work = map(part.pending.body.append, part.pending.write(part.pending))
                        part.pending.write = None
                        self._large.appendleft(part.pending)
            else:
                self._fail(part.pending, BadModel("the model returns NaN or infinity; export it again"))

    def _fail(self, pending: _Pending, error: Exception) -> None:
        with self._lock:
            pending.failure = pending.failure or error


def _parts(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive texts, one share at most, with up to `_READ_CHARACTERS` characters, or one longer text."""
    start = characters = 0
    for place, text in enumerate(texts):
        if place > start and (place - start == _SHARE or characters + len(text) > _READ_CHARACTERS):
            yield texts[start:place]
            start, characters = place, 0
        characters += len(text)
    yield texts[start:]
