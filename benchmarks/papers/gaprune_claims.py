"""GAPrune's main table and retraining in small: what half of the MLP weights cost a domain, by method.

    python benchmarks/papers/gaprune_claims.py RESULTS [RESULTS…] --hardware "one H200" --versions torch=2.11.0 transformers=5.17.0

Reads the folders that `benchmarks/weights.py` wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, Verdict, add_origin, markdown

PAPER = {
    "random": ("−59.6 / −68.0", ""),
    "magnitude": ("−3.4 / −4.4", ""),
    "general-fisher": ("−32 / −15", ""),
    "domain-fisher": ("−8.7 / −7.6", ""),
    "gaprune-paper": ("−2.4 / −2.3", "+4.5 / +1.7"),
}
"""Change of finance / chemistry at 50%, one-shot and after 100 steps."""
DOMAINS = ("finance", "chemistry")
WHEN = ("one-shot", "after")
METHODS = (
    "dense",
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
HALF = 50
OTHERS = (30, 60, 70)
SWEPT = ("gaprune", "wanda", "magnitude", "neuron", "neuron-alone")

Changes = dict[tuple[str, str, str], list[float]]


def changes(folders: list[str], sparsity: int = HALF) -> Changes:
    """By method, domain and time: the change of the domain's mean score against dense, one per seed."""
    lines = [
        json.loads(line)
        for folder in folders
        for file in sorted(Path(folder).glob("*.jsonl"))
        for line in file.open()
    ]
    dense = {
        (one["domain"], one["seed"]): score(one)
        for one in lines
        if (one["method"], one["when"]) == ("dense", "one-shot")
    }
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for one in lines:
        if one["method"] == "dense" or one["sparsity"] == sparsity:
            change = 100 * (score(one) / dense[one["domain"], one["seed"]] - 1)
            found.setdefault((one["method"], one["domain"], one["when"]), {})[one["seed"]] = change
    return {key: list(by_seed.values()) for key, by_seed in found.items()}


def score(line: dict[str, Any]) -> float:
    """The mean over the tasks of the domain."""
    return statistics.fmean(line["scores"][task] for task in line["of_domain"])


def both(found: Changes, method: str, when: str) -> str:
    """Finance / chemistry, each with its spread."""
    cells = []
    for domain in DOMAINS:
        values = found.get((method, domain, when), [])
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):+.1f}{spread}" if values else "–")
    return " / ".join(cells).replace("-", "−")


def mean(found: Changes, method: str, domain: str, when: str) -> float:
    return statistics.fmean(found[method, domain, when])


def beats(found: Changes, method: str, rival: str, when: str) -> bool:
    """In both domains, by more than twice the error of the difference."""
    for domain in DOMAINS:
        ours, theirs = found[method, domain, when], found[rival, domain, when]
        error = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
        if statistics.fmean(ours) - statistics.fmean(theirs) <= 2 * error:
            return False
    return True


def either(found: Changes, method: str, rival: str, when: str) -> Verdict:
    """Whether a method is better than a rival in both domains, or worse in both."""
    if beats(found, method, rival, when):
        return "holds here"
    return "does not hold here" if beats(found, rival, method, when) else "can't tell"


