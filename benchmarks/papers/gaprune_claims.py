"""GAPrune's main table and retraining in small: what pruned MLPs cost a domain, by method.

    python benchmarks/papers/gaprune_claims.py
    python benchmarks/papers/gaprune_claims.py --add RESULTS [RESULTS…] --model all-MiniLM-L6-v2

Prints the section about this paper. `--add` takes over folders that `benchmarks/weights.py` wrote; the same method, domain
and sparsity are replaced, with all their seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import (
    Claim,
    Evidence,
    Figure,
    Table,
    Verdict,
    add_origin,
    all_above,
    judged,
    markdown,
    merged,
    read_measured,
    write_measured,
)

NAME = "gaprune"
MODEL, LARGER = "all-MiniLM-L6-v2", "all-mpnet-base-v2"
PAPER = {
    "random": ("−59.6 / −68.0", ""),
    "magnitude": ("−3.4 / −4.4", ""),
    "general-fisher": ("−32 / −15", ""),
    "domain-fisher": ("−8.7 / −7.6", ""),
    "gaprune-paper": ("−2.4 / −2.3", "+4.5 / +1.7"),
}
"""Change of finance / chemistry at 50%, one-shot and after 100 steps."""
DOMAINS = ("finance", "chemistry")
ONE_SHOT, AFTER = "one-shot", "after"
WHEN = (ONE_SHOT, AFTER)
DENSE = "dense"
METHODS = (
    DENSE,
    "gaprune",
    "gaprune-paper",
    "wanda",
    "magnitude",
    "domain-fisher",
    "general-fisher",
    "random",
    "neuron",
    "neuron-alone",
)
NAMES = {
    "gaprune": "DAI, β 0 (ours)",
    "gaprune-paper": "DAI, β 1 (the paper's)",
    "neuron": "whole neurons",
    "neuron-alone": "whole neurons, nothing taken over",
}
FEW, HALF, MANY, MOST = 30, 50, 60, 70
SPARSITIES = (FEW, HALF, MANY, MOST)
SWEPT = ("gaprune", "wanda", "magnitude", "neuron", "neuron-alone")
KEY = ("model", "domain", "method", "sparsity", "when", "side")


class Change(Figure):
    """Of a mean score against dense in per cent."""

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {self.spread:.1f}"
        return f"{self.mean:+.1f}{spread}".replace("-", "−")


class Changes:
    """What a model's tests of a domain say, or all others, by method, sparsity and time."""

    def __init__(self, rows: list[dict[str, Any]], model: str, side: str = "domain") -> None:
        self._found = {
            (row["method"], row["sparsity"], row["domain"], row["when"]): Change(
                mean=row["change"], spread=row["spread"], seeds=row["seeds"]
            )
            for row in rows
            if (row["model"], row["side"]) == (model, side)
        }
        self.seeds = max(change.seeds for change in self._found.values())

    def of(self, method: str, sparsity: int, when: str) -> list[Change]:
        """One for each domain; none where it was not measured."""
        level = 0 if method == DENSE else sparsity
        found = [self._found.get((method, level, domain, when)) for domain in DOMAINS]
        return [change for change in found if change is not None]

    def both(self, method: str, sparsity: int, when: str) -> str:
        """Finance / chemistry, each with its spread."""
        return " / ".join(map(str, self.of(method, sparsity, when))) or "–"

    def beats(self, method: str, rival: str, sparsity: int, when: str) -> bool:
        """In both domains, by more than seeds differ."""
        pairs = self.pairs(method, rival, sparsity, when)
        return bool(pairs) and all(one.above(other) for one, other in pairs)

    def pairs(self, method: str, rival: str, sparsity: int, when: str) -> list[tuple[Figure, Figure]]:
        """Two methods side by side, one pair for each domain."""
        return list(zip(self.of(method, sparsity, when), self.of(rival, sparsity, when), strict=True))

    def either(self, method: str, rival: str, sparsity: int, when: str) -> Verdict:
        """Whether a method is better than a rival in both domains, or worse in both."""
        if self.beats(method, rival, sparsity, when):
            return "holds here"
        return "does not hold here" if self.beats(rival, method, sparsity, when) else "can't tell"

    def above_dense(self, method: str, sparsity: int) -> bool:
        """After training, in both domains by more than seeds differ."""
        found = self.of(method, sparsity, AFTER)
        return bool(found) and all(one.interval[0] > 0 for one in found)


