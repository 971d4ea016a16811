"""Kept figures, statistics and verdicts, and how the sections of docs/results.md are rendered.

`figures/NAME.json` holds everything a section is computed from: `hardware`, `versions`, and tables, which are
lists of flat rows. `sections/NAME.md` is the text of the section with `{{name}}` placeholders.
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

import numpy as np
from scipy.stats import t, ttest_ind_from_stats

CONFIDENCE = 0.95
COLUMNS = 110
FIGURES, SECTIONS = (Path(__file__).parent / name for name in ("figures", "sections"))
PLACEHOLDER = re.compile(r"\{\{([^{}]+)\}\}")
Verdict = Literal["holds here", "does not hold here", "can't tell"]
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

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the mean (Student's t); unbounded with one seed."""
        if self.spread is None:
            return -math.inf, math.inf
        reach = float(t.ppf((1 + CONFIDENCE) / 2, self.seeds - 1)) * self.spread / math.sqrt(self.seeds)
        return self.mean - reach, self.mean + reach

    def above(self, other: Figure) -> bool:
        """Whether this mean is higher at 95% confidence (Welch's t-test); never with one seed."""
        if self.spread is None or other.spread is None:
            return False
        with np.errstate(divide="ignore", invalid="ignore"):  # all seeds may agree to the last digit
            found = ttest_ind_from_stats(
                self.mean, self.spread, self.seeds, other.mean, other.spread, other.seeds, equal_var=False
            )
        return self.mean > other.mean and bool(found.pvalue < 1 - CONFIDENCE)

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


def judged(holds: bool) -> Verdict:
    """Return the verdict on a claim that was measured."""
    return "holds here" if holds else "does not hold here"


def all_above(pairs: Iterable[tuple[Figure, Figure]]) -> Verdict:
    """Judge whether the first is above the second in all pairs; one pair the other way refutes it."""
    found = list(pairs)
    if any(other.above(one) for one, other in found):
        return "does not hold here"
    return "holds here" if all(one.above(other) for one, other in found) else "can't tell"


def signed(text: str) -> str:
    """Use a real minus sign."""
    return text.replace("-", "−")


def share(score: float, whole: float) -> str:
    """Show a score and its percentage of another."""
    return f"{score:.1f} ({100 * score / whole:.1f}%)"


def table(columns: str, rows: Iterable[str]) -> str:
    """Render a Markdown table from lines of cells; all columns but the first are aligned right."""
    ruler = "|---|" + "---:|" * columns.count(" | ")
    return "\n".join([f"| {columns} |", ruler, *(f"| {row} |" for row in rows)])


def placeholders(name: str) -> set[str]:
    """Return the placeholders of a section."""
    return set(PLACEHOLDER.findall((SECTIONS / f"{name}.md").read_text(encoding="utf-8")))


def render(name: str, values: Mapping[str, str], figures: Figures | None = None) -> str:
    """Fill in the template of a section and wrap its prose.

    Every placeholder needs a value and every value a placeholder.
    """
    filled = dict(values)
    if figures:
        versions = ", ".join(f"{package} {version}" for package, version in figures["versions"].items())
        filled |= {"hardware": figures["hardware"], "versions": versions}
    template = (SECTIONS / f"{name}.md").read_text(encoding="utf-8").rstrip("\n")
    if unused := filled.keys() - placeholders(name):
        raise SystemExit(f"{name}.md does not use {', '.join(sorted(unused))}")
    return wrap(PLACEHOLDER.sub(lambda found: filled[found[1]], template))


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
