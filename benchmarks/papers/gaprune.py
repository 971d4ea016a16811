"""GAPrune: what pruned MLPs cost a domain, by method and sparsity, with and without training."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from evidence import Claim, Figure, Figures, Gap, Row, figure, gap, merge, table

MODEL, LARGER = "all-MiniLM-L6-v2", "all-mpnet-base-v2"
DOMAINS = ("finance", "chemistry")
ONE_SHOT, AFTER, DENSE = "one-shot", "after", "dense"
OURS, PAPER, RAW, NEURONS = "gaprune", "gaprune-paper", "gaprune-raw", "neuron"
ALONE = "-alpha-0"
"""Ends the name of a score without the alignment of gradients."""
KEY = ("model", "domain", "method", "sparsity", "when")


def mean_of(line: Row) -> float:
    """Return the mean score over the tasks of the domain."""
    return statistics.fmean(line["scores"][task] for task in line["of_domain"])


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
    samples: dict[tuple[object, ...], int] = {}
    for one in lines:
        before = dense[one["model"], one["domain"], one["seed"]]
        key = tuple(one[name] for name in KEY)
        found.setdefault(key, {})[one["seed"]] = 100 * (mean_of(one) / mean_of(before) - 1)
        samples[key] = one["samples"]
    rows = []
    for key, seeds in found.items():
        spread = round(statistics.stdev(seeds.values()), 2) if len(seeds) > 1 else None
        row: Row = {"change": round(statistics.fmean(seeds.values()), 2), "spread": spread}
        row |= {"seeds": len(seeds), "samples": samples[key]}
        row["by_seed"] = {str(seed): round(change, 2) for seed, change in sorted(seeds.items())}
        rows.append(dict(zip(KEY, key, strict=True)) | row)
    return rows


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add the folders in `rows=FOLDER,FOLDER`; the same method, domain and sparsity are replaced."""
    if what != "rows":
        raise SystemExit(f"gaprune takes rows, not {what}")
    rows = changes(place.split(","))
    merge(figures["rows"], [row | ({"model": options.model} if options.model else {}) for row in rows], KEY)


class Changes:
    """The changes of a model's scores by method, sparsity and time."""

    def __init__(self, rows: list[Row], model: str) -> None:
        self._rows = {
            (row["method"], row["sparsity"], row["domain"], row["when"]): row
            for row in rows
            if row["model"] == model
        }

    def of(self, method: str, sparsity: int, when: str) -> list[Figure]:
        """Return one change per domain, or none where it was not measured."""
        level = 0 if method == DENSE else sparsity
        found = (self._rows.get((method, level, domain, when)) for domain in DOMAINS)
        return [Figure(mean=row["change"], spread=row["spread"], seeds=row["seeds"]) for row in found if row]

    def both(self, method: str, sparsity: int, when: str) -> str:
        """Show finance / chemistry."""
        return " / ".join(one.change for one in self.of(method, sparsity, when)) or "–"

    def gaps(self, method: str, rivals: Sequence[str], sparsity: int, when: str) -> list[Gap]:
        """Return the differences to rivals in each domain."""
        return [
            gap(one, other, f"{rival}, {domain}:")
            for rival in rivals
            for domain, one, other in zip(
                DOMAINS, self.of(method, sparsity, when), self.of(rival, sparsity, when), strict=True
            )
        ]

    def paired(self, method: str, other: str, sparsity: int, when: str) -> list[Gap]:
        """Return the differences within each seed, in each domain; none if either was not measured.

        Both methods of a seed score the same gradients, and see the same tuples in training.
        """
        found = []
        for domain in DOMAINS:
            rows = [self._rows.get((name, sparsity, domain, when), {}) for name in (method, other)]
            runs = [row.get("by_seed", {}) for row in rows]
            both = [runs[0][seed] - runs[1][seed] for seed in runs[0] if seed in runs[1]]
            if both:
                found.append(gap(figure(both), 0.0, f"{domain}, {when}:"))
        return found

    def above_dense(self, method: str, sparsity: int, when: str) -> list[Gap]:
        """Return the changes against the dense model before training."""
        return [
            gap(one, 0.0, f"{domain}:")
            for domain, one in zip(DOMAINS, self.of(method, sparsity, when), strict=True)
        ]


