"""The time that pruning takes and saves: the Fisher pass, and models with fewer neurons.

    python benchmarks/weights_speed.py fisher MODEL --triplets FILE
    python benchmarks/weights_speed.py neuron MODEL --sparsity 50

`fisher`: the pass that takes per-sample gradients against a plain training pass (all weights, one AdamW step a batch) over the same
samples, interleaved. `neuron`: encoding with all and with some MLP neurons, interleaved, compared with the predicted FLOPs.
Ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from sentence_transformers import SentenceTransformer

from trundle.data.examples import Example, _read_examples
from trundle.data.sampling import sample
from trundle.methods.weights.gradients import _measure_gradients
from trundle.methods.weights.pruning import _best_neurons
from trundle.model.cost import cost
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.matrices import prunable
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.train.contrastive import make_contrast
from trundle.train.tuples import Prompts

BATCH = 32


def seconds(work: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each; the first round only warms up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def fisher(arguments: argparse.Namespace) -> None:
    model = load(arguments.model).float()
    model.max_seq_length = min(arguments.length, model.max_seq_length or arguments.length)
    examples = sample(_read_examples(arguments.triplets), arguments.samples, seed=0)
    matrices = [one.name for one in prunable(layout_of(transformer_of(model).model))]
    prompts = {one.source: Prompts() for one in examples}
    student = copy_of(model)
    training = trainer(student, examples, prompts)

    def gradients() -> None:
        _measure_gradients(model, examples, matrices, prompts=prompts, batch_size=BATCH)

    found = in_turns({"fisher": gradients, "training": training}, arguments.rounds)
    print(
        f"{arguments.samples} samples on {model.device.type}: Fisher pass {found['fisher']:.2f} s, training pass "
        f"{found['training']:.2f} s, ratio {found['fisher'] / found['training']:.2f}"
    )


def trainer(
    student: SentenceTransformer, examples: list[Example], prompts: dict[str, Prompts]
) -> Callable[[], None]:
    task = make_contrast(student, examples, (), prompts=prompts, batch_size=BATCH, negatives=1)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-6, fused=True)

    def run() -> None:
        student.train()
        for number in range(task.batches.order.per_epoch):
            batch = task.batches.load(task.batches.order.batch(number))
            loss = task.objective(send_to_device(batch, student.device))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return run


def forward(model: SentenceTransformer, texts: int, length: int, batch: int = BATCH) -> Callable[[], None]:
    """Encode so many texts of exactly so many tokens."""
    ids = torch.randint(1000, 2000, (texts, length), device=model.device)
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def run() -> None:
        with torch.inference_mode():
            for start in range(0, texts, batch):
                model({name: tensor[start : start + batch] for name, tensor in features.items()})

    return run


def neuron(arguments: argparse.Namespace) -> None:
    model = load(arguments.model).eval()
    layout = layout_of(transformer_of(model).model)
    keep = layout.sizes["mlp"] - layout.sizes["mlp"] * arguments.sparsity // 100
    small = cut(
        model,
        Cut(mlp=tuple(_best_neurons(torch.rand(layout.sizes["mlp"]), keep) for _ in range(layout.layers))),
    )
    works = {
        name: forward(one, arguments.samples, arguments.length)
        for name, one in (("all", model), ("some", small))
    }
    found = in_turns(works, arguments.rounds)
    promised = (
        cost(model, length=arguments.length).flops_per_token
        / cost(small, length=arguments.length).flops_per_token
    )
    faster = found["all"] / found["some"]
    print(
        f"{keep} of {layout.sizes['mlp']} neurons on {model.device.type}, texts of {arguments.length} tokens: "
        f"{faster:.2f}× faster, FLOPs promise {promised:.2f}×: {faster / promised:.0%} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fisher", "neuron"))
    parser.add_argument("model")
    parser.add_argument("--triplets")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--sparsity", type=int, default=50, help="per cent of the neurons that go")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    {"fisher": fisher, "neuron": neuron}[arguments.what](arguments)


if __name__ == "__main__":
    main()
