"""Kept figures, statistics and verdicts, and how the sections of docs/results.md are rendered.

`figures/NAME.json` holds everything a section is computed from: `hardware`, `versions`, and tables, which are
lists of flat rows. `sections/NAME.md` is the text of the section with `{{name}}` placeholders.

One rule gives every verdict: a claim is a set of differences (`Gap`) that it says are above zero. It holds if
the 95% intervals of all of them are, it does not hold if the interval of one is below zero, and otherwise
nobody can tell. An interval needs three seeds (or other independent repetitions).
"""

from __future__ import annotations

import json
import math
import re
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scipy.stats import t

CONFIDENCE = 0.95
FEWEST = 3
"""Repetitions that an interval needs."""
COLUMNS = 110
FIGURES, SECTIONS = (Path(__file__).parent / name for name in ("figures", "sections"))
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")
Verdict = Literal["holds", "does not hold", "can't tell"]
Row = dict[str, Any]
Figures = dict[str, Any]


def read_figures(name: str) -> Figures:
    """Read the kept figures of a section."""
    content: Figures = json.loads((FIGURES / f"{name}.json").read_text(encoding="utf-8"))
    return content


def write_figures(name: str, figures: Figures) -> None:
    """Write the figures of a section, one line per row."""
    parts = []
    for key, value in figures.items():
        shown = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list):
            shown = "[\n" + ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value) + "\n ]"
        parts.append(f' "{key}": {shown}')
    (FIGURES / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def merge(table: list[Row], rows: Iterable[Row], key: Sequence[str]) -> None:
    """Update the rows of a table that have the same key, and append the others."""
    found = {tuple(row.get(name) for name in key): row for row in table}
    for row in rows:
        place = tuple(row.get(name) for name in key)
        if place in found:
            found[place].update(row)
        else:
            found[place] = row
            table.append(row)


def pick(table: list[Row], **where: object) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in table if all(row.get(key) == value for key, value in where.items())]


def read_results(folder: str | Path) -> dict[str, Row]:
    """Read what `benchmarks/students.py` wrote: the content of each `result.json` by row name."""
    files = sorted(Path(folder).glob("*/result.json"))
    return {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}


