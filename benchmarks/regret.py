"""What the planner's choice costs: the candidate it chose beside others that were trained as long.

    python benchmarks/regret.py MODEL --budget 8MB --data TEXTS --minutes 6 --others 4 -o results/

The planner searches as a user would let it. Then others of its candidates, those it tried first, are trained from the start for as long as the
chosen one was in all its rounds, on the same texts. Regret is what the best of them is ahead in agreement@10 on held-out texts,
searching the original's index.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rows import Lines
from trundle.artifact import read_lineage
from trundle.data import read_corpus
from trundle.planner.outcome import Tried
from trundle.planner.search import compress_to_budget
from trundle.planner.trials import Trials
from trundle.runs import Run


def line(name: str, size: int, steps: int, run: Run | None) -> str:
    assert run is not None
    assert run.fidelity is not None
    near = run.fidelity
    return (
        f"{name:48} {size / 1e6:6.1f} MB {steps:7,} {near.distance:8.4f} {near.cosine:7.4f} "
        f"{near.agreement_asymmetric:9.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--others", type=int, default=4)
    parser.add_argument("-o", "--output", required=True, type=Path)
    options = parser.parse_args()
    corpus, progress = read_corpus([options.data], seed=0), Lines()
    outcome = compress_to_budget(
        options.model,
        [options.budget],
        output=options.output / "chosen",
        corpus=corpus,
        minutes=options.minutes,
        progress=progress,
    )
    last = (read_lineage(options.output / "chosen") or {})["steps"][-1]
    learned = last["options"]
    seconds = sum(outcome.chosen.seconds) + 60 * learned["minutes"]
    steps = sum(outcome.chosen.steps) + last["facts"]["steps"]
    trials = Trials(
        source=options.model,
        corpus=corpus,
        texts=learned["texts"],
        work=options.output,
        seed=0,
        trust_remote_code=False,
        progress=progress,
    )
    chosen = outcome.chosen.candidate
    lines = [line(f"{chosen.name} (chosen)", chosen.bytes, steps, outcome.run)]
    agreements = [outcome.run.fidelity.agreement_asymmetric] if outcome.run and outcome.run.fidelity else []
    others: list[Tried] = [each for each in outcome.tried if each.candidate != chosen]
    for number, other in enumerate(others[: options.others], start=1):
        fresh = replace(other, distances=(), seconds=(), steps=())
        place = options.output / f"other-{number}"
        run = trials.finish(fresh, seconds, place, replace_output=False, pair=False)
        made = (read_lineage(place) or {})["steps"][-1]["facts"]["steps"]
        lines.append(line(other.candidate.name, other.candidate.bytes, made, run))
        if run.fidelity is not None:
            agreements.append(run.fidelity.agreement_asymmetric)
    print(f"{'candidate':48} {'file':>9} {'steps':>7} {'distance':>8} {'cosine':>7} {'agreement':>9}")
    print("\n".join(lines))
    print(f"each trained for {seconds:.0f} s; regret in agreement@10: {max(agreements) - agreements[0]:.4f}")


if __name__ == "__main__":
    main()
