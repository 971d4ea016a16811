"""Progress of long work, and which of several processes reports it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


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


def own_rank() -> int:
    """Returns the rank of this process, as torchrun and accelerate set it."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """Returns the number of processes that work together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process has rank 0, the one that labels, writes and reports."""
    return own_rank() == 0
