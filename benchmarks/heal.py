"""A cut model healed in three ways for the same steps on the same data: align, contrast, and what a user would do today.

    python benchmarks/heal.py TEACHER --triplets DIR --tasks DIR --layers 6,3 --steps 2000 -o results/

`align` and `contrast` start from the teacher's layers that `--order` says. `library` is sentence-transformers' own way, in
`library_distillation.py`; it needs the package `datasets`. `cut` is those layers with no healing. align and library see the texts of the tuples, contrast the tuples, each
`--batch-size` of them per step. The tasks are only measured on, never trained on nor chosen by.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rows import ENGLISH_STS, Lines, run_rows
from trundle.data.corpus import Corpus, read_corpus
from trundle.data.sampling import distinct, sample
from trundle.evaluate.scoring import Result, evaluate, find_tasks
from trundle.model.cost import cost
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.recipe import parse_recipe

WAYS = ("cut", "align", "contrast", "library")
KINDS = ("sts", "retrieval")


def build(arguments: argparse.Namespace, row: str) -> None:
    folder = Path(arguments.output) / row
    folder.mkdir(parents=True)
    facts: dict[str, Any] = {}
    began = time.time()
    if row == "teacher":
        model = arguments.teacher
    else:
        way, layers = row.rsplit("-", 1)
        sources = [str(file) for file in sorted(Path(arguments.triplets).glob("*.parquet"))]
        corpus = read_corpus(sources, seed=0)
        model = str(folder / "model")
        if way == "library":
            by_library(arguments, int(layers), corpus, model)
        else:
            facts = by_trundle(arguments, way, int(layers), corpus, model)
    seconds = time.time() - began
    opened = load(model)
    index = None if row == "teacher" else embedder(load(arguments.teacher), name="teacher", half_on_gpu=True)
    chosen = find_tasks(arguments.names.split(","), arguments.tasks)
    found = evaluate(embedder(opened, name=row, half_on_gpu=True), chosen, documents=index)
    content = {"row": row, "parameters": cost(opened).parameters, "facts": facts, "seconds": seconds}
    content |= {"scores": [result.as_json() for result in found]}
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def by_trundle(
    arguments: argparse.Namespace, way: str, layers: int, corpus: Corpus, output: str
) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"depth": {"keep": layers, "order": arguments.order}}]
    length = {"steps": arguments.steps, "batch_size": arguments.batch_size}
    if way == "align":
        steps.append({"align": length})
    elif way == "contrast":
        steps.append({"contrast": length | {"train": "full"} | json.loads(arguments.options)})
    recipe = parse_recipe(json.dumps({"steps": steps}), name=way)
    run = run_recipe(
        Request(source=arguments.teacher, output=output, corpus=corpus, progress=Lines()), recipe
    )
    return dict(run.steps[-1].facts)


def by_library(arguments: argparse.Namespace, layers: int, corpus: Corpus, output: str) -> None:
    """Hand the same texts to a script that knows nothing of trundle."""
    texts = [text.text for text in distinct(corpus.train(), key=lambda text: text.text)]
    chosen = sample(texts, arguments.steps * arguments.batch_size, seed=0)
    file = Path(f"{output}-texts.json")
    file.write_text(json.dumps(chosen))
    script = Path(__file__).with_name("library_distillation.py")
    numbers = [str(number) for number in (layers, arguments.steps, arguments.batch_size)]
    subprocess.run([sys.executable, str(script), arguments.teacher, str(file), *numbers, output], check=True)


def table(output: str) -> None:
    found = {file.parent.name: json.loads(file.read_text()) for file in Path(output).glob("*/result.json")}
    if "teacher" not in found:
        print("the teacher's row did not come to an end; see the logs")
        return
    teacher = {kind: mean(found["teacher"], kind, "standard") for kind in KINDS}
    print(f"{'model':14} {'params':>8} {'STS':>8} {'retrieval':>10} {'asymmetric':>11}   % of the teacher")
    for name, content in sorted(found.items(), key=lambda item: -item[1]["parameters"]):
        sts, retrieval = (mean(content, kind, "standard") for kind in KINDS)
        across = mean(content, "retrieval", "asymmetric")
        shares = [
            100 * sts / teacher["sts"],
            100 * retrieval / teacher["retrieval"],
            100 * across / teacher["retrieval"],
        ]
        print(
            f"{name:14} {content['parameters'] / 1e6:7.1f}M {sts:8.4f} {retrieval:10.4f} {across:11.4f}   "
            + " / ".join(f"{share:.1f}" for share in shares)
        )


def mean(content: dict[str, Any], kind: str, mode: str) -> float:
    chosen = [
        Result(**score) for score in content["scores"] if (score["kind"], score["mode"]) == (kind, mode)
    ]
    return sum(result.score for result in chosen) / len(chosen) if chosen else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--triplets", required=True, help="folder of .parquet with query, positive, negative")
    parser.add_argument("--tasks", required=True)
    names = ",".join([*(f"sts/{name}" for name in ENGLISH_STS), "retrieval"])
    parser.add_argument("--names", default=names, help="which tasks; default: English STS and all retrieval")
    parser.add_argument("--layers", default="6,3")
    parser.add_argument("--order", choices=("auto", "first", "spread"), default="auto", help="which of them")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--options", default="{}", help="more options of contrast, as JSON")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only", help="build this one row in this process")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    if arguments.only:
        build(arguments, arguments.only)
        return
    rows = [f"{way}-{count}" for count in arguments.layers.split(",") for way in arguments.ways.split(",")]
    run_rows({row: row for row in ["teacher", *rows]}, arguments.output, at_once=arguments.parallel)
    table(arguments.output)


if __name__ == "__main__":
    main()
