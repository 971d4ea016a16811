"""How many layers of a decoder are worth keeping: every level of pruning, healed for the same steps (L³Prune).

    python benchmarks/l3prune.py MODEL --triplets DIR --tasks DIR --steps 1000 -o results/ [--levels 0,10,50,small,large]

A level is a share of the layers to drop in percent, or `small` and `large`, which the layer-loss curve picks. Each level
is cut, healed by `contrast` and scored in a process of its own, `--parallel` of them at a time. The table has the shape of
the paper's figure 5 and table 1: layers, parameters, STS and retrieval, each also as a share of the uncut model's.
The tasks are only measured on, never trained on nor chosen by.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import ENGLISH_STS, Lines, run_rows
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import Result, _mean_score, evaluate, find_tasks
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.recipe import parse_recipe

PICKED = ("small", "large")


def build(arguments: argparse.Namespace, level: str) -> None:
    folder = Path(arguments.output) / level
    folder.mkdir(parents=True)
    cut = {"pick": level} if level in PICKED else {"fraction": f"{level}%"}
    heal: dict[str, Any] = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    heal |= {
        "warmup": arguments.warmup,
        "mini_batch": arguments.mini_batch,
        "max_length": arguments.max_length,
    }
    heal |= json.loads(arguments.options)
    steps = [{"depth": cut}, *([{"contrast": heal}] if arguments.steps else [])]
    sources = [str(file) for file in sorted(Path(arguments.triplets).glob("*.parquet"))]
    # How near a result is to a decoder that is no embedder yet says nothing, so no texts are kept for that.
    corpus = replace(read_corpus(sources, seed=0), held_out=lambda: iter(()))
    began = time.time()
    run = run_recipe(
        Request(
            source=arguments.model,
            output=folder / "model",
            corpus=corpus,
            seed=arguments.seed,
            progress=Lines(),
        ),
        parse_recipe(json.dumps({"steps": steps}), name=level),
    )
    healed = time.time() - began
    chosen = find_tasks(arguments.names.split(","), arguments.tasks)
    scores = evaluate(embedder(load(folder / "model"), name=level, half_on_gpu=True), chosen)
    content = {
        "level": level,
        "layers": run.after.layers,
        "parameters": run.after.parameters,
        "facts": dict(run.steps[-1].facts),
        "says": [step.says for step in run.steps],
        "seconds": healed,
        "scores": [result.as_json() for result in scores],
    }
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def table(output: str) -> None:
    found = [json.loads(file.read_text()) for file in Path(output).glob("*/result.json")]
    found.sort(key=lambda content: (content["level"] in PICKED, -content["layers"]))
    if not found:
        print("no level came to an end; see the logs")
        return
    rows = [(content, scores(content, "sts"), scores(content, "retrieval")) for content in found]
    full = next((row[1:] for row in rows if row[0]["level"] == "0"), (float("nan"), float("nan")))
    columns = ("pruned", "layers", "params", "STS", "% of full", "retrieval", "% of full", "val. loss")
    print("  ".join(f"{column:>9}" for column in columns))
    for content, sts, retrieval in rows:
        level = content["level"] if content["level"] in PICKED else f"{content['level']}%"
        cells = [
            level,
            str(content["layers"]),
            f"{content['parameters'] / 1e6:.1f}M",
            f"{sts:.4f}",
            f"{100 * sts / full[0]:.1f}",
            f"{retrieval:.4f}",
            f"{100 * retrieval / full[1]:.1f}",
            f"{content['facts'].get('validation') or float('nan'):.4f}",
        ]
        print("  ".join(f"{cell:>9}" for cell in cells))


def scores(content: dict[str, Any], kind: str) -> float:
    chosen = [Result(**score) for score in content["scores"] if score["kind"] == kind]
    return _mean_score(chosen) if chosen else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--triplets", required=True, help="folder of .parquet with query, positive, negative")
    parser.add_argument("--tasks", required=True)
    names = ",".join([*(f"sts/{name}" for name in ENGLISH_STS), "retrieval"])
    parser.add_argument("--names", default=names, help="which tasks; default: English STS and all retrieval")
    parser.add_argument("--levels", default="0,10,20,30,40,50,60,70,80,90")
    parser.add_argument("--steps", type=int, default=1000, help="0: only cut and score")
    parser.add_argument("--warmup", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--mini-batch", type=int)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help="more options of contrast, as JSON")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only", help="build this one level in this process")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    if arguments.only:
        build(arguments, arguments.only)
        return
    run_rows(
        {level: level for level in arguments.levels.split(",")}, arguments.output, at_once=arguments.parallel
    )
    table(arguments.output)


if __name__ == "__main__":
    main()
