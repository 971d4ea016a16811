"""What a person sees: progress with time left on stderr, results on stdout."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from trundle.progress import SILENT, Advance, Progress

QUIETER_LIBRARIES = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "true",
}

BAR_WIDTH = 24


class Terminal:
    """Progress for a person: bars with time left while work goes on, and the lines worth keeping."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    @contextmanager
    def task(self, label: str, total: int | None) -> Iterator[Advance]:
        """A bar that goes away when the work is done."""
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        hidden = not self._console.is_terminal
        with Bars(*columns, console=self._console, transient=True, disable=hidden) as bars:
            shown = bars.add_task(label, total=total)
            yield lambda units: bars.advance(shown, units)

    def say(self, line: str) -> None:
        """One line that stays."""
        self._console.print(line, markup=False, style="dim")


def terminal(*, quiet: bool) -> Progress:
    """Where long work reports to."""
    return SILENT if quiet else Terminal()


def calm_libraries(*, verbose: bool) -> None:
    """Keep other libraries' bars and warnings off the screen, unless they are asked for."""
    if verbose:
        return
    for name, value in QUIETER_LIBRARIES.items():
        os.environ.setdefault(name, value)
    warnings.simplefilter("ignore")


def show_json(content: Mapping[str, Any] | Sequence[Any]) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def show(line: str = "") -> None:
    """A line of the result."""
    _stdout().print(line)


def show_table(
    rows: Sequence[Sequence[str]], *, title: str | None = None, texts: Sequence[int] = (0,)
) -> None:
    """Rows with a heading; the columns named in `texts` are read from the left, the others are figures."""
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
    # Names, tokens and texts are a user's own: [unused5] is no markup.
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """A share of a whole as a bar of eighths."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)
