"""Progress of long work, which of several processes reports it, and work that is done in advance."""

from __future__ import annotations

import os
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
        """Shows `label` while the block runs; the block calls the yielded function with the units it has done."""
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
