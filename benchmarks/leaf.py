"""Students of one teacher, trained side by side for the same time on the same texts: the figures of `align`.

    python benchmarks/leaf.py TEACHER --backbone SMALL --texts DIR --tasks DIR --minutes 8 -o results/

Each row is a student: the first layers of the teacher, the teacher cut to half its width, an independent small model.
Every row is trained in a process of its own, all at once on a GPU, one after the other with --serial. Texts are the
parquet files in --texts; the tasks in --tasks are only measured on, never trained on nor chosen by.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sentence_transformers import SentenceTransformer

from trundle.data import read_corpus
from trundle.evaluate import evaluate, find_tasks, mean_score
from trundle.evaluate.scoring import Result
from trundle.model import Cut, cut, embedder, layout_of, load, transformer_of
from trundle.pipeline import compress
from trundle.progress import Silent
from trundle.recipe import single
from trundle.steps.catalogue import STEPS

ENGLISH_STS = ("STS12", "STS13", "STS14", "STS15", "STS17-en-en", "STSBenchmark")
KINDS = ("retrieval", "classification", "clustering", "pairs")


def first_layers(count: int) -> Callable[[SentenceTransformer], SentenceTransformer]:
    return lambda teacher: cut(teacher, Cut(blocks=tuple(range(count))))


def half_width(layers: int) -> Callable[[SentenceTransformer], SentenceTransformer]:
    """Every second dimension of the residual stream, of every head, and every second neuron."""

    def build(teacher: SentenceTransformer) -> SentenceTransformer:
        sizes = layout_of(transformer_of(teacher).model).sizes
        halves = {name: tuple(range(0, sizes[name], 2)) for name in ("hidden", "head", "mlp")}
        total = layout_of(transformer_of(teacher).model).layers
        kept = tuple(round(i * (total - 1) / (layers - 1)) for i in range(layers))
        what = Cut(blocks=kept, hidden=halves["hidden"], head=halves["head"], mlp=(halves["mlp"],) * total)
        return cut(teacher, what)

    return build


ROWS: dict[str, Callable[[SentenceTransformer], SentenceTransformer]] = {
    "first-3": first_layers(3),
    "first-6": first_layers(6),
    "half-width-6": half_width(6),
}
BACKBONE = "backbone"
LABELLING = "first-3:steps=1"
"""Comes first and alone: it asks the teacher for all vectors, and shows what the closed-form start is worth."""


class Lines(Silent):
    """Progress for a log file."""

    def say(self, line: str) -> None:
        """One line with the time."""
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def tasks(folder: str) -> list[str]:
    return [f"sts/{name}" for name in ENGLISH_STS] + [
        kind for kind in KINDS if (Path(folder) / kind).is_dir()
    ]


def build_student(row: str, teacher: str, backbone: str, folder: Path) -> Path:
    model = load(backbone) if row == BACKBONE else ROWS[row](load(teacher))
    model.save_pretrained(str(folder / "start"), create_model_card=False)
    return folder / "start"


def train_row(arguments: argparse.Namespace, row: str) -> None:
    name, *settings = row.split(":")
    folder = Path(arguments.output) / row.replace(":", "_").replace("=", "-")
    folder.mkdir(parents=True)
    options: dict[str, object] = {"teacher": arguments.teacher, "minutes": arguments.minutes}
    options |= {"augment": arguments.augment, "batch_size": arguments.batch_size, "texts": arguments.sample}
    options |= {setting.split("=")[0]: json.loads(setting.split("=")[1]) for setting in settings}
    options = {key: value for key, value in options.items() if not (key == "minutes" and "steps" in options)}
    sources = [str(file) for file in sorted(Path(arguments.texts).glob("*.parquet"))]
    start = build_student(name, arguments.teacher, arguments.backbone, folder)
    began = time.time()
    run = compress(
        str(start),
        single(STEPS["align"], options),
        output=folder / "model",
        corpus=read_corpus(sources, seed=0),
        progress=Lines(),
    )
    facts = run.steps[-1].facts
    seconds = time.time() - began
    scores = score(arguments, str(folder / "model"))
    fidelity = run.fidelity.as_json() if run.fidelity else None
    content = {"row": row, "options": options, "parameters": run.after.parameters, "facts": dict(facts)}
    content |= {"fidelity": fidelity, "seconds": seconds, "scores": [result.as_json() for result in scores]}
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def score(arguments: argparse.Namespace, model: str) -> list[Result]:
    chosen = find_tasks(tasks(arguments.tasks), arguments.tasks)
    index = (
        None
        if model == arguments.teacher
        else embedder(load(arguments.teacher), name="teacher", half_on_gpu=True)
    )
    return evaluate(embedder(load(model), name=model, half_on_gpu=True), chosen, documents=index)


def score_only(arguments: argparse.Namespace, name: str, model: str) -> None:
    folder = Path(arguments.output) / name
    folder.mkdir(parents=True)
    chosen = find_tasks(tasks(arguments.tasks), arguments.tasks)
    opened = load(model)
    scores = evaluate(embedder(opened, name=model, half_on_gpu=True), chosen)
    size = sum(weight.numel() for weight in opened.parameters())
    content = {"row": name, "parameters": size, "scores": [result.as_json() for result in scores]}
    (folder / "result.json").write_text(json.dumps(content, indent=1))


def table(output: str) -> None:
    found = {
        file.parent.name: json.loads(file.read_text()) for file in sorted(Path(output).glob("*/result.json"))
    }
    results = {name: [Result(**score) for score in content["scores"]] for name, content in found.items()}
    whole = mean_score(results["teacher"])
    searches = [result for result in results["teacher"] if result.kind == "retrieval"]
    search = mean_score(searches)
    print(
        f"{'student':34} {'params':>7} {'steps':>7} {'val ℓ2':>7} {'cosine':>7} {'agree@10':>8} {'std %':>7} {'asym %':>7}"
    )
    for name, content in found.items():
        facts, near = content.get("facts", {}), content.get("fidelity") or {}
        asymmetric = [result.score for result in results[name] if result.mode == "asymmetric"]
        cells = [
            f"{content['parameters'] / 1e6:7.1f}",
            f"{facts.get('steps', 0):7}",
            f"{facts.get('validation') or float('nan'):7.4f}",
            f"{near.get('cosine', float('nan')):7.4f}",
            f"{near.get('agreement_asymmetric', float('nan')):8.3f}",
            f"{100 * mean_score(results[name]) / whole:7.2f}",
            f"{100 * sum(asymmetric) / len(asymmetric) / search if asymmetric else float('nan'):7.2f}",
        ]
        print(f"{name:34} {' '.join(cells)}")


def wait_for_labels(process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the first row has all teacher vectors, and says so with its first validation."""
    while process.poll() is None and "validation" not in log.read_text():
        time.sleep(1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teacher")
    parser.add_argument("--backbone", required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--augment", default="")
    parser.add_argument("--sample", type=int, help="use at most this many of the texts")
    parser.add_argument("--rows", default="first-3,first-6,half-width-6,backbone")
    parser.add_argument("--serial", action="store_true")
    parser.add_argument("--only", help="train this one row in this process")
    parser.add_argument("-o", "--output", required=True)
    arguments = parser.parse_args()
    if arguments.only in {"teacher", "off-the-shelf"}:
        model = arguments.teacher if arguments.only == "teacher" else arguments.backbone
        score_only(arguments, arguments.only, model)
        return
    if arguments.only:
        train_row(arguments, arguments.only)
        return
    rows = arguments.rows.split(",")
    jobs = [LABELLING, "teacher", "off-the-shelf", *rows]
    running = []
    for number, row in enumerate(jobs):
        log = Path(arguments.output) / f"{row.replace(':', '_').replace('=', '-')}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--only", row],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        running.append(process)
        if arguments.serial:
            process.wait()
        elif number == 0:
            wait_for_labels(process, log)
    for process in running:
        process.wait()
    table(arguments.output)


if __name__ == "__main__":
    main()
