"""Output on the terminal: progress on stderr, results on stdout."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from trundle.progress import SILENT, Advance, Progress

_QUIETER_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}

_BAR_WIDTH = 24
_SECONDS_BETWEEN_LINES = 10.0


class _Terminal:
    """Shows progress bars with the time left, and permanent lines."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        if not (self._console.is_terminal or self._console.is_jupyter):
            with _Lines(label, total, self.say) as lines:
                yield lines.advance
            return
        with Bars(*columns, console=self._console, transient=True) as bars:
            shown = bars.add_task(label, total=total)
            yield lambda units: bars.advance(shown, units)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, style="dim")


class _Lines:
    """Reports a task as a line every few seconds, for logs: what is done, how fast, and the time left.

    Of tasks inside each other only the innermost is reported.
    """

    _active: ClassVar[list[_Lines]] = []

    def __init__(self, label: str, total: int | None, say: Callable[[str], None]) -> None:
        self._label, self._total, self._say, self._done = label, total, say, 0
        self._ended, self._began = threading.Event(), time.monotonic()

    def advance(self, units: int) -> None:
        self._done += units

    def __enter__(self) -> Self:
        self._active.append(self)
        threading.Thread(target=self._report, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._ended.set()
        self._active.remove(self)

    def _report(self) -> None:
        while not self._ended.wait(_SECONDS_BETWEEN_LINES):
            if self._active[-1:] == [self]:
                self._say(self._line(time.monotonic() - self._began))

    def _line(self, seconds: float) -> str:
        done, total = self._done, self._total
        parts = [f"{self._label}: {done:,}" + ("" if total is None else f" of {total:,}")]
        if done:
            rate = done / seconds
            parts.append(f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s")
        left = f"{(total - done) * seconds / done:,.0f} s left" if done and total and total >= done else ""
        return ", ".join([*parts, left or f"{seconds:,.0f} s so far"])


def terminal(*, quiet: bool) -> Progress:
    """Returns a display of progress on stderr, or one that shows nothing."""
    return SILENT if quiet else _Terminal()


def _calm_libraries(*, verbose: bool) -> None:
    """Hides the progress bars and warnings of other libraries unless `verbose` is set."""
    if verbose:
        return
    for name, value in _QUIETER_LIBRARIES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


def _show_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _show(line: str = "") -> None:
    _stdout().print(line)


def _show_table(
    rows: Sequence[Sequence[str]], *, title: str | None = None, texts: Sequence[int] = (0,), gap: bool = False
) -> None:
    """Prints rows under a heading, after an empty line if `gap`; columns in `texts` are aligned left."""
    if gap:
        _show()
    heading, *body = rows
    table = Table(
        title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False
    )
    for number, name in enumerate(heading):
        table.add_column(name, justify="left" if number in texts else "right", no_wrap=number not in texts)
    for row in body:
        table.add_row(*row)
    _stdout().print(table)


def _stdout() -> Console:
    # Names, tokens and texts come from the user: [unused5] is not markup.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console


def _bar(share: float, width: int = _BAR_WIDTH) -> str:
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


_ROWS, _COLUMNS, _WIDEST = 13, 96, 3
_THIRDS = len("▔─▁")
"""Each row shows three heights."""


def _curve(losses: Sequence[float], marks: Mapping[int, str]) -> list[str]:
    """Losses as short strokes over layers 1 to L; the marked ones are bold and named below the axis."""
    low, high = min(losses), max(losses)
    step = max(1, min(_WIDEST, _COLUMNS // len(losses)))
    grid = [[" "] * (step * len(losses)) for _ in range(_ROWS)]
    for layer, loss in enumerate(losses, start=1):
        share = (high - loss) / (high - low) if high > low else 0.5
        row, third = divmod(round(share * (_ROWS * _THIRDS - 1)), _THIRDS)
        stroke = ("▀■▄" if layer in marks else "▔─▁")[third]
        grid[row][step * (layer - 1) : step * layer] = stroke * max(1, step - 1) + " " * (step > 1)
    names = {0: f"{high:.3f}", _ROWS // 2: f"{(low + high) / 2:.3f}", _ROWS - 1: f"{low:.3f}"}
    wide = max(map(len, names.values()))
    lines = [f"{names.get(row, ''):>{wide}} ┤ {''.join(cells)}".rstrip() for row, cells in enumerate(grid)]
    lines.append(f"{'':>{wide}} └─{'─' * (step * len(losses))}")
    margin = " " * (wide + 3)
    ends = "1" if len(losses) == 1 else f"1{len(losses):>{step * (len(losses) - 1)}}"
    return [*lines, margin + ends, *(margin + line for line in _names(marks, step, len(losses)))]


def _names(marks: Mapping[int, str], step: int, layers: int) -> list[str]:
    """Each mark on a line of its own, with an arrow under its layer."""
    lines = []
    for layer, name in sorted(marks.items()):
        place, words = step * (layer - 1), f"{name}: {layer}"
        fits_before = 2 * layer > layers and len(words) < place
        lines.append(f"{words:>{place - 1}} ↑" if fits_before else f"{' ' * place}↑ {words}")
    return lines
