"""A progress display that records its messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trundle.progress import Advance


class RecordedProgress:
    """The tasks, how many units of them were done, and the lines."""

    def __init__(self) -> None:
        self.tasks: list[tuple[str, int | None]] = []
        self.units = 0
        self.lines: list[str] = []

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        self.tasks.append((label, total))

        def advance(units: int) -> None:
            self.units += units

        yield advance

    def say(self, line: str) -> None:
        self.lines.append(line)