def read_results(folders: list[str], model: str) -> list[dict[str, Any]]:
    """Rows of changes of the domain's and the other tasks, over all seeds in the folders."""
    lines = [
        json.loads(line)
        for folder in folders
        for file in sorted(Path(folder).glob("*.jsonl"))
        for line in file.open()
    ]
    dense = {
        (one["domain"], one["seed"]): one
        for one in lines
        if (one["method"], one["when"]) == (DENSE, ONE_SHOT)
    }
    found: dict[tuple[Any, ...], dict[int, float]] = {}
    for one in lines:
        for side in ("domain", "general"):
            before, after = (mean_of(line, side) for line in (dense[one["domain"], one["seed"]], one))
            key = (model, one["domain"], one["method"], one["sparsity"], one["when"], side)
            found.setdefault(key, {})[one["seed"]] = 100 * (after / before - 1)
    return [
        dict(zip(KEY, key, strict=True))
        | {
            "change": round(statistics.fmean(values.values()), 2),
            "spread": round(statistics.stdev(values.values()), 2) if len(values) > 1 else None,
            "seeds": len(values),
        }
        for key, values in found.items()
    ]


def mean_of(line: dict[str, Any], side: str) -> float:
    return statistics.fmean(
        score for task, score in line["scores"].items() if (task in line["of_domain"]) is (side == "domain")
    )


def half_table(found: Changes) -> Table:
    return Table(
        title=f"{MODEL}, half of the MLP weights, change of finance / chemistry against dense in per cent",
        columns=("method", "paper, one-shot", "paper, 100 steps", "here, one-shot", "here, 100 steps"),
        rows=tuple(
            (
                NAMES.get(method, method),
                *(PAPER.get(method, ("", ""))),
                *(found.both(method, HALF, when) for when in WHEN),
            )
            for method in METHODS
        ),
    )


