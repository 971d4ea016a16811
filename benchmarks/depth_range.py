"""The whole range of depth on one table: one teacher cut to fewer and fewer layers, each aligned for equal steps.

    python benchmarks/depth_range.py TEACHER --texts DIR --tasks DIR --steps 5000 -o results/ [--keep 12,9,6,4,3,2,1,0]
    python benchmarks/depth_range.py TEACHER --speeds -o results/

0 layers is the static model. The first command trains and scores on the device torch finds, --at-once rows at a time after
one that asks the teacher for all vectors; the second measures texts/s on this machine's CPU, of cuts with no training, since
speed is a matter of shape alone. Either prints the table of what is there. Texts are the parquet files in --texts; the tasks
in --tasks are only measured on, never trained on nor chosen by.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import ENGLISH_STS, Lines, run_rows
from trundle.bench.rounds import BenchOptions, bench
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import Result, _mean_score, _share_of_teacher, evaluate, find_tasks
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.recipe import parse_recipe

TASKS = ",".join(
    [*(f"sts/{name}" for name in ENGLISH_STS), "retrieval", "classification", "clustering", "pairs"]
)
TEACHER = "teacher"
RESULT, SPEEDS = "result.json", "speeds.json"


def score(options: argparse.Namespace, model: str, index: str | None = None) -> list[Result]:
    """Each task, and each search also on the index of another model."""
    chosen = find_tasks(options.names.split(","), options.tasks)
    documents = None if index is None else embedder(load(index), name="teacher", half_on_gpu=True)
    return evaluate(embedder(load(model), name=model, half_on_gpu=True), chosen, documents=documents)


def row(options: argparse.Namespace, keep: int) -> dict[str, Any]:
    """Cut, align, score."""
    folder = Path(options.output) / str(keep)
    rate = options.static_learning_rate if keep == 0 else options.learning_rate
    align = {"steps": options.steps, "batch_size": options.batch_size, "learning_rate": rate}
    align |= {"warmup": options.warmup, "augment": options.augment, "texts": options.sample}
    recipe = parse_recipe(
        json.dumps({"steps": [{"depth": {"keep": keep, "order": options.order}}, {"align": align}]}),
        name=f"keep {keep}",
    )
    sources = [str(file) for file in sorted(Path(options.texts).glob("*.parquet"))]
    began = time.monotonic()
    run = compress(
        options.teacher,
        recipe,
        output=folder / "model",
        corpus=read_corpus(sources, seed=0),
        progress=Lines(),
    )
    seconds = time.monotonic() - began
    scores = score(options, str(folder / "model"), index=options.teacher)
    return {
        "parameters": run.after.parameters,
        "bytes": run.after.file_bytes,
        "align": align,
        "facts": dict(run.steps[-1].facts),
        "fidelity": None if run.fidelity is None else run.fidelity.as_json(),
        "seconds": round(seconds, 1),
        "scores": [result.as_json() for result in scores],
    }


def teacher_row(options: argparse.Namespace) -> dict[str, Any]:
    size = sum(weight.numel() for weight in load(options.teacher).parameters())
    return {"parameters": size, "scores": [result.as_json() for result in score(options, options.teacher)]}


def build(options: argparse.Namespace, name: str) -> None:
    folder = Path(options.output) / name
    folder.mkdir(parents=True)
    content = teacher_row(options) if name == TEACHER else row(options, int(name))
    (folder / RESULT).write_text(json.dumps(content, indent=1), encoding="utf-8")


def measure_speeds(options: argparse.Namespace) -> None:
    """Texts a second on the CPU, short and long ones, all models in turns."""
    with tempfile.TemporaryDirectory() as scratch:
        models = {TEACHER: options.teacher}
        for keep in options.keep.split(","):
            recipe = parse_recipe(json.dumps({"steps": [{"depth": {"keep": int(keep)}}]}), name=keep)
            compress(options.teacher, recipe, output=Path(scratch) / keep)
            models[keep] = str(Path(scratch) / keep)
        found = bench(
            list(models.values()),
            options=BenchOptions(rounds=options.rounds, seconds=options.seconds, threads=options.threads),
        )
    speeds = {
        name: (figures.short_texts_per_second.value, figures.long_texts_per_second.value)
        for name, figures in zip(models, found.models, strict=True)
    }
    Path(options.output).mkdir(parents=True, exist_ok=True)
    (Path(options.output) / SPEEDS).write_text(json.dumps(speeds, indent=1), encoding="utf-8")


def table(output: Path) -> None:
    rows = {file.parent.name: json.loads(file.read_text()) for file in output.glob(f"*/{RESULT}")}
    speeds = json.loads((output / SPEEDS).read_text()) if (output / SPEEDS).is_file() else {}
    results = {name: [Result(**score) for score in content["scores"]] for name, content in rows.items()}
    whole = results.get(TEACHER, [])
    search = [result for result in whole if result.kind == "retrieval"]
    print("| layers | parameters | cosine | quality | asymmetric retrieval | texts/s short | texts/s long |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    names = {TEACHER, *rows, *speeds}
    for name in sorted(names, key=lambda name: -float(name) if name != TEACHER else -1e9):
        content = rows.get(name, {})
        asymmetric = [result for result in results.get(name, []) if result.mode == "asymmetric"]
        near = (content.get("fidelity") or {}).get("cosine")
        known = bool(whole and results.get(name))
        cells = [
            f"{content['parameters'] / 1e6:.1f}M" if content else "",
            "" if near is None else f"{near:.4f}",
            f"{_share_of_teacher(results[name], whole):.1%}" if known else "",
            f"{_mean_score(asymmetric, 'asymmetric') / _mean_score(search):.1%}"
            if asymmetric and search
            else "",
            *(f"{rate:,.0f}" for rate in speeds.get(name, ())),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--texts")
    parser.add_argument("--tasks")
    parser.add_argument("--names", default=TASKS, help="which tasks, names or kinds, with commas between")
    parser.add_argument("--order", choices=("auto", "first", "spread"), default="auto", help="which layers")
    parser.add_argument("--keep", default="12,9,6,4,3,2,1,0")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--static-learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--augment", default="")
    parser.add_argument("--sample", type=int, help="use at most this many of the texts")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", help="make this one row in this process")
    parser.add_argument("--speeds", action="store_true", help="only measure the speeds on this machine")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed measurement")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long each speed is measured in a round"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    if options.only:
        build(options, options.only)
        return
    if options.speeds:
        measure_speeds(options)
    elif options.texts and options.tasks:
        first, *others = options.keep.split(",")
        run_rows({TEACHER: TEACHER, first: first}, options.output, at_once=1)
        run_rows({name: name for name in others}, options.output, at_once=options.at_once)
    else:
        parser.error("say --texts and --tasks to train and score, or --speeds")
    table(Path(options.output))


if __name__ == "__main__":
    main()
