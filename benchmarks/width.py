"""A family of widths from one run beside what the paper compares it with, all for the same steps on the same data (NML).

    python benchmarks/width.py MODEL --data DIR --tasks DIR --objective contrast --steps 2000 -o results/
    python benchmarks/width.py EMBEDDER --data DIR --tasks DIR --objective align --minutes 10 -o results/ --rows 'nested*,alone*'

With `contrast` (a base model, folders of tuples) the rows are `tuned` (the whole model alone), `nested` and `nested-mlp`
with all their sizes, `further-…` (a nested size trained on), and what it is compared with at each width: `random-…`, `distil-…`
(vanilla distillation from `tuned`), `base-…` and `from-tuned-…` (consecutive selection from either, then trained). With
`align` (an embedder, folders of texts) they are `nested`, `nested-mlp` and `alone-…`: each size aligned by itself. `select-…`
and `lambda-…` are there for both. STS is the mean over the English sets; the last column is the share of `tuned` or, with
align, of the model as it came; there the results also hold searches of a size's own index and of the model's. The tasks are only measured on, never trained on nor chosen by.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rows import ENGLISH_STS, Lines, run_rows
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import _mean_score, evaluate, find_tasks
from trundle.model.cost import cost
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.pipeline.compress import compress
from trundle.recipe import parse_recipe

SELECTIONS = ("consecutive", "uniform", "rotary", "importance")
LAMBDAS = ("0.3", "0.5", "0.8", "0.9", "1.0")
BEFORE, TUNED = "before", "tuned"
Steps = list[dict[str, dict[str, Any]]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to make models: from what, by which steps, and after which other row."""

    steps: Steps = field(default_factory=list)
    source: str | None = None
    """A folder below the output, or None for the model itself."""
    late: bool = False


def all_rows(arguments: argparse.Namespace) -> dict[str, Row]:
    widths = arguments.widths.split(",")
    length = {"steps": arguments.steps, "minutes": arguments.minutes, "batch_size": arguments.batch_size}
    own = json.loads(arguments.options)
    output = Path(arguments.output)
    nested = {"widths": arguments.widths, "objective": arguments.objective} | length | own
    train: dict[str, Any] = {"train": "full", "objective": "infonce+angle", "warmup": 0} | length
    train |= {
        key: own[key]
        for key in ("learning_rate", "warmup", "mini_batch", "precision", "max_length")
        if key in own
    }
    found = {BEFORE: Row()}
    if arguments.objective == "contrast":
        found[TUNED] = Row(steps=[{"contrast": train}])
    for mlp in (False, True):
        mark = "-mlp" if mlp else ""
        found[f"nested{mark}"] = Row(steps=[{"width": nested | {"mlp": mlp}}])
        for width in widths:
            name = f"{mark}-{width.replace('/', '-')}"
            cut = {"extract": width, "mlp": mlp}
            if arguments.objective == "align":
                heal = length | {
                    key: own[key]
                    for key in ("learning_rate", "warmup", "augment", "texts", "precision")
                    if key in own
                }
                found[f"alone{name}"] = Row(steps=[{"width": cut}, {"align": heal}])
                continue
            first, fresh = cut | {"select": "consecutive"}, cut | {"start": "random"}
            taught = train | {"objective": "distil", "teacher": str(output / TUNED / "model")}
            further = f"nested{mark}/model-{width.replace('/', '-')}"
            found[f"random{name}"] = Row(steps=[{"width": fresh}, {"contrast": train}])
            found[f"base{name}"] = Row(steps=[{"width": first}, {"contrast": train}])
            found[f"distil{name}"] = Row(steps=[{"width": fresh}, {"contrast": taught}], late=True)
            found[f"from-tuned{name}"] = Row(
                steps=[{"width": first}, {"contrast": train}], source=f"{TUNED}/model", late=True
            )
            found[f"further{name}"] = Row(steps=[{"contrast": train}], source=further, late=True)
    found |= {
        f"select-{select}": Row(steps=[{"width": nested | {"select": select}}]) for select in SELECTIONS
    }
    found |= {
        f"lambda-{weight}": Row(steps=[{"width": nested | {"student_weight": float(weight)}}])
        for weight in LAMBDAS
    }
    return found


