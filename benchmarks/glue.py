"""The vocabulary paper's first table in small: a model fine-tuned for each task after each way of losing parameters.

    python benchmarks/glue.py MODEL --data DIR -o glue/                          # the whole table, on a GPU
    python benchmarks/glue.py MODEL --data DIR -o glue/ --tasks CoLA --rows 2000 --epochs 2 --precision bf16
    python benchmarks/glue.py MODEL --data DIR -o glue/ --seeds 0 1 2 --at-once 4

DIR holds the tasks (classification/, pairs/, sts/). Tokens are chosen by, and models trained on, rows of the split
`train`; nothing is chosen by any other row, and the last weights are measured on `test`, or on `dev` where there is no
test. STSBenchmark is a task like the others, but only where it is named: its training rows are in other STS test sets,
so know that you may train on them. The vocabulary loses the asked share of all parameters, and the other methods lose
as many inside the layers. Each cell of the table leaves a .json in the output folder; one that is there already is not
made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer

from encoder_baselines import BASELINES
from rows import Lines, run_rows
from trundle.data.corpus import Corpus
from trundle.data.examples import LabelledRow
from trundle.data.sampling import sample
from trundle.data.texts import Text
from trundle.methods import METHODS
from trundle.methods.contract import Context
from trundle.methods.finetune.finetune import _measures_of, _trained
from trundle.model.load import load
from trundle.recipe import _make_options


@dataclass(frozen=True, kw_only=True)
class GlueTask:
    """Where a task's rows are, and what it is measured by."""

    file: str
    split: str
    measure: str
    label: str = "label"


TASKS = {
    "SST2": GlueTask(file="classification/SST2.parquet", split="test", measure="accuracy"),
    "CoLA": GlueTask(file="classification/CoLA.parquet", split="test", measure="matthews"),
    "MRPC": GlueTask(file="pairs/MRPC.parquet", split="test", measure="accuracy"),
    "RTE": GlueTask(file="pairs/RTE.parquet", split="dev", measure="accuracy"),
    "STSBenchmark": GlueTask(file="sts/STSBenchmark.parquet", split="test", measure="pearson", label="score"),
}
UNASKED = ("SST2", "CoLA", "MRPC", "RTE")
VOCABULARIES: dict[str, dict[str, Any]] = {
    "random": {"score": "random", "oov": "unk"},
    "frequency": {"score": "frequency", "oov": "unk"},
    "tfidf": {"score": "tfidf", "oov": "unk"},
    "tfidf+cluster": {"score": "tfidf", "oov": "cluster"},
    "decompose": {"score": "tfidf", "oov": "decompose"},
}
FULL = "full"
ROWS = (FULL, *VOCABULARIES, *BASELINES)


def read_split(task: GlueTask, data: Path, split: str) -> list[LabelledRow]:
    rows = pq.read_table(data / task.file, filters=[("split", "=", split)]).to_pylist()
    columns = ("sentence1", "sentence2") if "sentence1" in rows[0] else ("text",)
    return [
        LabelledRow(texts=tuple(row[column] for column in columns), label=row[task.label]) for row in rows
    ]


def corpus_of(rows: list[LabelledRow]) -> Corpus:
    """All rows to learn from, none to choose by."""

    def texts() -> Iterator[Text]:
        return (Text(text=text) for row in rows for text in row.texts)

    return Corpus(
        train=texts,
        validation=lambda: iter(()),
        held_out=lambda: iter(()),
        labelled=lambda part: iter(rows if part == "train" else ()),
        facts=lambda: (),
    )


def shrink(
    model: SentenceTransformer, method: str, arguments: argparse.Namespace, context: Context
) -> tuple[SentenceTransformer, int]:
    """The model after a method, and how many parameters it has lost."""
    before = count(model)
    if method == FULL:
        return model, 0
    if method in BASELINES:
        wish = before * arguments.removed // 100
        make: Callable[[SentenceTransformer, int], SentenceTransformer] = BASELINES[method]
        small = make(model, wish)
        return small, wish if method == "magnitude" else before - count(small)
    tool = METHODS["vocabulary"]
    options = VOCABULARIES[method] | {"parameters": str(1 - Fraction(arguments.removed, 100))}
    options |= {"characters": arguments.characters}
    plan = tool.plan(model, _make_options(tool, options), context)
    small = tool.apply(model, plan, context).model
    return small, before - count(small)


