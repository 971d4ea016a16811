"""The whole range of depth on one table: one teacher cut to fewer and fewer layers, each aligned for equal steps.

    python benchmarks/depth_range.py TEACHER --texts DIR --tasks DIR --steps 5000 -o results/ [--keep 12,9,6,4,3,2,1,0]

0 layers is the static model. Training and scoring run on the device torch finds; texts/s are measured on the CPU, one model
after the other in turns. Texts are the parquet files in --texts; the tasks in --tasks are only measured on, never trained
on nor chosen by. A row that has its result already is not made again, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from trundle.bench import bench
from trundle.data import read_corpus
from trundle.evaluate import Result, evaluate, find_tasks, mean_score
from trundle.model import embedder, load
from trundle.pipeline import compress
from trundle.progress import Silent
from trundle.recipe import parse_recipe

TASKS = "sts/STS12,sts/STS13,sts/STS14,sts/STS15,sts/STS17-en-en,sts/STSBenchmark,retrieval,classification,clustering,pairs"
RESULT = "result.json"


class Lines(Silent):
    """Progress for a log file."""

    def say(self, line: str) -> None:
        """One line with the time."""
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def score(options: argparse.Namespace, model: str, index: str | None = None) -> list[Result]:
    """Each task, and each search also on the index of another model."""
    chosen = find_tasks(options.names.split(","), options.tasks)
    documents = None if index is None else embedder(load(index), name="teacher", half_on_gpu=True)
    return evaluate(embedder(load(model), name=model, half_on_gpu=True), chosen, documents=documents)


def row(options: argparse.Namespace, keep: int) -> dict[str, Any]:
    """Cut, align, score."""
    folder = Path(options.output) / f"keep-{keep}"
    rate = options.static_learning_rate if keep == 0 else options.learning_rate
    align = {"steps": options.steps, "batch_size": options.batch_size, "learning_rate": rate}
    align |= {} if options.sample is None else {"texts": options.sample}
    recipe = parse_recipe(
        json.dumps({"steps": [{"depth": {"keep": keep}}, {"align": align}]}), name=f"keep {keep}"
    )
    sources = [str(file) for file in sorted(Path(options.texts).glob("*.parquet"))]
    began = time.monotonic()
    run = compress(
        options.teacher,
        recipe,
        output=folder / "model",
        corpus=read_corpus(sources, seed=0),
        replace=True,
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


def kept(folder: Path, make: Any) -> dict[str, Any]:
    """The result in a folder, made now if it is not there yet."""
    file = folder / RESULT
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        content = make()
        file.write_text(json.dumps(content, indent=1), encoding="utf-8")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def speeds(options: argparse.Namespace, models: dict[str, str]) -> dict[str, tuple[float, float]]:
    """Texts a second on the CPU, short and long ones."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # for the processes that are measured; this one has its device
    result = bench(
        list(models.values()), rounds=options.rounds, seconds=options.seconds, threads=options.threads
    )
    return {
        name: (figures.short_texts_per_second.value, figures.long_texts_per_second.value)
        for name, figures in zip(models, result.models, strict=True)
    }


def table(rows: dict[str, dict[str, Any]], speed: dict[str, tuple[float, float]]) -> None:
    results = {name: [Result(**score) for score in content["scores"]] for name, content in rows.items()}
    whole = mean_score(results["teacher"])
    search = mean_score([result for result in results["teacher"] if result.kind == "retrieval"])
    print("| layers | parameters | cosine | quality | asymmetric retrieval | texts/s short | texts/s long |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, content in rows.items():
        asymmetric = [result.score for result in results[name] if result.mode == "asymmetric"]
        near = (content.get("fidelity") or {}).get("cosine")
        cells = [
            f"{content['parameters'] / 1e6:.1f}M",
            "" if near is None else f"{near:.4f}",
            f"{mean_score(results[name]) / whole:.1%}",
            f"{sum(asymmetric) / len(asymmetric) / search:.1%}" if asymmetric else "",
            *(f"{rate:,.0f}" for rate in speed[name]),
        ]
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--names", default=TASKS, help="which tasks, names or kinds, with commas between")
    parser.add_argument("--keep", default="12,9,6,4,3,2,1,0")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--static-learning-rate", type=float, default=1e-3)
    parser.add_argument("--sample", type=int, help="use at most this many of the texts")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed measurement")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="how long each speed is measured in a round"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    output = Path(options.output)
    rows = {"teacher": kept(output / "teacher", lambda: teacher_row(options))}
    models = {"teacher": options.teacher}
    for keep in map(int, options.keep.split(",")):
        rows[str(keep)] = kept(output / f"keep-{keep}", lambda keep=keep: row(options, keep))
        models[str(keep)] = str(output / f"keep-{keep}" / "model")
    table(rows, speeds(options, models))


if __name__ == "__main__":
    main()