def above_dense(found: Changes, method: str) -> Verdict:
    """After training, in both domains by more than twice the error."""
    for domain in DOMAINS:
        values = found.get((method, domain, "after"), [])
        if len(values) < 2:
            return "can't tell"
        if statistics.fmean(values) <= 2 * statistics.stdev(values) / len(values) ** 0.5:
            return "does not hold here"
    return "holds here"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="+")
    add_origin(parser)
    options = parser.parse_args()
    found = changes(options.results)
    rows = tuple(
        (
            NAMES.get(method, method),
            *(PAPER.get(method, ("", ""))),
            *(both(found, method, when) for when in WHEN),
        )
        for method in METHODS
        if (method, DOMAINS[0], "after") in found
    )
    table = Table(
        title="all-MiniLM-L6-v2, half of the MLP weights, change of finance / chemistry against dense in per cent",
        columns=("method", "paper, one-shot", "paper, 100 steps", "here, one-shot", "here, 100 steps"),
        rows=rows,
    )
    swept = {sparsity: changes(options.results, sparsity) for sparsity in (*OTHERS, HALF)}
    sweep = Table(
        title="More and less than half, finance / chemistry; one seed where no spread is given",
        columns=("method", "", *(f"{sparsity}%" for sparsity in sorted(swept))),
        rows=tuple(
            (
                NAMES.get(method, method),
                "one-shot" if when == "one-shot" else "100 steps",
                *(both(swept[sparsity], method, when) for sparsity in sorted(swept)),
            )
            for method in SWEPT
            for when in WHEN
            if (method, DOMAINS[0], when) in found
        ),
    )
    few = swept[min(OTHERS)]
    cut = "neuron" if ("neuron", DOMAINS[0], "after") in few else "neuron-alone"
    rivals = ("magnitude", "domain-fisher", "general-fisher", "random")
    best = all(beats(found, "gaprune-paper", rival, "one-shot") for rival in rivals)
    above = [mean(found, "gaprune-paper", domain, "after") > 0 for domain in DOMAINS]
    ours_above = all(mean(found, "gaprune", domain, "after") > 0 for domain in DOMAINS)
    claims = (
        Claim(
            says="one-shot, DAI loses less than magnitude, Fisher and random pruning",
            theirs="−2.4 / −2.3 against −3.4 / −4.4 of the next best",
            ours=f"{both(found, 'gaprune-paper', 'one-shot')} against {both(found, 'magnitude', 'one-shot')}",
            verdict="holds here" if best else "can't tell",
            remark="with β 0 it does" if beats(found, "gaprune", "magnitude", "one-shot") else "",
        ),
        Claim(
            says="after 100 steps the pruned model is better at its domain than the dense one was",
            theirs="+4.5 / +1.7",
            ours=both(found, "gaprune-paper", "after"),
            verdict="holds here" if all(above) else "does not hold here",
            remark=f"{'but' if not all(above) else 'and'} with β 0 {both(found, 'gaprune', 'after')}"
            if ours_above
            else "",
        ),
        Claim(
            says="it is the pruning that helps (not compared in the paper)",
            theirs="",
            ours=f"dense with the same 100 steps: {both(found, 'dense', 'after')}",
            verdict=either(found, "gaprune", "dense", "after"),
            remark="training helps, pruning takes some of it back",
        ),
        Claim(
            says="DAI loses less than wanda, which needs no gradients (not compared in the paper)",
            theirs="",
            ours=f"wanda {both(found, 'wanda', 'one-shot')}, then {both(found, 'wanda', 'after')}",
            verdict=either(found, "gaprune", "wanda", "one-shot"),
        ),
        Claim(
            says="with 30% of the neurons gone, a model that is really smaller is above dense after 100 steps (ours)",
            theirs="",
            ours=both(few, cut, "after"),
            verdict=above_dense(few, cut),
        ),
    )
    evidence = Evidence(
        paper="GAPrune: Gradient-Alignment Pruning for Domain-Aware Embeddings",
        method="GAPrune: weights",
        commands=(
            "python benchmarks/weights.py all-MiniLM-L6-v2 --data . --steps 100 --max-length 128 --samples 2000 --sparsity 50 -o results",
            "python benchmarks/weights.py all-MiniLM-L6-v2 --data . --steps 100 --max-length 128 --samples 2000 --sparsity 30,60,70 "
            "--methods gaprune,magnitude,wanda,neuron-alone --seeds 0 -o more",
            "python benchmarks/weights.py all-MiniLM-L6-v2 --data . --steps 100 --max-length 128 --samples 2000 --sparsity 30 "
            "--methods gaprune,wanda,neuron-alone --seeds 1,2 -o seeds",
            "python benchmarks/papers/gaprune_claims.py results more seeds --hardware … --versions …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=max(len(values) for values in found.values()),
        claims=claims,
        tables=(table, sweep),
    )
    evidence.keep("gaprune")
    print(markdown(evidence))


if __name__ == "__main__":
    main()
