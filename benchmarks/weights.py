"""What pruning for a domain costs or gains: method × sparsity, one-shot and after 100 steps, over several seeds.

    python benchmarks/weights.py MODEL --data DIR -o results/
    python benchmarks/weights.py MODEL --data DIR --domains finance --sparsity 50 --methods gaprune,magnitude -o few/

DIR holds the tasks and triplets (classification/, retrieval/, sts/, triplets/). A domain is tested by its classification task
and by a search: every tenth row of triplets/DOMAIN is kept back, its queries search all passages of those rows. Nothing in
them is learned from. Gradients are taken once per domain and seed and serve all methods. `neuron` cuts whole neurons by
gaprune's scores, and those that stay take over, with `neuron-alone` they don't. `gaprune-paper` has β = 1 (with each F below 1), `gaprune-raw` the formula as printed. `dense` is the model itself, and after the same training: what pruning has to be compared with.

    python benchmarks/weights.py --table results/ other-results/
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer
from torch import Tensor

from rows import Lines, run_rows
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.evaluate.tasks import Task
from trundle.methods.catalogue import METHODS
from trundle.methods.contract import Context
from trundle.methods.training import Prompts
from trundle.methods.weights import _FisherScale
from trundle.methods.weights.gradients import _measure_gradients, _measure_norms
from trundle.methods.weights.samples import _draw_samples, _open_side, _texts_of
from trundle.methods.weights.scoring import (
    _BETA,
    _alignment,
    _best_neurons,
    _choose,
    _dai,
    _neurons_by_layer,
    _random_scores,
    _Scored,
    _wanda,
)
from trundle.methods.weights.weights import _take_over
from trundle.model.encode import embedder
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.matrices import prunable, weight_of, with_zeros
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.recipe import _make_options

METHODS = (
    "gaprune",
    "gaprune-paper",
    "gaprune-raw",
    "magnitude",
    "random",
    "general-fisher",
    "domain-fisher",
    "wanda",
    "neuron",
    "neuron-alone",
)
DOMAIN_TASKS = {"finance": "classification/FinancialPhraseBank", "chemistry": "classification/ChemProt"}
GENERAL_TASKS = "sts/STSBenchmark,sts/STS15,retrieval/SciFact,retrieval/Cranfield"
TENTH = 10
ONE_SHOT, AFTER = "one-shot", "after"


@dataclass(frozen=True, kw_only=True)
class Domain:
    """Tuples to learn from and tasks to be measured on."""

    train: str
    tasks: list[Task]


def read_domain(name: str, data: Path, scratch: Path) -> Domain:
    """Every tenth query searches the passages of its rows; rows that share a text with them are not learned from."""
    rows = pq.read_table(data / "triplets" / f"{name}.parquet").to_pylist()
    measured, others = rows[::TENTH], [row for number, row in enumerate(rows) if number % TENTH]
    passages = list(dict.fromkeys(row[c] for row in measured for c in ("positive", "negative") if row[c]))
    place = {passage: str(number) for number, passage in enumerate(passages)}
    numbers = [str(number) for number in range(len(measured))]
    test = ["test"] * len(measured)
    folder = scratch / "retrieval" / name
    folder.mkdir(parents=True, exist_ok=True)
    tables: dict[str, dict[str, list[Any]]] = {
        "corpus": {"_id": list(place.values()), "title": [""] * len(place), "text": passages},
        "queries": {"_id": numbers, "text": [row["query"] for row in measured], "split": test},
        "qrels": {
            "query-id": numbers,
            "corpus-id": [place[row["positive"]] for row in measured],
            "score": [1] * len(measured),
            "split": test,
        },
    }
    for table, columns in tables.items():
        pq.write_table(pa.table(columns), folder / f"{table}.parquet")
    kept_back = {*passages, *(row["query"] for row in measured)}
    free = [row for row in others if kept_back.isdisjoint((row["query"], row["positive"], row["negative"]))]
    train = scratch / f"{name}-train.parquet"
    pq.write_table(pa.Table.from_pylist(free), train)
    return Domain(train=str(train), tasks=find_tasks([str(folder), DOMAIN_TASKS[name]], data))


def scored(
    model: SentenceTransformer,
    domain: Domain,
    arguments: argparse.Namespace,
    seed: int,
    notes: dict[str, Any],
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """The scores of every method, from one pass over each side, and texts of both."""
    context = Context(original=model, seed=seed, progress=Lines())
    backbone = transformer_of(model).model
    weights = {one.name: weight_of(backbone, one).float() for one in prunable(layout_of(backbone))}
    probe, found = copy_of(model).float(), {}
    probe.max_seq_length = min(arguments.max_length, model.max_seq_length or arguments.max_length)
    general = str(Path(arguments.data) / "triplets" / "general.parquet")
    norms: dict[str, Tensor] = {}
    sides = []
    for name, source in (("domain", domain.train), ("general", general)):
        side = _open_side("domain" if name == "domain" else "general", source, context)
        sides.append(side)
        samples, facts = _draw_samples(model, side, arguments.samples, context)
        prompts = {one.source: Prompts() for one in samples}
        began = time.monotonic()
        found[name] = _measure_gradients(probe, samples, tuple(weights), prompts=prompts, label=name)
        notes[name] = facts | {"gradient_seconds": round(time.monotonic() - began, 1)}
        if name == "domain":
            norms = _measure_norms(probe, samples, tuple(weights), prompts=prompts)
    f_dom, f_gen = found["domain"].fisher, found["general"].fisher
    aligned = {name: _alignment(found["general"].mean[name], found["domain"].mean[name]) for name in weights}

    def by_dai(beta: float, scale: _FisherScale) -> dict[str, Tensor]:
        return {
            name: _dai(weight, f_gen[name], f_dom[name], aligned[name], beta=beta, scale=scale)
            for name, weight in weights.items()
        }

    ours = by_dai(_BETA, "mean")
    scores = {
        "gaprune": ours,
        "gaprune-paper": by_dai(1.0, "largest"),
        "gaprune-raw": by_dai(1.0, "raw"),
        "neuron": ours,
        "neuron-alone": ours,
        "magnitude": {name: weight.abs() for name, weight in weights.items()},
        "random": _random_scores(weights, seed=seed),
        "general-fisher": f_gen,
        "domain-fisher": f_dom,
        "wanda": {name: _wanda(weight, norms[name]) for name, weight in weights.items()},
    }
    return scores, _texts_of(sides, context)


def pruned(
    model: SentenceTransformer, method: str, scores: dict[str, Tensor], share: Fraction, texts: list[str]
) -> SentenceTransformer:
    if method in ("neuron", "neuron-alone"):
        layout = layout_of(transformer_of(model).model)
        keep = layout.sizes["mlp"] - int(layout.sizes["mlp"] * share)
        whole = _Scored(matrices=prunable(layout), scores=scores, aligned=None, facts={})
        kept = tuple(_best_neurons(one, keep) for one in _neurons_by_layer(whole))
        small = cut(model, Cut(mlp=kept))
        if method == "neuron":
            _take_over(model, small, kept, texts, Context(original=model, progress=Lines()))
        return small
    small = copy_of(model)
    with_zeros(small, _choose(scores, share, "row" if method == "wanda" else "global"))
    return small


def retrained(
    model: SentenceTransformer, domain: Domain, arguments: argparse.Namespace, seed: int
) -> SentenceTransformer:
    tool = METHODS["contrast"]
    options = {"train": "full", "steps": arguments.steps, "batch_size": arguments.batch_size, "warmup": 10}
    options |= {"max_length": arguments.max_length} | json.loads(arguments.options)
    context = Context(
        original=model,
        corpus=read_corpus([domain.train], seed=seed),
        seed=seed,
        cache=Path(arguments.output) / "cache",
        progress=Lines(),
    )
    applied = tool.apply(model, tool.plan(model, _make_options(tool, options), context), context)
    applied.done()
    return applied.model


def build(arguments: argparse.Namespace, row: str) -> None:
    name, number = row.rsplit("-", 1)
    seed, folder = int(number), Path(arguments.output)
    domain = read_domain(name, Path(arguments.data), folder / "data" / row)
    tasks = domain.tasks + find_tasks(arguments.general.split(","), arguments.data)
    model = load(arguments.model)
    notes: dict[str, Any] = {}
    scores, texts = scored(model, domain, arguments, seed, notes)
    (folder / f"{row}.notes.json").write_text(json.dumps(notes, indent=1))
    with (folder / f"{row}.jsonl").open("w") as file:

        def measure(small: SentenceTransformer, method: str, sparsity: int, when: str) -> None:
            found = evaluate(embedder(small, name=method, half_on_gpu=True), tasks)
            line: dict[str, Any] = {"model": Path(arguments.model).name, "domain": name, "seed": seed}
            line |= {"method": method, "sparsity": sparsity, "when": when}
            line["scores"] = {one.task: one.score for one in found}
            line["of_domain"] = [one.name for one in domain.tasks]
            print(json.dumps(line), file=file, flush=True)

        for method, sparsity in wanted(arguments):
            share = Fraction(sparsity, 100)
            small = model if method == "dense" else pruned(model, method, scores[method], share, texts)
            measure(small, method, sparsity, ONE_SHOT)
            if arguments.steps:
                measure(retrained(small, domain, arguments, seed), method, sparsity, AFTER)


def wanted(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    yield "dense", 0
    for sparsity in map(int, arguments.sparsity.split(",")):
        for method in arguments.methods.split(","):
            yield method, sparsity


Key = tuple[str, str, str, int, str]


def table(folders: list[str]) -> None:
    """Change against the dense model before training, in per cent: mean and spread over seeds, per method."""
    lines = [
        json.loads(line)
        for folder in folders
        for file in sorted(Path(folder).glob("*.jsonl"))
        for line in file.open()
    ]
    changes: dict[Key, dict[str, list[float]]] = {}
    dense = {
        (one["model"], one["domain"], one["seed"]): one
        for one in lines
        if one["method"] == "dense" and one["when"] == ONE_SHOT
    }
    for one in lines:
        before = dense[one["model"], one["domain"], one["seed"]]
        key = (one["model"], one["domain"], one["method"], one["sparsity"], one["when"])
        for side in ("domain", "general"):
            old, new = (mean_of(content, side) for content in (before, one))
            changes.setdefault(key, {}).setdefault(side, []).append(100 * (new / old - 1))
    print("| model | domain | sparsity | method | domain, one-shot | after | general, one-shot | after |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for model, domain, method, sparsity in dict.fromkeys(key[:4] for key in changes):
        cells = []
        for side in ("domain", "general"):
            for when in (ONE_SHOT, AFTER):
                own = changes.get((model, domain, method, sparsity, when), {}).get(side)
                rival = changes.get((model, domain, "gaprune", sparsity, when), {}).get(side)
                cells.append(cell(own, None if method in ("gaprune", "dense") else rival))
        print(f"| {model} | {domain} | {sparsity}% | {method} | {' | '.join(cells)} |")
    print(
        "\n% change against the dense model, mean ± standard deviation over seeds; ≈: can't be told apart from gaprune."
    )


def mean_of(line: dict[str, Any], side: str) -> float:
    """The mean score over the tasks of the domain, or over the others."""
    chosen = [
        score for task, score in line["scores"].items() if (task in line["of_domain"]) is (side == "domain")
    ]
    return statistics.fmean(chosen)


def cell(own: list[float] | None, rival: list[float] | None) -> str:
    if not own:
        return ""
    spread = f" ± {statistics.stdev(own):.1f}" if len(own) > 1 else ""
    same = rival is not None and not told_apart(own, rival)
    return f"{statistics.fmean(own):+.1f}{spread}{' ≈' if same else ''}"


def told_apart(one: list[float], other: list[float]) -> bool:
    """Whether the means of two methods over seeds differ by more than twice the error of that difference."""
    if min(len(one), len(other)) < 2:
        return False
    error: float = (statistics.variance(one) / len(one) + statistics.variance(other) / len(other)) ** 0.5
    return bool(abs(statistics.fmean(one) - statistics.fmean(other)) > 2 * error)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--data", help="folder with tasks and triplets")
    parser.add_argument("--domains", default="finance,chemistry")
    parser.add_argument("--sparsity", default="30,50,60,70", help="per cent")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--general", default=GENERAL_TASKS, help="tasks that are not of the domain")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=100, help="of training afterwards; 0 for none")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--options", default="{}", help="more options of contrast, as JSON")
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--only", help="build this one row in this process")
    parser.add_argument("--table", nargs="+", metavar="FOLDER", help="only print the table of these results")
    parser.add_argument("-o", "--output")
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.table)
        return
    if not (arguments.model and arguments.data and arguments.output):
        parser.error("give MODEL, --data and -o, or --table")
    if arguments.only:
        build(arguments, arguments.only)
        return
    rows = [f"{name}-{seed}" for name in arguments.domains.split(",") for seed in arguments.seeds.split(",")]
    run_rows({row: row for row in rows}, arguments.output, at_once=arguments.parallel)
    table([arguments.output])


if __name__ == "__main__":
    main()
