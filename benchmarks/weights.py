"""What pruning for a domain costs or gains: method × sparsity, one-shot and after training, over seeds.

    python benchmarks/weights.py MODEL --data DIR -o results/ [--domains finance --sparsity 50]

DIR has the tasks and tuples (classification/, retrieval/, sts/, triplets/). A domain is tested by its
classification task and by a search over every tenth tuple of triplets/DOMAIN; tuples that share a text with
it are not trained on. `neuron` removes neurons by gaprune's scores and heals the model with those that
stay; `neuron-alone` does not heal it. `gaprune-paper` has β = 1 (with each Fisher matrix
scaled below 1), `gaprune-raw` the formula as printed; `-alpha-0` after either, or after `gaprune`, leaves the
alignment of gradients out. `dense` is the model itself, before and after the same training.
`papers/gaprune.py` turns the rows into changes against dense.
"""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from sentence_transformers import SentenceTransformer
from torch import Tensor

import harness
from harness import names, numbers
from trundle.data.corpus import read_corpus
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.methods.contract import Context
from trundle.methods.training import Prompts
from trundle.methods.weights import _FisherScale
from trundle.methods.weights.gradients import _measure_gradients, _measure_norms
from trundle.methods.weights.pruning import (
    _ALPHA,
    _BETA,
    _alignment,
    _best_neurons,
    _choose,
    _dai,
    _draw_samples,
    _healing_texts,
    _neurons_by_layer,
    _open_source,
    _random_scores,
    _Scored,
    _wanda,
)
from trundle.model.encode import embedder
from trundle.model.heads import copy_of
from trundle.model.healing import heal
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.matrices import prunable, weight_of, with_zeros
from trundle.model.surgery import Cut, cut, transformer_of

METHODS = (
    "gaprune,gaprune-paper,gaprune-raw,magnitude,random,general-fisher,domain-fisher,wanda,"
    "neuron,neuron-alone"
)
ALONE = "-alpha-0"
"""The end of the name of a score without its alignment term."""
DOMAIN_TASKS = {"finance": "classification/FinancialPhraseBank", "chemistry": "classification/ChemProt"}
GENERAL_TASKS = "sts/STSBenchmark,sts/STS15,retrieval/SciFact,retrieval/Cranfield"


