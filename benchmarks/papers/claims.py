"""A paper's claims beside what was measured here, as records that are printed as Markdown."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import t, ttest_ind_from_stats

SURE = 0.95
"""How sure a difference has to be: one in twenty is chance."""
Verdict = Literal["holds here", "does not hold here", "can't tell", "not measured yet"]
KEPT = Path(__file__).parent / "kept"
MEASURED = Path(__file__).parent / "measured"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A score over seeds: mean and standard deviation."""

    mean: float
    spread: float | None
    seeds: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where the mean lies by what is known from these few (Student's t), which with one seed is anywhere."""
        if self.spread is None:
            return -math.inf, math.inf
        reach = float(t.ppf((1 + SURE) / 2, self.seeds - 1)) * self.spread / math.sqrt(self.seeds)
        return self.mean - reach, self.mean + reach

    def above(self, other: Figure) -> bool:
        """By more than seeds differ: 95% sure by Welch's t, and never with one seed."""
        if self.spread is None or other.spread is None:
            return False
        with np.errstate(divide="ignore", invalid="ignore"):  # seeds that agree to the last digit
            found = ttest_ind_from_stats(
                self.mean, self.spread, self.seeds, other.mean, other.spread, other.seeds, equal_var=False
            )
        return self.mean > other.mean and bool(found.pvalue < 1 - SURE)

    def __str__(self) -> str:
        return f"{self.mean:.1f}" + ("" if self.spread is None else f" ± {self.spread:.1f}")


def figure(values: Iterable[float]) -> Figure:
    """Of what each seed gave."""
    found = list(values)
    spread = statistics.stdev(found) if len(found) > 1 else None
    return Figure(mean=statistics.fmean(found), spread=spread, seeds=len(found))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One sentence of a paper, its figures, ours, and what follows."""

    says: str
    theirs: str
    ours: str = ""
    verdict: Verdict = "not measured yet"
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper in small, with ours beside it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """All there is about one paper."""

    paper: str
    method: str
    commands: tuple[str, ...]
    hardware: str
    versions: dict[str, str]
    seeds: int
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = ()


def judged(holds: bool) -> Verdict:
    """For a claim that was measured."""
    return "holds here" if holds else "does not hold here"


def all_above(pairs: Iterable[tuple[Figure, Figure]]) -> Verdict:
    """Whether the first is above the second in all pairs, below in one at least, or neither can be told."""
    found = list(pairs)
    if any(other.above(one) for one, other in found):
        return "does not hold here"
    return "holds here" if all(one.above(other) for one, other in found) else "can't tell"


def read_measured(name: str) -> dict[str, Any]:
    """The figures of all runs so far, from which everything about a paper is computed."""
    content: dict[str, Any] = json.loads((MEASURED / f"{name}.json").read_text())
    return content


def write_measured(name: str, content: dict[str, Any], options: argparse.Namespace) -> None:
    """The figures with those of a new run, and where they come from."""
    if options.hardware:
        content["hardware"] = options.hardware
    content["versions"] |= dict(options.versions)
    (MEASURED / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    """New rows in the place of those that say the same of an older run."""
    rows = {tuple(row[name] for name in key): row for row in (*old, *new)}
    return [rows[place] for place in sorted(rows)]


def add_origin(parser: argparse.ArgumentParser) -> None:
    """Where new figures come from."""
    parser.add_argument("--hardware")
    parser.add_argument("--versions", nargs="+", default=[], metavar="PACKAGE=VERSION", type=_package)


def _package(text: str) -> tuple[str, str]:
    name, _, version = text.partition("=")
    return name, version


def markdown(evidence: Evidence) -> str:
    """A section of the page."""
    lines = [f"## {evidence.method}", "", f"*{evidence.paper}*", ""]
    lines += ["| claim | paper | here | verdict |", "|---|---|---|---|"]
    for claim in evidence.claims:
        verdict = f"**{claim.verdict}**" + (f": {claim.remark}" if claim.remark else "")
        lines.append(f"| {claim.says} | {claim.theirs} | {claim.ours} | {verdict} |")
    for table in evidence.tables:
        lines += ["", f"{table.title}:", "", "| " + " | ".join(table.columns) + " |"]
        lines.append("|---|" + "---:|" * (len(table.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in table.rows]
    versions = ", ".join(f"{name} {version}" for name, version in evidence.versions.items())
    seeds = f"{evidence.seeds} seeds" if evidence.seeds > 1 else "one seed"
    lines += ["", f"{evidence.hardware}; {seeds}; {versions}. Taken with:", "", "```bash"]
    return "\n".join([*lines, *evidence.commands, "```"])
