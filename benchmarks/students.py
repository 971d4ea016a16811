"""Smaller models made from one model in different ways, trained on the same data, scored on the same tasks.

    python benchmarks/students.py depth    TEACHER --data TEXTS --tasks DIR -o results/ [--keep 12,9,6,4,3]
    python benchmarks/students.py heal     TEACHER --data TUPLES --tasks DIR -o results/ [--keep 6,3]
    python benchmarks/students.py l3prune  DECODER --data TUPLES --tasks DIR -o results/ [--levels 0,10,small]
    python benchmarks/students.py leaf     TEACHER --data TEXTS --tasks DIR -o OUT NAME=FOLDER[:KEY=VALUE…] …
    python benchmarks/students.py static   TEACHER --data TEXTS --tasks DIR -o results/
    python benchmarks/students.py width    MODEL --data DIR --tasks DIR --objective contrast -o results/

--data is a folder of parquet files, --tasks a folder of tasks. Tasks are only used for scoring. Without
--tasks, models are trained and not scored. --options are more options of the training step, as JSON. Every
row is made in its own process, --at-once of them at a time, and writes result.json; rows that exist are not
made again.

depth    one teacher cut to fewer and fewer layers, each aligned; 0 layers is the static model
heal     a cut model trained with `align`, `contrast`, and sentence-transformers' own layer reduction and MSE
         distillation (`library`, needs `datasets`); `cut` is not trained
l3prune  a level is a percentage of layers to drop, or `small` or `large`, which the layer-loss curve picks
leaf     students given as folders, aligned; options after the folder are for that row alone. `ridge`, the
         closed-form start of the first student, runs first and asks the teacher for all vectors. With
         teacher=STORE a row takes texts and vectors from a store of `trundle targets build`
static   models without layers, and model2vec's distillation (needs model2vec[distill]) with and without its
         rotation
width    nested widths from one run, and what they are compared with

--rows picks rows of leaf and width by pattern.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MSELoss
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

import harness
from harness import Json, names
from trundle.data.corpus import Corpus
from trundle.data.sampling import distinct, sample
from trundle.evaluate.scoring import find_tasks
from trundle.evaluate.tasks import Task
from trundle.model.load import load
from trundle.teacher import teacher_kind

KINDS = ("retrieval", "classification", "clustering", "pairs")
SEARCHES = ("retrieval/SciFact", "retrieval/CACM", "retrieval/Cranfield")
SELECTIONS = ("consecutive", "uniform", "rotary", "importance")
LAMBDAS = ("0.3", "0.5", "0.8", "0.9", "1.0")
STATIC_RATE = 1e-3
TEACHER, TUNED, BEFORE, RIDGE = "teacher", "tuned", "before", "ridge"
DEFAULTS: dict[str, Json] = {
    "depth": {"steps": 5000, "batch_size": 32, "keep": "12,9,6,4,3,2,1,0"},
    "heal": {"steps": 2000, "batch_size": 64, "keep": "6,3"},
    "l3prune": {"steps": 1000, "batch_size": 64},
    "leaf": {"batch_size": 32},
    "static": {"steps": 2000},
    "width": {"batch_size": 64},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to make a model."""

    steps: list[Json] = field(default_factory=list)
    source: str | None = None
    """The model to start from, if it is not the one on the command line."""
    by: str | None = None
    """Who makes the model if it is not trundle: a layer count for the library, or a kind of model2vec."""
    stage: int = 1
    """Stage 0 runs first, one row at a time; stage 2 needs what stage 1 made."""
    index: bool = True
    """Whether its queries can search the original model's index."""
    bare: bool = False
    """Whether the first step sees no texts, so that a cut is neither healed nor mapped."""


def rows_of(options: argparse.Namespace) -> dict[str, Row]:
    """List all rows of a benchmark."""
    length = {"steps": options.steps, "minutes": options.minutes, "batch_size": options.batch_size}
    length = {key: value for key, value in length.items() if value is not None}
    return ROWS[options.what](options, length, json.loads(options.options))