def scored(
    model: SentenceTransformer, train: str, options: argparse.Namespace, seed: int
) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Return the scores of every method from one pass over each side, and texts of both sides."""
    context = Context(original=model, seed=seed, progress=harness.Lines())
    backbone = transformer_of(model).model
    weights = {one.name: weight_of(backbone, one).float() for one in prunable(layout_of(backbone))}
    probe, found, norms, sides = copy_of(model).float(), {}, {}, []
    probe.max_seq_length = min(options.max_length, model.max_seq_length or options.max_length)
    general = str(Path(options.data) / "triplets" / "general.parquet")
    for name, source in (("domain", train), ("general", general)):
        side = _open_source("domain" if name == "domain" else "general", source, context)
        sides.append(side)
        samples, _ = _draw_samples(model, side, options.samples, context)
        prompts = {one.source: Prompts() for one in samples}
        found[name] = _measure_gradients(probe, samples, tuple(weights), prompts=prompts, label=name)
        if name == "domain":
            norms = _measure_norms(probe, samples, tuple(weights), prompts=prompts)
    f_dom, f_gen = found["domain"].fisher, found["general"].fisher
    aligned = {name: _alignment(found["general"].mean[name], found["domain"].mean[name]) for name in weights}

    def by_dai(beta: float, scale: _FisherScale, alpha: float = _ALPHA) -> dict[str, Tensor]:
        return {
            name: _dai(weight, f_gen[name], f_dom[name], aligned[name], alpha=alpha, beta=beta, scale=scale)
            for name, weight in weights.items()
        }

    ours = by_dai(_BETA, "mean")
    scores = {
        "gaprune": ours,
        "gaprune-paper": by_dai(1.0, "largest"),
        "gaprune-raw": by_dai(1.0, "raw"),
        f"gaprune{ALONE}": by_dai(_BETA, "mean", 0.0),
        f"gaprune-paper{ALONE}": by_dai(1.0, "largest", 0.0),
        f"gaprune-raw{ALONE}": by_dai(1.0, "raw", 0.0),
        "neuron": ours,
        "neuron-alone": ours,
        "magnitude": {name: weight.abs() for name, weight in weights.items()},
        "random": _random_scores(weights, seed=seed),
        "general-fisher": f_gen,
        "domain-fisher": f_dom,
        "wanda": {name: _wanda(weight, norms[name]) for name, weight in weights.items()},
    }
    return scores, _healing_texts(sides, context)


def pruned(
    model: SentenceTransformer, method: str, scores: dict[str, Tensor], sparsity: int, texts: list[str]
) -> SentenceTransformer:
    """Set weights to zero, or remove neurons."""
    share = Fraction(sparsity, 100)
    if method not in ("neuron", "neuron-alone"):
        small = copy_of(model)
        with_zeros(small, _choose(scores, share, "row" if method == "wanda" else "global"))
        return small
    layout = layout_of(transformer_of(model).model)
    keep = layout.sizes["mlp"] - int(layout.sizes["mlp"] * share)
    whole = _Scored(matrices=prunable(layout), scores=scores)
    kept = tuple(_best_neurons(one, keep) for one in _neurons_by_layer(whole))
    small = cut(model, Cut(mlp=kept))
    return heal(model, small, Cut(mlp=kept), texts).model if method == "neuron" else small


def build(options: argparse.Namespace, row: str) -> None:
    """Measure all methods for one domain and seed."""
    name, number = row.rsplit("-", 1)
    seed, output = int(number), Path(options.output)
    folder, others, held_out = harness.held_out_search(name, Path(options.data), output / "data" / row)
    free = [row for row in others if held_out.isdisjoint((row["query"], row["positive"], row["negative"]))]
    train = str(output / "data" / row / "train.parquet")
    pq.write_table(pa.Table.from_pylist(free), train)
    own = find_tasks([str(folder), DOMAIN_TASKS[name]], options.data)
    tasks = own + (find_tasks(names(options.general), options.data) if options.general else [])
    model = load(options.model)
    scores, texts = scored(model, train, options, seed)
    trained = names(options.trained) if options.trained else ["dense", *names(options.methods)]
    retrain = {"train": "full", "steps": options.steps, "batch_size": options.batch_size, "warmup": 10}
    retrain |= {"max_length": options.max_length} | json.loads(options.options)
    with (output / f"{row}.jsonl").open("w") as file:

        def measure(small: SentenceTransformer, method: str, sparsity: int, when: str) -> None:
            found = evaluate(embedder(small, name=method, half_on_gpu=True), tasks)
            line: dict[str, Any] = {"model": Path(options.model).name, "domain": name, "seed": seed}
            line |= {"method": method, "sparsity": sparsity, "when": when, "samples": options.samples}
            line |= {"scores": {one.task: one.score for one in found}, "of_domain": [one.name for one in own]}
            print(json.dumps(line), file=file, flush=True)

        levels = [(s, m) for s in numbers(options.sparsity) for m in names(options.methods)]
        for sparsity, method in ((0, "dense"), *levels):
            small = model if method == "dense" else pruned(model, method, scores[method], sparsity, texts)
            measure(small, method, sparsity, "one-shot")
            if options.steps and method in trained:
                corpus = read_corpus([train], seed=seed)
                context = Context(
                    original=small, corpus=corpus, seed=seed, cache=output / "cache", progress=harness.Lines()
                )
                measure(harness.apply_step("contrast", small, retrain, context)[0], method, sparsity, "after")


def main() -> None:
    parser = harness.make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True, help="folder with tasks and tuples")
    parser.add_argument("--domains", default="finance,chemistry")
    parser.add_argument("--sparsity", default="30,50,60,70", help="percentages")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--general", default=GENERAL_TASKS, help="tasks outside the domain; may be empty")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--steps", type=int, default=100, help="of training afterwards; 0 for none")
    parser.add_argument("--trained", help="the methods that are trained afterwards; all by default")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--options", default="{}", help="more options of contrast, as JSON")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--only", help="build this row in this process")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    if options.only:
        build(options, options.only)
        return
    rows = [f"{name}-{seed}" for name in names(options.domains) for seed in names(options.seeds)]
    harness.run_rows(rows, options.output, at_once=options.at_once)
    print(f"summarise: python benchmarks/papers/page.py --take gaprune rows={options.output}")


if __name__ == "__main__":
    main()