def claims(figures: Figures) -> list[Claim]:
    """Return the rows of the paper's table."""
    small, large = (Changes(figures["rows"], model) for model in (MODEL, LARGER))
    mini, fewer = (f"MiniLM 23M; {count} samples, 100 steps of 64" for count in ("5,000", "2,000"))
    base = "all-mpnet-base-v2 109M; 2,000 samples, 100 steps of 64"
    rivals = ("magnitude", "domain-fisher", "general-fisher", "random")
    deep = [one for level in (60, 70) for one in small.gaps(OURS, ["magnitude"], level, ONE_SHOT)]

    def claim(
        says: str, here: str, gaps: list[Gap], paper: str = "–", *, scale: str = mini, command: str = "A"
    ) -> Claim:
        return Claim(says=says, paper=paper, here=here, scale=scale, gaps=gaps, command=command)

    return [
        claim(
            "one-shot at 50%, DAI loses less than magnitude, Fisher and random",
            f"raw F, β 1 {small.both(RAW, 50, ONE_SHOT)}, magnitude {small.both('magnitude', 50, ONE_SHOT)}",
            small.gaps(RAW, rivals, 50, ONE_SHOT),
            "−2.4 / −2.3 against −3.4 / −4.4",
        ),
        claim(
            "the same with β 0 (ours)",
            f"{small.both(OURS, 50, ONE_SHOT)}",
            small.gaps(OURS, rivals, 50, ONE_SHOT),
        ),
        claim(
            "one-shot at 30%, the domain gains (β 0)",
            small.both(OURS, 30, ONE_SHOT),
            small.above_dense(OURS, 30, ONE_SHOT),
            "+1.4 / +0.0",
            scale=fewer,
            command="B",
        ),
        claim(
            "at 60 – 70% DAI loses less than magnitude (β 0)",
            f"60%: {small.both(OURS, 60, ONE_SHOT)}, magnitude {small.both('magnitude', 60, ONE_SHOT)}; 70%: "
            f"{small.both(OURS, 70, ONE_SHOT)}, {small.both('magnitude', 70, ONE_SHOT)}",
            deep,
            "no figures",
            scale=fewer,
            command="B",
        ),
        claim(
            "after 100 steps the pruned model is above the dense one before them",
            f"raw F, β 1 {small.both(RAW, 50, AFTER)}",
            small.above_dense(RAW, 50, AFTER),
            "+4.5 / +1.7",
        ),
        claim(
            "the pruning itself helps: above dense with the same 100 steps (β 0)",
            f"{small.both(OURS, 50, AFTER)}, dense {small.both(DENSE, 50, AFTER)}",
            small.gaps(OURS, [DENSE], 50, AFTER),
            "not compared",
        ),
        claim(
            "one-shot at 50%, DAI loses less than Wanda (β 0)",
            f"{small.both(OURS, 50, ONE_SHOT)}, Wanda {small.both('wanda', 50, ONE_SHOT)}",
            small.gaps(OURS, ["wanda"], 50, ONE_SHOT),
            "not compared",
        ),
        claim(
            "the same on a larger model at 60%",
            f"{large.both(OURS, 60, ONE_SHOT)}, Wanda {large.both('wanda', 60, ONE_SHOT)}",
            large.gaps(OURS, ["wanda"], 60, ONE_SHOT),
            "not compared",
            scale=base,
            command="C",
        ),
        claim(
            "without 30% of the neurons, trained for 100 steps, it is above dense before them (ours)",
            small.both(NEURONS, 30, AFTER),
            small.above_dense(NEURONS, 30, AFTER),
            scale=fewer,
            command="B",
        ),
        claim(
            "a larger model with half of the weights zero is above dense before training (β 0)",
            large.both(OURS, 50, AFTER),
            large.above_dense(OURS, 50, AFTER),
            "+4.5 / +1.7",
            scale=base,
            command="C",
        ),
        *(
            claim(
                f"alignment matters: α 0.2 is better than α 0 ({way})",
                _with_and_without(small, method),
                [one for when in (ONE_SHOT, AFTER) for one in small.paired(method, method + ALONE, 50, when)],
                "not compared",
            )
            for method, way in ((OURS, "β 0"), (PAPER, "β 1"), (RAW, "raw F, β 1"))
        ),
    ]


def _with_and_without(found: Changes, method: str) -> str:
    return "; ".join(
        f"{when}: {found.both(method, 50, when)} against {found.both(method + ALONE, 50, when)}"
        for when in (ONE_SHOT, AFTER)
    )


def tables(figures: Figures) -> dict[str, str]:
    """Compute the placeholders of the section besides the claims."""
    small, large = (Changes(figures["rows"], model) for model in (MODEL, LARGER))
    rows = [
        " | ".join(
            [
                row["label"],
                row["paper_one_shot"],
                row["paper_after"],
                *(small.both(row["method"], 50, when) for when in (ONE_SHOT, AFTER)),
                *(large.both(row["method"], 50, when) for when in (ONE_SHOT, AFTER)),
            ]
        )
        for row in figures["methods"]
        if small.of(row["method"], 50, ONE_SHOT)
    ]
    columns = "method | paper, one-shot | paper, 100 steps | MiniLM, one-shot | MiniLM, 100 steps"
    return {"half": table(f"{columns} | mpnet, one-shot | mpnet, 100 steps", rows)}