def depth_rows(options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    found = {TEACHER: Row(index=False, stage=0)}
    for number, keep in enumerate(names(options.keep)):
        align = length | own | ({} if int(keep) else {"learning_rate": STATIC_RATE})
        steps = [{"depth": {"keep": int(keep), "order": options.order}}, {"align": align}]
        found[keep] = Row(steps=steps, stage=min(number, 1))
    return found


def heal_rows(options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    found = {TEACHER: Row(index=False)}
    for keep in names(options.keep):
        cut: Json = {"depth": {"keep": int(keep), "order": options.order}}
        found[f"cut-{keep}"] = Row(steps=[cut])
        found[f"align-{keep}"] = Row(steps=[cut, {"align": length}])
        found[f"contrast-{keep}"] = Row(steps=[cut, {"contrast": length | {"train": "full"} | own}])
        found[f"library-{keep}"] = Row(by=keep)
    return found


def l3prune_rows(options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    found = {}
    for level in names(options.levels):
        cut: Json = {"drop": f"{level}%", "heal": "none"}
        if level in ("small", "large"):
            cut = {"pick": level, "scale": options.scale}
        heal: list[Json] = [{"contrast": length | {"warmup": 300} | own}] if options.steps else []
        found[level] = Row(steps=[{"depth": cut}, *heal], index=False)
    return found


def leaf_rows(options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    shared = {"teacher": options.model} | length | own
    found: dict[str, Row] = {}
    for text in options.students:
        head, *settings = text.split(":")
        name, _, folder = head.partition("=")
        given = {key: _value(value) for key, value in (one.split("=", 1) for one in settings)}
        found[name] = Row(source=folder, steps=[{"align": shared | given}])
    if not found:
        raise SystemExit("name the students: NAME=FOLDER")
    first = next(iter(found.values()))
    start = Row(source=first.source, steps=[{"align": shared | {"steps": 1, "minutes": None}}], stage=0)
    models = {Path(model).name: Row(source=model, index=False) for model in options.as_they_are}
    found = {RIDGE: start, TEACHER: Row(index=False)} | models | found
    return _wanted(found, names(options.rows))


def static_rows(_options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    align = {"texts": 20_000, "learning_rate": STATIC_RATE} | own
    cut: Json = {"depth": {"keep": 0}}
    return {
        TEACHER: Row(index=False),
        "model2vec": Row(by="model2vec", index=False),
        "model2vec-not-rotated": Row(by="model2vec-not-rotated"),
        "depth": Row(steps=[cut]),
        "closed-form": Row(steps=[cut, {"align": align | {"steps": 0}}]),
        "trained": Row(steps=[cut, {"align": align | length}]),
    }


def width_rows(options: argparse.Namespace, length: Json, own: Json) -> dict[str, Row]:
    nested = {"widths": options.widths, "objective": options.objective} | length | own
    kept = ("learning_rate", "warmup", "precision", "compile")
    train: Json = {"train": "full", "objective": "infonce+angle", "warmup": 0} | length
    train |= {key: own[key] for key in (*kept, "mini_batch", "max_length") if key in own}
    heal = length | {key: own[key] for key in (*kept, "augment", "texts") if key in own}
    aligned, output = options.objective == "align", Path(options.output)
    found = {BEFORE: Row(index=False)} | ({} if aligned else {TUNED: Row(steps=[{"contrast": train}])})
    for mlp, mark in ((False, ""), (True, "-mlp")):
        found[f"nested{mark}"] = Row(steps=[{"width": nested | {"mlp": mlp}}])
        for width in names(options.widths):
            size = width.replace("/", "-")
            cut = {"extract": width, "mlp": mlp}
            if aligned:
                found[f"alone{mark}-{size}"] = Row(steps=[{"width": cut}, {"align": heal}])
                continue
            first, fresh = cut | {"select": "consecutive"}, cut | {"start": "random"}
            taught = train | {"objective": "distil", "teacher": str(output / TUNED / "model")}
            tuned, sized = (str(output / place) for place in (f"{TUNED}/model", f"nested{mark}/model-{size}"))
            trained = [{"width": first}, {"contrast": train}]
            found[f"random{mark}-{size}"] = Row(steps=[{"width": fresh}, {"contrast": train}])
            found[f"base{mark}-{size}"] = Row(steps=trained, bare=True)
            found[f"healed{mark}-{size}"] = Row(steps=trained)
            found[f"distil{mark}-{size}"] = Row(steps=[{"width": fresh}, {"contrast": taught}], stage=2)
            found[f"from-tuned{mark}-{size}"] = Row(steps=trained, source=tuned, stage=2, bare=True)
            found[f"further{mark}-{size}"] = Row(steps=[{"contrast": train}], source=sized, stage=2)
    for select in SELECTIONS:
        found[f"select-{select}"] = Row(steps=[{"width": nested | {"select": select}}])
        for width in () if aligned else names(options.widths):
            size = width.replace("/", "-")
            sized = str(output / f"select-{select}" / f"model-{size}")
            found[f"further-{select}-{size}"] = Row(steps=[{"contrast": train}], source=sized, stage=2)
    for weight in LAMBDAS:
        found[f"lambda-{weight}"] = Row(steps=[{"width": nested | {"student_weight": float(weight)}}])
    wanted = _wanted(found, [BEFORE, *names(options.rows)])
    return {name: replace(row, index=row.index and aligned) for name, row in wanted.items()}


def _wanted(rows: dict[str, Row], patterns: list[str]) -> dict[str, Row]:
    return {name: row for name, row in rows.items() if any(fnmatch(name, one) for one in patterns)}


MAKERS = (depth_rows, heal_rows, l3prune_rows, leaf_rows, static_rows, width_rows)
ROWS = {make.__name__.removesuffix("_rows"): make for make in MAKERS}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def tasks_of(options: argparse.Namespace) -> list[Task]:
    """Find the tasks of a benchmark: English STS, and the searches or all kinds where it needs them."""
    if not options.tasks:
        return []
    kinds = [kind for kind in KINDS if (Path(options.tasks) / kind).is_dir()]
    wanted = {"depth": kinds, "leaf": kinds, "static": SEARCHES}.get(options.what, ("retrieval",))
    if (options.what, options.objective) == ("width", "contrast"):
        wanted = ()
    chosen = names(options.names) if options.names else [*harness.ENGLISH_STS, *wanted]
    return find_tasks(chosen, options.tasks)


def build(options: argparse.Namespace, name: str) -> None:
    """Make one model, score it and write result.json."""
    row, folder = rows_of(options)[name], Path(options.output) / name
    source = row.source or options.model
    content: Json = {"row": name, "steps": row.steps, "facts": {}}
    made, began = {"": source}, time.monotonic()
    if row.steps or row.by:
        made = {"": str(folder / "model")}
        taught = row.steps[-1].get("align", {}).get("teacher") if row.steps else None
        corpus = None
        if taught is None or teacher_kind(taught) == "model":
            corpus = harness.read_folder(options.data)
        if corpus and options.what in ("l3prune", "width"):
            # The distance to a decoder that is not an embedder yet is meaningless, so no texts are held out.
            corpus = replace(corpus, held_out=lambda: iter(()))
        if row.by and row.by.startswith("model2vec"):
            by_model2vec(source, folder, rotated=row.by == "model2vec")
        elif row.by and corpus:
            by_library(source, int(row.by), corpus, folder, options)
        else:
            steps = row.steps
            if row.bare:
                harness.compress_by(source, steps[:1], folder / "cut", None, seed=options.seed)
                source, steps = str(folder / "cut"), steps[1:]
            run = harness.compress_by(source, steps, folder / "model", corpus, seed=options.seed)
            made |= {each.output.name.removeprefix("model"): str(each.output) for each in run.additional}
            content |= {"facts": dict(run.steps[-1].facts), "says": [step.says for step in run.steps]}
            content["fidelity"] = run.fidelity.as_json() if run.fidelity else None
    content["seconds"] = round(time.monotonic() - began, 1)
    index = options.model if row.index and not options.own_index and made[""] != options.model else None
    content["models"] = [
        {"size": size} | harness.score(place, tasks_of(options), index=index) for size, place in made.items()
    ]
    harness.write_json(folder / "result.json", content)


def by_model2vec(teacher: str, folder: Path, *, rotated: bool) -> None:
    """Distil with model2vec at the teacher's width, in float32 so that sizes are equal."""
    from model2vec.distill import distill

    width = load(teacher).get_embedding_dimension()
    model = distill(teacher, pca_dims=width if rotated else None, quantize_to="float32")
    model.save_pretrained(folder / "model2vec")
    static = StaticEmbedding.from_model2vec(str(folder / "model2vec"))
    SentenceTransformer(modules=[static], device="cpu").save_pretrained(str(folder / "model"))


def by_library(teacher: str, layers: int, corpus: Corpus, folder: Path, options: argparse.Namespace) -> None:
    """Reduce layers and distil as in sentence-transformers' example: spaced layers, MSELoss, its rate."""
    from datasets import Dataset

    student = SentenceTransformer(teacher)
    backbone: Any = student[0].model
    of = backbone.config.num_hidden_layers
    kept = [number * of // layers + of // layers // 2 for number in range(layers)]
    backbone.encoder.layer = torch.nn.ModuleList([backbone.encoder.layer[number] for number in kept])
    backbone.config.num_hidden_layers = layers
    texts = [text.text for text in distinct(corpus.train(), key=lambda text: text.text)]
    chosen = sample(texts, options.steps * options.batch_size, seed=0)
    vectors = SentenceTransformer(teacher).encode(chosen, batch_size=256 if torch.cuda.is_available() else 32)
    settings = SentenceTransformerTrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=1e-4,
        warmup_steps=options.steps // 10,
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        seed=0,
    )
    rows = Dataset.from_dict({"text": chosen, "label": list(vectors)})
    SentenceTransformerTrainer(
        model=student, args=settings, train_dataset=rows, loss=MSELoss(student)
    ).train()
    student.save_pretrained(str(folder / "model"))


def table(options: argparse.Namespace) -> None:
    """Print all finished rows; shares are of the teacher, the tuned model or the uncut decoder."""
    found = {
        name: json.loads(file.read_text())
        for name in rows_of(options)
        if (file := Path(options.output) / name / "result.json").is_file()
    }
    reference = next((found[name] for name in (TEACHER, TUNED, BEFORE, "0") if name in found), None)
    whole = reference["models"][0]["scores"] if reference else []
    heads = names("params,STS,%,search,%,across,%,mean %,cosine,agree@10,valid.,steps,seconds")
    print(f"{'row':28}" + "".join(f"{head:>9}" for head in heads))
    for name, content in found.items():
        near, facts = content.get("fidelity") or {}, content["facts"]
        for model in content["models"]:
            scores, cells = model["scores"], [f"{model['parameters'] / 1e6:.1f}M"]
            for kind, mode in (("sts", "standard"), ("retrieval", "standard"), ("retrieval", "asymmetric")):
                own = harness.mean_of(scores, kind, mode)
                cells += [f"{100 * own:.2f}", f"{100 * own / harness.mean_of(whole, kind):.1f}"]
            cells.append(f"{100 * harness.mean_of(scores) / harness.mean_of(whole):.2f}")
            for value in (near.get("cosine"), near.get("agreement_asymmetric"), facts.get("validation")):
                cells.append("" if value is None else f"{value:.4f}")
            cells += [str(facts.get("steps", "")), f"{content['seconds']:.0f}"]
            print(f"{name + model['size']:28}" + "".join(f"{cell.replace('nan', ''):>9}" for cell in cells))


def main() -> None:
    parser = harness.make_parser(__doc__, *ROWS)
    parser.add_argument("model")
    parser.add_argument("students", nargs="*", metavar="NAME=FOLDER", help="leaf: rows")
    parser.add_argument("--data", help="folder of parquet files to train on")
    parser.add_argument("--tasks", help="folder of tasks to score on")
    parser.add_argument("--names", help="which tasks, names or kinds")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--options", default="{}", help="more options of the training step, as JSON")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="depth, heal: numbers of layers")
    parser.add_argument("--order", choices=("auto", "first", "spread"), default="auto", help="depth, heal")
    parser.add_argument("--levels", default="0,10,20,30,40,50,60,70,80,90", help="l3prune")
    parser.add_argument("--as-they-are", nargs="*", default=[], help="leaf: models to score without training")
    parser.add_argument("--scale", type=float, default=20, help="l3prune: of the curve that picks layers")
    parser.add_argument("--objective", choices=("align", "contrast"), help="width")
    parser.add_argument("--widths", default="1/2,1/4", help="width")
    parser.add_argument("--rows", default="*", help="leaf, width: patterns of row names")
    parser.add_argument("--own-index", action="store_true", help="search no index of the original model")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", help="make this row in this process")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_intermixed_args()
    harness.set_defaults(options, DEFAULTS[options.what])
    if not options.data and options.what != "leaf":
        parser.error("pass --data")
    if options.what == "width" and not options.objective:
        parser.error("pass --objective")
    if options.only:
        build(options, options.only)
        return
    rows = {
        name: row
        for name, row in rows_of(options).items()
        if not (Path(options.output) / name / "result.json").is_file()
    }
    for stage in range(3):
        chosen = [name for name, row in rows.items() if row.stage == stage]
        harness.run_rows(chosen, options.output, at_once=options.at_once if stage else 1)
    table(options)


if __name__ == "__main__":
    main()