def count(model: SentenceTransformer) -> int:
    return sum(weight.numel() for weight in model.parameters())


def cell(arguments: argparse.Namespace, task_name: str, method: str) -> dict[str, Any]:
    """One task after one method, once for each seed."""
    task, model, tool = TASKS[task_name], load(arguments.model), METHODS["finetune"]
    rows = read_split(task, arguments.data, "train")
    measured = read_split(task, arguments.data, task.split)
    if arguments.rows:
        rows = sample(rows, arguments.rows, seed=0)
    asked = {
        "epochs": arguments.epochs,
        "batch_size": arguments.batch_size,
        "learning_rate": arguments.learning_rate,
        "max_length": min(arguments.max_length, model.max_seq_length or arguments.max_length),
        "precision": arguments.precision,
        "keep_zeros": method == "magnitude",
    }
    scores, lost, began = [], 0, time.monotonic()
    for seed in arguments.seeds:
        context = Context(original=model, corpus=corpus_of(rows), seed=seed, progress=Lines())
        small, lost = shrink(model, method, arguments, context)
        plan = tool.plan(small, _make_options(tool, asked), context)
        student, learned = _trained(small, plan, rows, (), context)
        scores.append(_measures_of(student, plan, measured))
        learned.done()
        print(task_name, method, seed, scores[-1], flush=True)
    return {
        "task": task_name,
        "method": method,
        "characters": arguments.characters,
        "measure": task.measure,
        "score": statistics.fmean(score[task.measure] for score in scores),
        "removed": lost / count(model),
        "rows": len(rows),
        "measured_rows": len(measured),
        "seeds": list(arguments.seeds),
        "scores": scores,
        "options": asked,
        "seconds": round(time.monotonic() - began, 1),
    }


def table(folder: Path) -> str:
    """What is there so far, a line for each method."""
    cells = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found = {(cell["task"], cell["method"]): cell for cell in cells}
    tasks = [task for task in TASKS if any(key[0] == task for key in found)]
    lines = [f"{'':16} {'removed':>8} " + " ".join(f"{task:>12}" for task in tasks) + f" {'mean':>8}"]
    for method in ROWS:
        own = [found.get((task, method)) for task in tasks]
        there = [one for one in own if one is not None]
        if there:
            shown = " ".join(f"{'' if one is None else format(one['score'], '.4f'):>12}" for one in own)
            mean = statistics.fmean(one["score"] for one in there) if len(there) == len(tasks) else None
            removed = statistics.fmean(one["removed"] for one in there)
            lines.append(
                f"{method:16} {removed:>8.2%} {shown} {'' if mean is None else format(mean, '.4f'):>8}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True, type=Path, help="folder of the tasks")
    parser.add_argument("--output", "-o", required=True, type=Path)
    parser.add_argument("--tasks", nargs="+", default=UNASKED, choices=TASKS)
    parser.add_argument("--methods", nargs="+", default=ROWS, choices=ROWS)
    parser.add_argument("--removed", type=int, default=20, help="percent of all parameters")
    parser.add_argument("--characters", default="auto", choices=("auto", "all", "seen"))
    parser.add_argument("--rows", type=int, help="training rows of a task, at most")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--precision", default="auto", choices=("auto", "fp32", "bf16"))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        task, method = arguments.only.split(":")
        found = cell(arguments, task, method)
        (arguments.output / f"{task}-{method}.json").write_text(json.dumps(found, indent=1))
        return
    wanted = {
        f"{task}-{method}": f"{task}:{method}" for task in arguments.tasks for method in arguments.methods
    }
    missing = {name: row for name, row in wanted.items() if not (arguments.output / f"{name}.json").is_file()}
    run_rows(missing, arguments.output, at_once=arguments.at_once)
    print(table(arguments.output))


if __name__ == "__main__":
    main()