def build(arguments: argparse.Namespace, name: str) -> None:
    row, folder = all_rows(arguments)[name], Path(arguments.output) / name
    folder.mkdir(parents=True)
    source = arguments.model if row.source is None else str(Path(arguments.output) / row.source)
    made, facts, began = {"": source}, {}, time.time()
    if row.steps:
        files = [str(file) for file in sorted(Path(arguments.data).glob("*.parquet"))]
        # How near a result is to a base model that is no embedder says nothing, so no texts are kept for that.
        corpus = replace(read_corpus(files, seed=0), held_out=lambda: iter(()))
        run = compress(
            source,
            parse_recipe(json.dumps({"steps": row.steps}), name=name),
            output=folder / "model",
            corpus=corpus,
            seed=arguments.seed,
            progress=Lines(),
        )
        sizes = {sibling.output.name.removeprefix("model"): str(sibling.output) for sibling in run.additional}
        made, facts = {"": str(folder / "model")} | sizes, dict(run.steps[-1].facts)
    seconds = time.time() - began
    aligned = arguments.objective == "align"
    names = [f"sts/{task}" for task in ENGLISH_STS] + ["retrieval"] * aligned
    tasks, index = find_tasks(names, arguments.tasks), None
    if aligned and row.steps:
        index = embedder(load(arguments.model), name=arguments.model, half_on_gpu=True)
    scored = []
    for size, place in made.items():
        opened = load(place)
        results = evaluate(embedder(opened, name=name + size, half_on_gpu=True), tasks, documents=index)
        sts = [result for result in results if result.kind == "sts"]
        scored.append(
            {"size": size, "parameters": cost(opened).parameters, "sts": 100 * _mean_score(sts)}
            | {"scores": [result.as_json() for result in results]}
        )
    content = {"row": name, "seconds": seconds, "facts": facts, "models": scored}
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def table(arguments: argparse.Namespace) -> None:
    found = {
        name: json.loads(file.read_text())
        for name in all_rows(arguments)
        if (file := Path(arguments.output) / name / "result.json").is_file()
    }
    if BEFORE not in found:
        print("the model's own row did not come to an end; see the logs")
        return
    whole = found[BEFORE]["models"][0]
    reference = found.get(TUNED, found[BEFORE])["models"][0]["sts"]
    print(f"{'row':24} {'params':>8} {'size':>6} {'STS':>7} {'share':>7} {'steps':>7} {'seconds':>8}")
    for name, content in found.items():
        for model in content["models"]:
            print(
                f"{name + model['size']:24} {model['parameters'] / 1e6:7.1f}M "
                f"{model['parameters'] / whole['parameters']:5.2f}× {model['sts']:7.2f} "
                f"{100 * model['sts'] / reference:6.1f}% {content['facts'].get('steps', ''):>7} {content['seconds']:8.0f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument(
        "--data", required=True, help="folder of .parquet with tuples, or with texts for align"
    )
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--objective", choices=("align", "contrast"), required=True)
    parser.add_argument("--widths", default="1/2,1/4")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--options", default="{}", help="more options of width, as JSON")
    parser.add_argument("--rows", default="*", help="only rows of these names; * stands for anything")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only", help="this one row in this process")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    if arguments.only:
        build(arguments, arguments.only)
        return
    wanted = {
        name: row
        for name, row in all_rows(arguments).items()
        if name == BEFORE or any(fnmatch(name, pattern) for pattern in arguments.rows.split(","))
    }
    for late in (False, True):
        names = {name: name for name, row in wanted.items() if row.late is late}
        run_rows(names, arguments.output, at_once=arguments.parallel)
    table(arguments)


if __name__ == "__main__":
    main()
