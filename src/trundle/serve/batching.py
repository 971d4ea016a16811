"""Texts of many clients, run together.

A worker that is free takes what waits, so nobody waits for a batch to fill up, and batches grow by themselves under
load. There is a worker per core: under load each runs its own batch alone, and none waits for another. A large request
gives up its place after each share, so it can't hold up the small ones. Tokenising and running happen in the workers'
threads; the event loop is told once per batch.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel
from trundle.runtime.encoder import Encoder

_SHARE = 32
"""Texts that one request may have in one batch."""
_BATCH_TEXTS = 128
_BATCH_CHARACTERS = 32_768
_LEAST_BATCH = 8
"""Texts that are not worth sharing out among workers that are free."""
_WORTH_ALL_THREADS = 128
"""Tokens from which one batch gains from all threads, where nothing else is to be done."""
_LONGEST_RETRY = 60


class _Busy(Exception):
    """There is no room to wait."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"all places are taken; try again in {seconds} s")
        self.seconds = seconds


class _Closed(Exception):
    """The server is going down."""


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """What becomes of one request's texts."""

    vectors: Vectors
    tokens: int


@dataclass(kw_only=True, eq=False)
class _Job:
    """One request's texts on their way."""

    texts: Sequence[str]
    vectors: Vectors
    answer: asyncio.Future[_Encoded]
    taken: int = 0
    done: int = 0
    tokens: int = 0
    dropped: bool = False
    failure: Exception | None = None

    @property
    def over(self) -> bool:
        """Whether nobody waits for the rest."""
        return self.dropped or self.failure is not None

    @property
    def ready(self) -> bool:
        """Whether there is something to tell."""
        return self.failure is not None or self.done == len(self.texts)


@dataclass(frozen=True, kw_only=True)
class _Slice:
    """The part of a job that is in one batch."""

    job: _Job
    start: int
    texts: Sequence[str] = field(repr=False)


_Watch = Callable[[int, float], None]
"""Told of every batch: its texts and its seconds."""