def points(model: Row, kind: str | None = None, mode: str = "standard") -> float:
    """Return the mean score in points over the tasks of a kind, or over all."""
    return 100 * statistics.fmean(
        score["score"] for score in model["scores"] if score["mode"] == mode and kind in (None, score["kind"])
    )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Mean and standard deviation of a score over seeds."""

    mean: float
    spread: float | None
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.spread is None else f" ± {self.spread:.1f}")

    @property
    def change(self) -> str:
        """With a sign."""
        return signed(f"{self.mean:+.1f}" + ("" if self.spread is None else f" ± {self.spread:.1f}"))


def figure(values: Iterable[float]) -> Figure:
    """Summarise one value per seed."""
    found = list(values)
    spread = statistics.stdev(found) if len(found) > 1 else None
    return Figure(mean=statistics.fmean(found), spread=spread, seeds=len(found))


@dataclass(frozen=True, kw_only=True)
class Gap:
    """A difference that a claim says is above −`margin`, and its 95% interval."""

    value: float
    low: float
    high: float
    n: int
    """Repetitions, of the side that has fewer."""
    of: str = ""
    margin: float = 0.0

    def __str__(self) -> str:
        which = f"{self.of} " if self.of else ""
        if not math.isfinite(self.low):
            return which + signed(f"none ({self.value:+.1f})")
        return which + signed(f"{self.low:+.1f} to {self.high:+.1f}")


def gap(one: Figure, other: Figure | float, of: str = "", *, margin: float = 0.0) -> Gap:
    """Return the difference of two means with Welch's interval; `other` may be a number to be reached."""
    if not isinstance(other, Figure):
        other = Figure(mean=other, spread=0.0, seeds=one.seeds)
    value, n = one.mean - other.mean, min(one.seeds, other.seeds)
    reach = math.inf
    if n >= FEWEST and one.spread is not None and other.spread is not None:
        parts = [side.spread**2 / side.seeds for side in (one, other) if side.spread]
        sides = [side.seeds for side in (one, other) if side.spread]
        below = sum(part**2 / (seeds - 1) for part, seeds in zip(parts, sides, strict=True))
        freedom = sum(parts) ** 2 / below if below else 1.0
        reach = float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(sum(parts))
    return Gap(value=value, low=value - reach, high=value + reach, n=n, of=of, margin=margin)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One row of a paper's table."""

    says: str
    paper: str
    here: str
    scale: str
    """The model and the data here."""
    command: str
    """The letter of the command under the table."""
    gaps: Sequence[Gap] = ()
    unit: str = "seed"
    missing: str = ""
    """Why the figures can't decide, whatever their intervals: other settings, or a bug fixed since."""

    @property
    def verdict(self) -> Verdict:
        """The rule of this module."""
        if self.missing or not self.gaps:
            return "can't tell"
        if any(one.high < -one.margin for one in self.gaps):
            return "does not hold"
        return "holds" if all(one.low > -one.margin for one in self.gaps) else "can't tell"

    @property
    def lacks(self) -> str:
        """What is missing for a verdict."""
        if self.verdict != "can't tell":
            return ""
        few = [one for one in self.gaps if one.n < FEWEST]
        needed = f"{FEWEST} {self.unit}s, or scores of each query" if few or not self.gaps else ""
        return self.missing or needed or f"more {self.unit}s: an interval includes {self._level}"

    @property
    def _level(self) -> str:
        margins = {one.margin for one in self.gaps}
        return signed(f"{-margins.pop():g}") if len(margins) == 1 and 0.0 not in margins else "0"

    @property
    def deciding(self) -> Gap | None:
        """The difference that is furthest from what is claimed, among those with an interval."""
        sure = [one for one in self.gaps if math.isfinite(one.low)]
        if not self.gaps:
            return None
        if self.verdict == "does not hold":
            return min(sure, key=lambda one: one.high + one.margin)
        return min(sure or self.gaps, key=lambda one: one.low + one.margin if sure else one.value)

    def row(self) -> str:
        """Render the row."""
        numbers = sorted({one.n for one in self.gaps})
        n = " – ".join(str(number) for number in dict.fromkeys((*numbers[:1], *numbers[-1:])))
        units = "" if not numbers else f" {self.unit}{'' if numbers[-1] == 1 else 's'}"
        interval = "" if self.deciding is None else str(self.deciding)
        why = f"; missing: {self.lacks}" if self.lacks else ""
        cells = [self.says, self.paper, self.here, self.scale, n + units or "–", interval or "–"]
        return " | ".join([*cells, f"**{self.verdict}**{why}", self.command])


def claims_table(claims: Iterable[Claim]) -> str:
    """Render the claims of a paper."""
    columns = "claim | paper | here | model and data here | n | 95% interval | verdict | run"
    return table(columns, (claim.row() for claim in claims), numbers=False)


def signed(text: str) -> str:
    """Use a real minus sign."""
    return text.replace("-", "−")


def table(columns: str, rows: Iterable[str], *, numbers: bool = True) -> str:
    """Render a Markdown table from lines of cells; `numbers`, after the first column, are aligned right."""
    ruler = "|---|" + ("---:|" if numbers else "---|") * columns.count(" | ")
    return "\n".join([f"| {columns} |", ruler, *(f"| {row} |" for row in rows)])


def render(name: str, values: Mapping[str, str]) -> str:
    """Fill in the template of a section and wrap its prose.

    Every placeholder needs a value and every value a placeholder.
    """
    template = (SECTIONS / f"{name}.md").read_text(encoding="utf-8").rstrip("\n")
    if unused := values.keys() - set(PLACEHOLDER.findall(template)):
        raise SystemExit(f"{name}.md does not use {', '.join(sorted(unused))}")
    return wrap(PLACEHOLDER.sub(lambda found: values[found[1]], template))


def wrap(markdown: str) -> str:
    """Wrap paragraphs and list items; leave tables, headings, images and code as they are."""
    blocks = []
    for block in markdown.split("\n\n"):
        if block.startswith(("|", "#", "!", "```")):
            blocks.append(block)
            continue
        items = []
        for item in re.split(r"\n(?=- )", block):
            indent = "  " if item.startswith("- ") else ""
            text = " ".join(item.split())
            items.append(textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False))
        blocks.append("\n".join(items))
    return "\n\n".join(blocks)
