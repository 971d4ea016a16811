"""Progress of long work, which of several processes reports it, and work that is done in advance."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

Advance = Callable[[int], None]
_T = TypeVar("_T")


class Progress(Protocol):
    """Shows the progress of a piece of work."""

    def task(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        """Shows `label` while the block runs; the block passes the units done to the yielded function."""
        ...

    def say(self, line: str) -> None:
        """Prints a line."""
        ...


class _Silent:
    """Shows nothing; the default for library use."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        """Runs the block."""
        yield lambda _units: None

    def say(self, line: str) -> None:
        """Drops the line."""


SILENT = _Silent()


class Stopwatch:
    """Passes progress on and adds up how long each task took; of tasks in one another the inner one counts.

    Only tasks of the thread that made the stopwatch are counted: others run beside them.
    """

    def __init__(self, progress: Progress, began: float | None = None) -> None:
        """`progress` shows the tasks; the time since `began` (`time.monotonic`) counts as starting."""
        self._progress, self._thread = progress, threading.get_ident()
        self._labels, self._since = ["other"], time.monotonic()
        self.began = self._since if began is None else began
        self.seconds: dict[str, float] = {"other": 0.0}
        """Seconds by label; `other` is the time outside of all tasks."""
        if began is not None:
            self.seconds["starting"] = self._since - began

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        """Shows `label`, and counts the time of the block for it."""
        with self._progress.task(label, total) as advance:
            if threading.get_ident() != self._thread:
                yield advance
                return
            self.count()
            self._labels.append(label)
            try:
                yield advance
            finally:
                self.count()
                self._labels.pop()

    def count(self) -> dict[str, float]:
        """Returns the seconds by label until now."""
        now, label = time.monotonic(), self._labels[-1]
        self.seconds[label] = self.seconds.get(label, 0.0) + now - self._since
        self._since = now
        return dict(self.seconds)

    def say(self, line: str) -> None:
        """Prints a line."""
        self._progress.say(line)


def own_rank() -> int:
    """Returns the rank of this process, as torchrun and accelerate set it."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """Returns the number of processes that work together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process has rank 0, the one that labels, writes and reports."""
    return own_rank() == 0


@contextmanager
def ahead(items: Iterable[_T], *, count: int = 1) -> Iterator[Iterator[_T]]:
    """Yields an iterator over the same items that computes up to `count` of them in advance, in a thread."""
    from concurrent.futures import ThreadPoolExecutor  # imported on first use: most commands need no thread

    source, end = iter(items), object()
    with ThreadPoolExecutor(1) as pool:
        pending: deque[Future[Any]] = deque(pool.submit(next, source, end) for _ in range(count))

        def take() -> Iterator[_T]:
            while (item := pending.popleft().result()) is not end:
                pending.append(pool.submit(next, source, end))
                yield item

        try:
            yield take()
        finally:
            pool.shutdown(cancel_futures=True)
