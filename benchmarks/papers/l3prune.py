"""L³Prune: decoders cut at many levels and trained alike, and the levels that layer-loss curves pick."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from evidence import (
    Figure,
    Figures,
    Row,
    Verdict,
    figure,
    judged,
    merge,
    pick,
    points,
    read_results,
    signed,
    table,
)

FIRST, SECOND = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct"
PICKED, KINDS = ("large", "small"), ("sts", "retrieval")
NEGLIGIBLE, MODEST = 0.5, 6.0
"""Losses in points that the paper calls so (up to 0.5 at 30%; up to 5.3 at 80%)."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add `levels`, a folder of `students.py l3prune`, or `curve`, the JSON of `trundle inspect`."""
    model = {"model": options.model}
    if not options.model:
        raise SystemExit("pass --model with the name of the decoder")
    if what == "levels":
        for level, content in read_results(place).items():
            made = content["models"][0]
            row = model | {"level": level, "layers": made["layers"], "parameters": made["parameters"]}
            row |= {"seed": options.seed} | {kind: round(points(made, kind), 2) for kind in KINDS}
            merge(figures["levels"], [row], ("model", "level", "seed"))
    elif what == "curve":
        losses = json.loads(Path(place).read_text())["curve"]["losses"]
        merge(figures["curves"], [model | row for row in turns(losses)], ("model", "turn"))
    else:
        raise SystemExit(f"l3prune takes levels and curve, not {what}")


def turns(losses: list[float]) -> list[Row]:
    """Find the minimum of each half of a curve, the maximum between them, and its end."""
    middle, last = len(losses) // 2, len(losses) - 1
    low = min(range(middle), key=losses.__getitem__)
    late = min(range(middle, len(losses)), key=losses.__getitem__)
    high = max(range(low, late + 1), key=losses.__getitem__)
    places = {"low": low, "high": high, "late": late, "end": last}
    return [{"turn": turn, "layer": at + 1, "loss": round(losses[at], 3)} for turn, at in places.items()]


class Levels:
    """The levels of one decoder."""

    def __init__(self, figures: Figures, model: str) -> None:
        self.rows = pick(figures["levels"], model=model)
        self.short = model.removesuffix("-Instruct")
        self.curve = {row["turn"]: row for row in pick(figures["curves"], model=model)}
        self.paper = {row["level"]: row["says"] for row in figures["paper"]}
        self.seeds = max(len(pick(self.rows, level=row["level"])) for row in self.rows)

    def score(self, level: str, kind: str) -> Figure:
        """Return the mean score over seeds."""
        return figure(row[kind] for row in pick(self.rows, level=level))

    def change(self, level: str, kind: str) -> float:
        """Return the points gained against the uncut decoder."""
        return self.score(level, kind).mean - self.score("0", kind).mean

    def against(self, level: str) -> str:
        """Show the parameters and points gained or lost."""
        whole, small = (pick(self.rows, level=one)[0]["parameters"] for one in ("0", level))
        sts, retrieval = (f"{self.change(level, kind):+.1f}" for kind in KINDS)
        changes = f"{100 * (small / whole - 1):.0f}% parameters for {sts} STS, {retrieval} retrieval"
        return f"{self.short}: {signed(changes)}"

    def lost(self, level: str) -> float:
        """Return the larger loss of the two kinds in points."""
        return max(-self.change(level, kind) for kind in KINDS)

    def shape(self) -> str:
        """Show the turns of the layer-loss curve."""
        low, high, late, end = (self.curve[turn] for turn in ("low", "high", "late", "end"))
        return (
            f"{self.short}: {low['loss']:.2f} at layer {low['layer']}, {high['loss']:.2f} at "
            f"{high['layer']}, {late['loss']:.2f} at {late['layer']} of {end['layer']}, "
            f"{end['loss']:.2f} at the end"
        )

    def falls_twice(self) -> bool:
        """Whether the loss falls, rises and falls again."""
        low, high, late = (self.curve[turn] for turn in ("low", "high", "late"))
        return bool(low["layer"] > 1 and low["loss"] < high["loss"] > late["loss"])

    def picked(self) -> str:
        """Return the row of table 1."""
        whole = pick(self.rows, level="0")[0]["layers"]
        cells = [self.short]
        for level in PICKED:
            changes = " / ".join(signed(f"{self.change(level, kind):+.1f}") for kind in KINDS)
            cells += [f"{pick(self.rows, level=level)[0]['layers']} of {whole}", changes]
        return "| " + " | ".join(cells) + " |"

    def table(self) -> str:
        """Render figure 5 for this decoder."""
        sizes = {row["level"]: row for row in self.rows}
        rows = []
        for level in sorted(sizes, key=lambda one: (one in PICKED, -sizes[one]["layers"])):
            cells = [level if level in PICKED else f"{level}%", str(sizes[level]["layers"])]
            cells.append(f"{sizes[level]['parameters'] / 1e6:.1f}M")
            for kind in KINDS:
                found = self.score(level, kind)
                cells += [str(found), f"{100 * found.mean / self.score('0', kind).mean:.1f}%"]
            rows.append(" | ".join([*cells, self.paper.get(level, "")]))
        return table("pruned | layers | parameters | STS | of full | retrieval | of full | paper", rows)


def values(figures: Figures) -> dict[str, str]:
    """Compute every placeholder of the section."""
    models = [Levels(figures, model) for model in (FIRST, SECOND)]
    small, large = models

    def loses(level: str, most: float) -> Verdict:
        return judged(all(model.lost(level) <= most for model in models))

    return {
        "curves": "; ".join(model.shape() for model in models),
        **{one: "; ".join(model.against(one) for model in models) for one in (*PICKED, "30", "80")},
        "gains": f"{small.score('large', 'retrieval')} against {small.score('0', 'retrieval')}",
        "qwen_80": f"{large.lost('80'):.1f}",
        "verdict.curves": judged(all(model.falls_twice() for model in models)),
        "verdict.large": loses("large", NEGLIGIBLE),
        "verdict.small": loses("small", MODEST),
        "verdict.30": loses("30", NEGLIGIBLE),
        "verdict.80": loses("80", MODEST),
        "picked": "\n".join(model.picked() for model in models),
        "first": small.table(),
        "second": large.table(),
        "seeds": str(max(model.seeds for model in models)),
    }
