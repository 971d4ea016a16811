"""What the planner's choice costs: every candidate within a budget trained to the end beside the one a search chooses.

    python benchmarks/regret.py MODEL --budget 8MB --data TEXTS --minutes 6 --texts 100000 --steps 2000 -o results/

A search runs as a user would let it. Every candidate it could have chosen, its own choice too, is cut and trained from the start for
the same --steps on the same --texts, and compared with the model on the same held-out texts. Regret is what the best of them is ahead
of the chosen one. Trained alike, a row does not depend on what else the machine does, so rows may run --at-once on a large GPU; the search
runs alone. The first candidate is there twice: as `first` it asks the model for all vectors, which the others then find. Given again, the
command takes what is missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

from rows import Lines, run_rows
from trundle.data.corpus import Corpus, read_corpus
from trundle.pipeline.compress import compress
from trundle.recipe import parse_recipe
from trundle.records import PLANNING_FILE
from trundle.search.candidates import _GRID
from trundle.search.search import compress_to_budget
from trundle.search.trials import _CPU_PACE, _GPU_PACE

SEARCH, FIRST = "search", "first"


def search(arguments: argparse.Namespace, corpus: Corpus) -> None:
    compress_to_budget(
        arguments.model,
        [arguments.budget],
        output=Path(arguments.output) / SEARCH,
        corpus=corpus,
        minutes=arguments.minutes,
        students=arguments.student,
        progress=Lines(),
    )


def train(arguments: argparse.Namespace, row: str, corpus: Corpus) -> None:
    """One candidate from the start, as the planner trains its winner but for so many steps."""
    listed = read_candidates(arguments.output)
    candidate = listed[0 if row == FIRST else int(row)]
    align = {"steps": 1 if row == FIRST else arguments.steps, "texts": arguments.texts}
    align |= _GPU_PACE if torch.cuda.is_available() else _CPU_PACE
    if candidate["static"]:
        align.pop("learning_rate", None)  # as the planner does
    if candidate["grid"]:
        align["rounding"] = "int4"
    if candidate["base"] != arguments.model or not candidate["steps"]:
        align["teacher"] = arguments.model
    run = compress(
        candidate["base"],
        parse_recipe(json.dumps({"steps": [*candidate["steps"], {"align": align}]}), name=candidate["name"]),
        output=Path(arguments.output) / f"model-{row}",
        corpus=corpus,
        progress=Lines(),
    )
    assert run.fidelity is not None
    found = {"name": candidate["name"], "fidelity": run.fidelity.as_json()} | dict(run.steps[-1].facts)
    (Path(arguments.output) / f"result-{row}.json").write_text(json.dumps(found, indent=1))


def write_candidates(arguments: argparse.Namespace, corpus: Corpus) -> int:
    """All that are within the budget, once for all rows: in the planner's order."""
    planned = compress_to_budget(
        arguments.model,
        [arguments.budget],
        output=None,
        corpus=corpus,
        minutes=arguments.minutes,
        students=arguments.student,
        dry_run=True,
    )
    listed = [
        asdict(each.record())
        | {
            "steps": each.candidate.steps(
                texts=arguments.texts if each.candidate.base == arguments.model else None
            ),
            "grid": each.candidate.precision in _GRID,
            "static": not each.candidate.layers,
        }
        for each in planned.tried
    ]
    Path(arguments.output).mkdir(parents=True, exist_ok=True)
    (Path(arguments.output) / "candidates.json").write_text(json.dumps(listed, indent=1))
    return len(listed)


def read_candidates(output: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(output) / "candidates.json").read_text())
    return found


def key(candidate: Mapping[str, Any]) -> tuple[str, str]:
    return candidate["base"], candidate["name"]


def table(output: str) -> None:
    planning = json.loads((Path(output) / SEARCH / PLANNING_FILE).read_text())
    trials = {key(each): each["rungs"] for each in planning["candidates"]}
    choice = next(key(each) for each in planning["candidates"] if each["outcome"] == "chosen")
    found = []
    for number, candidate in enumerate(read_candidates(output)):
        result = Path(output) / f"result-{number}.json"
        if result.is_file():
            found.append((number, candidate, json.loads(result.read_text())))
    print(
        f"{'guess':>5}  {'candidate':56} {'file':>7}  {'trials':20} {'distance':>8} {'cosine':>7} {'agreement':>9}"
    )
    for number, candidate, result in sorted(found, key=lambda row: row[2]["fidelity"]["distance"]):
        near, name = result["fidelity"], candidate["name"]
        tried = " ".join(f"{rung['distance']:.3f}" for rung in trials.get(key(candidate), []))
        print(
            f"{number + 1:5}  {name + (' (chosen)' if key(candidate) == choice else ''):56} {candidate['bytes'] / 1e6:4.1f} MB  "
            f"{tried:20} {near['distance']:8.4f} {near['cosine']:7.4f} {near['agreement_asymmetric']:9.4f}"
        )
    chosen = next((row[2]["fidelity"] for row in found if key(row[1]) == choice), None)
    if chosen is None:
        raise SystemExit(f"{choice[1]} was chosen and is not trained yet; see its log in {output}")
    all_near = [row[2]["fidelity"] for row in found]
    best = max(near["agreement_asymmetric"] for near in all_near)
    least = min(near["distance"] for near in all_near)
    print(
        f"regret among {len(found)}: {100 * (best - chosen['agreement_asymmetric']):.2f} points of agreement@10, "
        f"{chosen['distance'] - least:.4f} of distance"
    )
    order = spearmanr([row[0] for row in found], [near["distance"] for near in all_near]).statistic
    print(f"the guess and the distance at the end: Spearman {order:.2f}")
    last = {key(row[1]): row[2]["fidelity"]["distance"] for row in found}
    first = [(rungs[0]["distance"], last[one]) for one, rungs in trials.items() if rungs and one in last]
    if len(first) > 2:
        order = spearmanr([trial for trial, _ in first], [end for _, end in first]).statistic
        print(f"the first trial's distance and that at the end, {len(first)} tried: Spearman {order:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--student", action="append", default=[])
    parser.add_argument("--data", required=True)
    parser.add_argument("--minutes", type=float, default=6.0, help="for the search")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", help="this one row in this process")
    parser.add_argument("--table", action="store_true", help="print what there is")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    corpus = read_corpus([arguments.data], seed=0)
    if arguments.table:
        table(arguments.output)
    elif arguments.only == SEARCH:
        search(arguments, corpus)
    elif arguments.only:
        train(arguments, arguments.only, corpus)
    else:
        rows = [str(number) for number in range(write_candidates(arguments, corpus))]
        done = {row for row in (FIRST, *rows) if (Path(arguments.output) / f"result-{row}.json").is_file()}
        if (Path(arguments.output) / SEARCH / PLANNING_FILE).is_file():
            done.add(SEARCH)
        for alone in (FIRST, SEARCH):
            run_rows({} if alone in done else {alone: alone}, arguments.output, at_once=1)
        missing = {row: row for row in rows if row not in done}
        run_rows(missing, arguments.output, at_once=arguments.at_once)
        table(arguments.output)


if __name__ == "__main__":
    main()
