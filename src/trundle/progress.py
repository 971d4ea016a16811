"""How long work tells a person where it stands, without knowing what a terminal is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Progress(Protocol):
    """Something that can show how far a piece of work has come."""

    def task(self, label: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show `label` while the block runs; the block calls what it is given with the units just done."""
        ...

    def say(self, line: str) -> None:
        """One line worth reading later."""
        ...


class _Silent:
    """Shows nothing: the default for library use."""

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:  # noqa: ARG002
        """Run the block."""
        yield lambda _units: None

    def say(self, line: str) -> None:
        """Drop the line."""


SILENT = _Silent()


def own_rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """How many processes work together; alone, 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that asks, writes and reports; alone, it always is."""
    return own_rank() == 0