def swept_table(found: Changes, title: str) -> Table:
    """Every sparsity and method that there is something about."""
    sparsities = [one for one in SPARSITIES if any(found.of(method, one, AFTER) for method in SWEPT)]
    return Table(
        title=title,
        columns=("method", "", *(f"{sparsity}%" for sparsity in sparsities)),
        rows=tuple(
            (
                NAMES.get(method, method),
                ONE_SHOT if when == ONE_SHOT else "100 steps",
                *(found.both(method, sparsity, when) for sparsity in sparsities),
            )
            for method in SWEPT
            if any(found.of(method, sparsity, AFTER) for sparsity in sparsities)
            for when in WHEN
        ),
    )


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    found, larger = (Changes(measured["rows"], model) for model in (MODEL, LARGER))
    elsewhere = Changes(measured["rows"], LARGER, "general")
    rivals = ("magnitude", "domain-fisher", "general-fisher", "random")
    best = all_above(pair for rival in rivals for pair in found.pairs("gaprune-paper", rival, HALF, ONE_SHOT))
    above = found.above_dense("gaprune-paper", HALF)
    claims = (
        Claim(
            says="one-shot, DAI loses less than magnitude, Fisher and random pruning",
            theirs="−2.4 / −2.3 against −3.4 / −4.4 of the next best",
            ours=f"{found.both('gaprune-paper', HALF, ONE_SHOT)} against {found.both('magnitude', HALF, ONE_SHOT)}",
            verdict=best,
            remark="with β 0 it does" if found.beats("gaprune", "magnitude", HALF, ONE_SHOT) else "",
        ),
        Claim(
            says="one-shot with 30% gone, the domain gains",
            theirs="+1.4 / +0.0",
            ours=f"with β 0 {found.both('gaprune', FEW, ONE_SHOT)}; {LARGER} {larger.both('gaprune', FEW, ONE_SHOT)}",
            verdict=judged(
                all(one.mean > 0 for side in (found, larger) for one in side.of("gaprune", FEW, ONE_SHOT))
            ),
            remark="nor does it lose anything to speak of",
        ),
        Claim(
            says="at 60 – 65% it is still robust where others collapse",
            theirs="no figures",
            ours=f"60%: with β 0 {found.both('gaprune', MANY, ONE_SHOT)}, magnitude {found.both('magnitude', MANY, ONE_SHOT)}; "
            f"70%: {found.both('gaprune', MOST, ONE_SHOT)}, {found.both('magnitude', MOST, ONE_SHOT)}",
            verdict=all_above(
                pair
                for sparsity in (MANY, MOST)
                for pair in found.pairs("gaprune", "magnitude", sparsity, ONE_SHOT)
            ),
            remark=f"against magnitude; wanda is no worse there: {found.both('wanda', MANY, ONE_SHOT)}, {found.both('wanda', MOST, ONE_SHOT)}",
        ),
        Claim(
            says="after 100 steps the pruned model is better at its domain than the dense one was",
            theirs="+4.5 / +1.7",
            ours=found.both("gaprune-paper", HALF, AFTER),
            verdict=judged(above),
            remark=f"{'and' if above else 'but'} with β 0 {found.both('gaprune', HALF, AFTER)}"
            if found.above_dense("gaprune", HALF)
            else "",
        ),
        Claim(
            says="it is the pruning that helps (not compared in the paper)",
            theirs="",
            ours=f"dense with the same 100 steps: {found.both(DENSE, HALF, AFTER)}",
            verdict=found.either("gaprune", DENSE, HALF, AFTER),
            remark="training helps, pruning takes some of it back",
        ),
        Claim(
            says="DAI loses less than wanda, which needs no gradients (not compared in the paper)",
            theirs="",
            ours=f"wanda {found.both('wanda', HALF, ONE_SHOT)}, then {found.both('wanda', HALF, AFTER)}",
            verdict=found.either("gaprune", "wanda", HALF, ONE_SHOT),
        ),
        Claim(
            says="with 30% of the neurons gone, a model that is really smaller is above dense after 100 steps (ours)",
            theirs="",
            ours=found.both("neuron", FEW, AFTER),
            verdict=judged(found.above_dense("neuron", FEW)),
            remark=f"with 50% too: {found.both('neuron', HALF, AFTER)}"
            if found.above_dense("neuron", HALF)
            else "",
        ),
        Claim(
            says="in deep cuts whole neurons cost a domain no more than as many single weights (ours)",
            theirs="",
            ours=f"after 100 steps at 70%: {found.both('neuron', MOST, AFTER)} against {found.both('gaprune', MOST, AFTER)} of single weights",
            verdict=judged(
                not any(
                    zeros.above(neurons) for neurons, zeros in found.pairs("neuron", "gaprune", MOST, AFTER)
                )
            ),
            remark=f"at 60% {found.both('neuron', MANY, AFTER)} against {found.both('gaprune', MANY, AFTER)}; and only they make the model smaller",
        ),
        Claim(
            says=f"the larger {LARGER}: half of the weights gone, and above dense after 100 steps (β 0; β 1 not measured)",
            theirs="+4.5 / +1.7",
            ours=f"with β 0 {larger.both('gaprune', HALF, AFTER)}, one-shot {larger.both('gaprune', HALF, ONE_SHOT)}",
            verdict=judged(larger.above_dense("gaprune", HALF)),
            remark=f"30% of its neurons: {larger.both('neuron', FEW, AFTER)}"
            if larger.above_dense("neuron", FEW)
            else "",
        ),
        Claim(
            says=f"{LARGER}, 60% gone: DAI loses less than wanda",
            theirs="",
            ours=f"with β 0 {larger.both('gaprune', MANY, ONE_SHOT)} against {larger.both('wanda', MANY, ONE_SHOT)}",
            verdict=larger.either("gaprune", "wanda", MANY, ONE_SHOT),
            remark=f"elsewhere {elsewhere.both('gaprune', MANY, ONE_SHOT)} against {elsewhere.both('wanda', MANY, ONE_SHOT)}",
        ),
    )
    weights = "python benchmarks/weights.py"
    same = "--data . --steps 100 --max-length 128 --samples 2000"
    return Evidence(
        paper="GAPrune: Gradient-Alignment Pruning for Domain-Aware Embeddings",
        method="GAPrune: weights",
        commands=(
            f"{weights} {MODEL} {same} --sparsity 50 -o results",
            f"{weights} {MODEL} {same} --sparsity 30 --methods gaprune,magnitude,wanda,neuron-alone --seeds 0 -o more",
            f"{weights} {MODEL} {same} --sparsity 30 --methods gaprune,wanda --seeds 1,2 -o seeds",
            f"{weights} {MODEL} {same} --sparsity 60,70 --methods gaprune,magnitude,wanda,neuron,neuron-alone -o deep",
            f"{weights} {MODEL} {same} --sparsity 30,50 --methods neuron,neuron-alone -o neurons",
            f"{weights} {LARGER} {same} --sparsity 30,50,60 --methods gaprune,wanda,neuron -o larger",
            f"{weights} {LARGER} {same} --sparsity 70 --methods gaprune,wanda,neuron --seeds 0 -o larger-70",
            f"python benchmarks/papers/gaprune_claims.py --add larger larger-70 --model {LARGER} --hardware … --versions …",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=found.seeds,
        claims=claims,
        tables=(
            half_table(found),
            swept_table(found, f"{MODEL}, finance / chemistry; one seed where no spread is given"),
            swept_table(
                larger,
                f"{LARGER}, finance / chemistry; dense has {larger.both(DENSE, HALF, AFTER)} after the same 100 steps",
            ),
            swept_table(
                elsewhere,
                f"{LARGER}, the general tests of the same models; dense has {elsewhere.both(DENSE, HALF, AFTER)}",
            ),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", nargs="+", metavar="FOLDER")
    parser.add_argument("--model", choices=(MODEL, LARGER), default=MODEL)
    add_origin(parser)
    options = parser.parse_args()
    if options.add:
        measured = read_measured(NAME)
        measured["rows"] = merged(measured["rows"], read_results(options.add, options.model), KEY)
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()