class _Batcher:
    """One encoder, shared by everybody who asks. Made and asked inside a running event loop."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        waiting: int,
        most_tokens: int,
        watch: _Watch = lambda _texts, _seconds: None,
    ) -> None:
        self._encoder = encoder
        self._limit = waiting
        self._most_tokens = most_tokens
        self._watch = watch
        self._queue: deque[_Job] = deque()
        self._changed = Condition()
        self._waiting = 0
        self._closing = False
        self._busy = 0
        self._rate = 0.0
        self._loop = asyncio.get_running_loop()
        # At least two: one reads and writes while the other computes.
        workers = max(2, encoder.threads)
        self._threads = [Thread(target=self._work, name=f"batch-{number}") for number in range(workers)]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Texts that no worker has taken yet."""
        return self._waiting

    @property
    def works(self) -> bool:
        """Whether somebody is there to take what waits."""
        return all(thread.is_alive() for thread in self._threads)

    def submit(self, texts: Sequence[str]) -> _Job:
        """Let texts that already carry their prompt wait for their turn; `answer` of the job brings the vectors."""
        job = _Job(
            texts=texts,
            vectors=np.empty((len(texts), self._encoder.dimensions), dtype=np.float32),
            answer=self._loop.create_future(),
        )
        with self._changed:
            if self._closing:
                raise _Closed
            if self._waiting + len(texts) > self._limit:
                raise _Busy(self._retry_after())
            self._waiting += len(texts)
            self._queue.append(job)
            self._changed.notify()
        return job

    def drop(self, job: _Job) -> None:
        """Nobody waits for this job any more: what no worker has taken is not computed."""
        with self._changed:
            job.dropped = True
            if job in self._queue:
                self._queue.remove(job)
                self._waiting -= len(job.texts) - job.taken

    async def encode(self, texts: Sequence[str]) -> _Encoded:
        """Submit and wait."""
        job = self.submit(texts)
        try:
            return await job.answer
        except asyncio.CancelledError:
            self.drop(job)
            raise

    async def close(self) -> None:
        """Take nothing new, answer what was taken, stop the workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _retry_after(self) -> int:
        seconds = self._waiting / self._rate if self._rate else 1.0
        return max(1, min(_LONGEST_RETRY, math.ceil(seconds)))

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
                ready = [part.job for part in batch if part.job.ready]
            if ready:
                self._loop.call_soon_threadsafe(_settle, ready)

    def _next(self) -> list[_Slice]:
        """The next batch; empty when the server is going down and nothing waits."""
        with self._changed:
            while True:
                while not self._queue and not self._closing:
                    self._changed.wait()
                free = len(self._threads) - self._busy
                batch = self._gather(min(_BATCH_TEXTS, max(_LEAST_BATCH, -(-self._waiting // free))))
                if batch:
                    self._busy += 1
                if self._queue:
                    self._changed.notify()
                elif self._closing:
                    self._changed.notify_all()
                if batch or (not self._queue and self._closing):
                    return batch

    def _gather(self, most: int) -> list[_Slice]:
        """What waits, up to `most` texts; a job that is not through goes to the end of the queue."""
        batch: list[_Slice] = []
        unfinished: list[_Job] = []
        texts = characters = 0
        while self._queue and texts < most and characters < _BATCH_CHARACTERS:
            job = self._queue.popleft()
            left = len(job.texts) - job.taken
            if job.over:
                self._waiting -= left
                continue
            share = job.texts[job.taken : job.taken + min(_SHARE, most - texts)]
            batch.append(_Slice(job=job, start=job.taken, texts=share))
            job.taken += len(share)
            self._waiting -= len(share)
            texts += len(share)
            characters += sum(map(len, share))
            if len(share) < left:
                unfinished.append(job)
        self._queue.extend(unfinished)
        return batch

    def _run(self, batch: Sequence[_Slice]) -> None:
        try:
            self._fill(batch)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0].job, error)
            else:  # only the one whose fault it is shall suffer
                for part in batch:
                    self._run([part])

    def _fill(self, batch: Sequence[_Slice]) -> None:
        """Tokenise the slices, run them as one, and put the vectors in their rows."""
        rows = self._encoder.read([text for part in batch for text in part.texts])
        good: list[tuple[_Slice, list[list[int]]]] = []
        place = 0
        for part in batch:
            own = rows[place : place + len(part.texts)]
            place += len(own)
            if [] in own:
                self._fail(part.job, BadInput("a text has nothing to embed; leave it out"))
            elif part.job.tokens + sum(map(len, own)) > self._most_tokens:
                limit = f"the request holds more than {self._most_tokens:,} tokens"
                self._fail(part.job, BadInput(f"{limit}; send fewer texts at once"))
            elif not part.job.over:
                good.append((part, own))
        if not good:
            return
        together = self._busy == 1 and sum(len(row) for _, own in good for row in own) >= _WORTH_ALL_THREADS
        vectors = self._encoder.vectors_of([row for _, own in good for row in own], together=together)
        place = 0
        for part, own in good:
            found = vectors[place : place + len(own)]
            place += len(own)
            if np.isfinite(found).all():
                part.job.vectors[part.start : part.start + len(own)] = found
                with self._changed:
                    part.job.done += len(own)
                    part.job.tokens += sum(map(len, own))
            else:
                self._fail(part.job, BadModel("the model gives NaN or infinity for a text; export it again"))

    def _fail(self, job: _Job, error: Exception) -> None:
        with self._changed:
            job.failure = job.failure or error


def _settle(jobs: Sequence[_Job]) -> None:
    for job in jobs:
        if job.answer.done():
            continue
        if job.failure is not None:
            job.answer.set_exception(job.failure)
        else:
            job.answer.set_result(_Encoded(vectors=job.vectors, tokens=job.tokens))
