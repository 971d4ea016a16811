"""GAPrune: what pruned MLPs cost a domain, by method and sparsity, with and without training."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from evidence import Figure, Figures, Row, Verdict, all_above, judged, merge, placeholders, table

MODEL, LARGER = "all-MiniLM-L6-v2", "all-mpnet-base-v2"
DOMAINS, SIDES = ("finance", "chemistry"), ("domain", "general")
ONE_SHOT, AFTER, DENSE = "one-shot", "after", "dense"
OURS, PAPER = "gaprune", "gaprune-paper"
SPARSITIES = (30, 50, 60, 70)
SWEPT = (OURS, "wanda", "magnitude", "neuron", "neuron-alone")
KEY = ("model", "domain", "method", "sparsity", "when", "side")


def mean_of(line: Row, side: str) -> float:
    """Return the mean score over the tasks of the domain, or over the others."""
    own = set(line["of_domain"])
    return statistics.fmean(
        score for task, score in line["scores"].items() if (task in own) is (side == "domain")
    )


def changes(folders: list[str]) -> list[Row]:
    """Read what `benchmarks/weights.py` wrote: the change against dense in per cent, over all seeds."""
    lines = [
        json.loads(line)
        for folder in folders
        for file in sorted(Path(folder).glob("*.jsonl"))
        for line in file.open()
    ]
    dense = {
        (one["model"], one["domain"], one["seed"]): one
        for one in lines
        if (one["method"], one["when"]) == (DENSE, ONE_SHOT)
    }
    found: dict[tuple[object, ...], dict[int, float]] = {}
    for one in lines:
        before = dense[one["model"], one["domain"], one["seed"]]
        for side in SIDES:
            change = 100 * (mean_of(one, side) / mean_of(before, side) - 1)
            key = tuple((one | {"side": side})[name] for name in KEY)
            found.setdefault(key, {})[one["seed"]] = change
    rows = []
    for key, seeds in found.items():
        spread = round(statistics.stdev(seeds.values()), 2) if len(seeds) > 1 else None
        row = {"change": round(statistics.fmean(seeds.values()), 2), "spread": spread, "seeds": len(seeds)}
        rows.append(dict(zip(KEY, key, strict=True)) | row)
    return rows


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add the folders in `rows=FOLDER,FOLDER`; the same method, domain and sparsity are replaced."""
    if what != "rows":
        raise SystemExit(f"gaprune takes rows, not {what}")
    rows = changes(place.split(","))
    merge(figures["rows"], [row | ({"model": options.model} if options.model else {}) for row in rows], KEY)


class Changes:
    """The changes of a model's scores by method, sparsity and time, on its domain or elsewhere."""

    def __init__(self, rows: list[Row], model: str, side: str = "domain") -> None:
        self._found = {
            (row["method"], row["sparsity"], row["domain"], row["when"]): Figure(
                mean=row["change"], spread=row["spread"], seeds=row["seeds"]
            )
            for row in rows
            if (row["model"], row["side"]) == (model, side)
        }
        self.seeds = max(change.seeds for change in self._found.values())

    def of(self, method: str, sparsity: int, when: str) -> list[Figure]:
        """Return one change per domain, or none where it was not measured."""
        level = 0 if method == DENSE else sparsity
        found = (self._found.get((method, level, domain, when)) for domain in DOMAINS)
        return [change for change in found if change is not None]

    def both(self, method: str, sparsity: int, when: str) -> str:
        """Show finance / chemistry."""
        return " / ".join(one.change for one in self.of(method, sparsity, when)) or "–"

    def pairs(self, method: str, rival: str, sparsity: int, when: str) -> list[tuple[Figure, Figure]]:
        """Return a pair of changes per domain."""
        return list(zip(self.of(method, sparsity, when), self.of(rival, sparsity, when), strict=True))

    def either(self, method: str, rival: str, sparsity: int, when: str) -> Verdict:
        """Judge whether a method is better in both domains, or worse in both."""
        for one, other, verdict in ((method, rival, True), (rival, method, False)):
            pairs = self.pairs(one, other, sparsity, when)
            if pairs and all(a.above(b) for a, b in pairs):
                return judged(verdict)
        return "can't tell"

    def above_dense(self, method: str, sparsity: int) -> Verdict:
        """Judge whether the trained model is above dense in both domains."""
        found = self.of(method, sparsity, AFTER)
        return judged(bool(found) and all(one.interval[0] > 0 for one in found))

    def swept(self, labels: dict[str, str]) -> str:
        """Render every method and sparsity that was measured."""
        there = [one for one in SPARSITIES if any(self.of(method, one, AFTER) for method in SWEPT)]
        rows = [
            " | ".join([labels[method], shown, *(self.both(method, sparsity, when) for sparsity in there)])
            for method in SWEPT
            if any(self.of(method, sparsity, AFTER) for sparsity in there)
            for when, shown in ((ONE_SHOT, ONE_SHOT), (AFTER, "100 steps"))
        ]
        return table(" | ".join(["method", "", *(f"{sparsity}%" for sparsity in there)]), rows)


def values(figures: Figures) -> dict[str, str]:
    """Compute every placeholder of the section."""
    small, large = (Changes(figures["rows"], model) for model in (MODEL, LARGER))
    elsewhere = Changes(figures["rows"], LARGER, "general")
    labels = {row["method"]: row["label"] for row in figures["methods"]}
    found, sides = {"seeds": str(small.seeds)}, {"small": small, "large": large, "general": elsewhere}
    for name in placeholders("gaprune"):  # such as "small gaprune 50 after"
        side, *cell = name.split()
        if len(cell) == 3:
            found[name] = sides[side].both(cell[0], int(cell[1]), cell[2])
    rivals = ("magnitude", "domain-fisher", "general-fisher", "random")
    gains = [one.mean > 0 for side in (small, large) for one in side.of(OURS, 30, ONE_SHOT)]
    neurons = small.pairs("neuron", OURS, 70, AFTER)
    deep = [pair for sparsity in (60, 70) for pair in small.pairs(OURS, "magnitude", sparsity, ONE_SHOT)]
    half = [
        f"{row['label']} | {row['paper_one_shot']} | {row['paper_after']} "
        f"| {small.both(row['method'], 50, ONE_SHOT)} | {small.both(row['method'], 50, AFTER)}"
        for row in figures["methods"]
    ]
    columns = "method | paper, one-shot | paper, 100 steps | here, one-shot | here, 100 steps"
    return found | {
        "verdict.best": all_above(
            pair for rival in rivals for pair in small.pairs(PAPER, rival, 50, ONE_SHOT)
        ),
        "verdict.gains": judged(all(gains)),
        "verdict.robust": all_above(deep),
        "verdict.trained": small.above_dense(PAPER, 50),
        "verdict.pruning": small.either(OURS, DENSE, 50, AFTER),
        "verdict.wanda": small.either(OURS, "wanda", 50, ONE_SHOT),
        "verdict.neurons": small.above_dense("neuron", 30),
        "verdict.deep": judged(not any(zeros.above(neuron) for neuron, zeros in neurons)),
        "verdict.larger": large.above_dense(OURS, 50),
        "verdict.larger_wanda": large.either(OURS, "wanda", 60, ONE_SHOT),
        "half": table(columns, half),
        "swept": small.swept(labels),
        "larger": large.swept(labels),
        "elsewhere": elsewhere.swept(labels),
    }
