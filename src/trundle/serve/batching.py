"""Dynamic batching: the texts of several requests run together.

A free worker takes whatever waits, so no request waits for a batch to fill up, and batches grow under load.
There is one worker per core: under load each runs its own batch on one core. A large request returns to the
end of the queue after each share, so it does not block small ones. Tokenising and inference run in the
workers' threads; the event loop is notified once per batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread

import numpy as np

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel
from trundle.runtime.encoder import Encoder
from trundle.serve.settings import ServerSettings
from trundle.serve.wire import _RequestError

_SHARE = 32
"""Most texts of one request in one batch."""
_BATCH_TEXTS = 128
_BATCH_CHARACTERS = 32_768
_LEAST_BATCH = 8
"""Batches up to this size are not split between free workers."""
_WORTH_ALL_THREADS = 128
"""Tokens from which a batch that runs alone is faster on all threads."""
_LONGEST_RETRY = 60


class _Busy(_RequestError):
    """The queue is full."""

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

    @property
    def ready(self) -> bool:
        return self.failure is not None or self.done == len(self.texts)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """The part of a request that is in one batch."""

    pending: _Pending
    start: int
    texts: Sequence[str]


class _Batcher:
    """One encoder, shared by all requests. Must be created and called inside a running event loop."""

    def __init__(
        self, encoder: Encoder, settings: ServerSettings, watch: Callable[[int, float], None]
    ) -> None:
        """`watch` is called after every batch with its number of texts and its seconds."""
        self._encoder, self._settings, self._watch = encoder, settings, watch
        self._queue: deque[_Pending] = deque()
        self._changed = Condition()
        self.waiting = 0  # texts that no worker has taken yet
        self._closing = False
        self._busy = 0
        self._rate = 0.0
        self._loop = asyncio.get_running_loop()
        # At least two: one tokenises while the other computes.
        workers = max(2, encoder.threads)
        self._threads = [Thread(target=self._work, name=f"batch-{number}") for number in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def works(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, texts: Sequence[str]) -> _Pending:
        """Queues texts that include their prompt; await `answer` of the result for the vectors."""
        pending = _Pending(
            texts=texts,
            vectors=np.empty((len(texts), self._encoder.dimensions), dtype=np.float32),
            answer=self._loop.create_future(),
        )
        with self._changed:
            if self._closing:
                raise _RequestError(503, "the server is shutting down; use another one", code="closing")
            if self.waiting + len(texts) > self._settings.waiting:
                seconds = self.waiting / self._rate if self._rate else 1.0
                raise _Busy(max(1, min(_LONGEST_RETRY, math.ceil(seconds))))
            self.waiting += len(texts)
            self._queue.append(pending)
            self._changed.notify()
        return pending

    def drop(self, pending: _Pending) -> None:
        """Cancels a request: texts that no worker has taken are not computed."""
        with self._changed:
            pending.dropped = True
            if pending in self._queue:
                self._queue.remove(pending)
                self.waiting -= len(pending.texts) - pending.taken

    async def encode(self, texts: Sequence[str]) -> _Pending:
        pending = self.submit(texts)
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self.drop(pending)
            raise

    async def close(self) -> None:
        """Rejects new requests, answers the queued ones, and stops the workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _work(self) -> None:
        while batch := self._next():
            started = time.perf_counter()
            self._run(batch)
            texts, seconds = sum(len(part.texts) for part in batch), time.perf_counter() - started
            self._watch(texts, seconds)
            rate = len(self._threads) * texts / max(seconds, 1e-6)
            self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
            with self._changed:
                self._busy -= 1
                ready = [part.pending for part in batch if part.pending.ready]
            if ready:
                self._loop.call_soon_threadsafe(_settle, ready)

    def _next(self) -> list[_Slice]:
        """Waits for the next batch; empty if the server shuts down and the queue is empty."""
        with self._changed:
            while True:
                while not self._queue and not self._closing:
                    self._changed.wait()
                free = len(self._threads) - self._busy
                batch = self._gather(min(_BATCH_TEXTS, max(_LEAST_BATCH, -(-self.waiting // free))))
                if batch:
                    self._busy += 1
                if self._queue:
                    self._changed.notify()
                elif self._closing:
                    self._changed.notify_all()
                if batch or (not self._queue and self._closing):
                    return batch

    def _gather(self, most: int) -> list[_Slice]:
        """Takes up to `most` texts; an unfinished request goes to the end of the queue."""
        batch: list[_Slice] = []
        unfinished: list[_Pending] = []
        texts = characters = 0
        while self._queue and texts < most and characters < _BATCH_CHARACTERS:
            pending = self._queue.popleft()
            left = len(pending.texts) - pending.taken
            if pending.over:
                self.waiting -= left
                continue
            share = pending.texts[pending.taken : pending.taken + min(_SHARE, most - texts)]
            batch.append(_Slice(pending=pending, start=pending.taken, texts=share))
            pending.taken += len(share)
            self.waiting -= len(share)
            texts += len(share)
            characters += sum(map(len, share))
            if len(share) < left:
                unfinished.append(pending)
        self._queue.extend(unfinished)
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
        """Tokenises the slices, runs them as one batch, and stores the vectors."""
        rows = iter(self._encoder.read([text for part in batch for text in part.texts]))
        good: list[tuple[_Slice, list[list[int]]]] = []
        for part in batch:
            own = [next(rows) for _ in part.texts]
            if [] in own:
                self._fail(part.pending, BadInput("a text has nothing to embed; leave it out"))
            elif part.pending.tokens + sum(map(len, own)) > (most := self._settings.most_tokens):
                self._fail(part.pending, BadInput(f"there are more than {most:,} tokens; send fewer texts"))
            elif not part.pending.over:
                good.append((part, own))
        if not good:
            return
        inputs = [row for _, own in good for row in own]
        together = self._busy == 1 and sum(map(len, inputs)) >= _WORTH_ALL_THREADS
        vectors = self._encoder.vectors_of(inputs, together=together)
        place = 0
        for part, own in good:
            found = vectors[place : place + len(own)]
            place += len(own)
            if np.isfinite(found).all():
                part.pending.vectors[part.start : part.start + len(own)] = found
                with self._changed:
                    part.pending.done += len(own)
                    part.pending.tokens += sum(map(len, own))
            else:
                self._fail(part.pending, BadModel("the model returns NaN or infinity; export it again"))

    def _fail(self, pending: _Pending, error: Exception) -> None:
        with self._changed:
            pending.failure = pending.failure or error


def _settle(finished: Sequence[_Pending]) -> None:
    for pending in finished:
        if pending.answer.done():
            continue
        if pending.failure is not None:
            pending.answer.set_exception(pending.failure)
        else:
            pending.answer.set_result(pending)
