"""Students of one teacher, trained on the same texts for the same steps or time: the figures of `align`.

    python benchmarks/leaf.py TEACHER --texts DIR --tasks DIR --steps 20000 -o results/ \
        first-3=folder-of-a-student backbone=another:batch_size=512:learning_rate=5e-4

A row is a name, the folder of a model, and options of `align` for this row alone. How such folders are made:

    trundle depth TEACHER --keep 3 -o folder-of-a-student

The first row to run is `ridge`, the closed-form start of the first student: it asks the teacher for all vectors, which
every other row then finds. Texts are the parquet files in --texts; the tasks in --tasks are only measured on, never
trained on nor chosen by. Rows run one after the other, or several --at-once on a large GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from rows import ENGLISH_STS, Lines, run_rows
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import Result, _mean_score, _share_of_teacher, evaluate, find_tasks
from trundle.methods import METHODS
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.recipe import single

KINDS = ("retrieval", "classification", "clustering", "pairs")
TEACHER = "teacher"


def parse_row(row: str) -> tuple[str, str, dict[str, Any]]:
    """'name=folder:option=value' as its parts."""
    head, *settings = row.split(":")
    name, _, folder = head.partition("=")
    pairs = (setting.partition("=")[::2] for setting in settings)
    return name, folder, {key: _value(value) for key, value in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def train_row(arguments: argparse.Namespace, row: str) -> None:
    name, start, own = parse_row(row)
    folder = Path(arguments.output) / name
    folder.mkdir(parents=True)
    shared = {"teacher": arguments.teacher, "steps": arguments.steps, "minutes": arguments.minutes}
    shared |= {"augment": arguments.augment, "batch_size": arguments.batch_size, "texts": arguments.sample}
    sources = [str(file) for file in sorted(Path(arguments.texts).glob("*.parquet"))]
    began = time.time()
    run = compress(
        start,
        single(METHODS["align"], shared | own),
        output=folder / "model",
        corpus=read_corpus(sources, seed=0),
        progress=Lines(),
    )
    content = {
        "row": row,
        "options": shared | own,
        "parameters": run.after.parameters,
        "facts": dict(run.steps[-1].facts),
        "texts_per_second": speed(folder / "model" / "align.jsonl"),
        "fidelity": run.fidelity.as_json() if run.fidelity else None,
        "seconds": time.time() - began,
    }
    write(folder, content)
    if arguments.scores:
        index = embedder(load(arguments.teacher), name=TEACHER, half_on_gpu=True)
        content["scores"] = score(arguments, str(folder / "model"), index)
        write(folder, content)


def speed(metrics: Path) -> float | None:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []
    found = [line["texts_per_second"] for line in lines if line["texts_per_second"]]
    return statistics.median(found) if found else None


def score(arguments: argparse.Namespace, model: str, index: Any = None) -> list[dict[str, Any]]:
    names = [f"sts/{name}" for name in ENGLISH_STS]
    names += [kind for kind in KINDS if (Path(arguments.tasks) / kind).is_dir()]
    opened = embedder(load(model), name=model, half_on_gpu=True)
    chosen = find_tasks(names, arguments.tasks)
    return [result.as_json() for result in evaluate(opened, chosen, documents=index)]


def score_alone(arguments: argparse.Namespace, name: str, model: str) -> None:
    """A model as it is, in its own space."""
    size = sum(weight.numel() for weight in load(model).parameters())
    folder = Path(arguments.output) / name
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, {"row": name, "parameters": size, "scores": score(arguments, model)})


def write(folder: Path, content: dict[str, Any]) -> None:
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def table(output: str) -> None:
    found = {
        file.parent.name: json.loads(file.read_text()) for file in sorted(Path(output).glob("*/result.json"))
    }
    scores = {name: [Result(**one) for one in content.get("scores", [])] for name, content in found.items()}
    whole = scores.get(TEACHER, [])
    searches = [result for result in whole if result.kind == "retrieval"]
    heads = ("params", "steps", "val ℓ2", "cosine", "agree@10", "std %", "asym %", "texts/s")
    print(f"{'student':30} " + " ".join(f"{head:>8}" for head in heads))
    for name, content in found.items():
        facts, near, results = content.get("facts", {}), content.get("fidelity") or {}, scores[name]
        asymmetric = [result for result in results if result.mode == "asymmetric"]
        cells = [
            f"{content['parameters'] / 1e6:.1f}",
            str(facts.get("steps", "")),
            _figure(facts.get("validation"), 4),
            _figure(near.get("cosine"), 4),
            _figure(near.get("agreement_asymmetric"), 3),
            _figure(100 * _share_of_teacher(results, whole) if results and whole else None, 2),
            _figure(
                100 * _mean_score(asymmetric, "asymmetric") / _mean_score(searches) if asymmetric else None, 2
            ),
            _figure(content.get("texts_per_second"), 0),
        ]
        print(f"{name:30} " + " ".join(f"{cell:>8}" for cell in cells))


def _figure(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def run_all(arguments: argparse.Namespace) -> None:
    """The row that labels comes first and alone; the others share the machine as they are allowed to."""
    first = parse_row(arguments.rows[0])[1]
    run_rows({"ridge": f"ridge={first}:steps=1:minutes=null"}, arguments.output, at_once=1)
    whole = [f"{TEACHER}={arguments.teacher}"] if arguments.scores else []
    rows = {parse_row(row)[0]: row for row in (*whole, *arguments.rows)}
    run_rows(rows, arguments.output, at_once=arguments.at_once)
    table(arguments.output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--augment", default="")
    parser.add_argument("--sample", type=int, help="use at most this many of the texts")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--no-scores", dest="scores", action="store_false", help="train only")
    parser.add_argument("--as-they-are", nargs="*", default=[], help="models to score in their own space")
    parser.add_argument("--only", help="this one row in this process")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    if arguments.only and parse_row(arguments.only)[0] == TEACHER:
        score_alone(arguments, TEACHER, arguments.teacher)
        for model in arguments.as_they_are:
            score_alone(arguments, Path(model).name, model)
    elif arguments.only:
        train_row(arguments, arguments.only)
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
