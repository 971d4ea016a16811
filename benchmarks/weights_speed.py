"""What pruning costs and saves in time: the Fisher pass, models with fewer neurons, and 2:4 on a GPU, each beside its rival.

    python benchmarks/weights_speed.py fisher MODEL --triplets FILE
    python benchmarks/weights_speed.py neuron MODEL --sparsity 50
    python benchmarks/weights_speed.py 2:4 MODEL

`fisher`: the pass that takes per-sample gradients against a plain training pass (all weights, one AdamW step a batch) over the same
samples, in turns. `neuron`: encoding with all and with some MLP neurons, in turns, beside what the FLOPs promise. `2:4`: bf16 on a
GPU, dense against sparse kernels where those are faster, batches of `--batch` texts. Ratios are of medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from sentence_transformers import SentenceTransformer

from trundle.data.examples import Example, _read_examples
from trundle.data.sampling import sample
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.methods.weights.gradients import _measure_gradients
from trundle.methods.weights.scoring import _best_neurons, _two_of_four
from trundle.model.cost import cost
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.matrices import prunable, weight_of, with_zeros
from trundle.model.surgery import Cut, cut, transformer_of

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
    task = make_contrast_task(
        student, examples, (), ContrastOptions(batch_size=BATCH, negatives=1), prompts=prompts
    )
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-6, fused=True)

    def run() -> None:
        student.train()
        for number in range(task.batches.order.per_epoch):
            batch = task.batches.load(task.batches.order.batch(number))
            loss = task.losses[0](student, send_to_device(batch, student.device))
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


def sparse(arguments: argparse.Namespace) -> None:
    if not torch.cuda.is_available():
        raise SystemExit("2:4 is measured on a GPU, and there is none")
    model = load(arguments.model, device="cuda").eval()
    backbone = transformer_of(model).model
    gone = {
        one.name: _two_of_four(weight_of(backbone, one).abs())
        for one in prunable(layout_of(backbone), attention=True)
    }
    with_zeros(model, gone)
    fast, matrices = with_sparse_kernels(model)
    dense = copy.deepcopy(model).to(torch.bfloat16)
    texts = torch.randint(1000, 2000, (BATCH, arguments.length), device="cuda")
    features = {"input_ids": texts, "attention_mask": torch.ones_like(texts)}
    with torch.inference_mode():
        both = [one(dict(features))["sentence_embedding"].float() for one in (dense, fast)]
    near = torch.nn.functional.cosine_similarity(*both).min()
    works = {
        name: forward(one, arguments.samples, arguments.length, arguments.batch)
        for name, one in (("dense", dense), ("sparse", fast))
    }
    found = in_turns(works, arguments.rounds)
    layers = [one for one in transformer_of(fast).model.modules() if isinstance(one, SparseLinear)]
    shapes = {(one.out_features, one.in_features): one.kernels[-1].tokens for one in layers}
    for (rows, columns), least in shapes.items():
        print(f"{rows:,} × {columns:,}: sparse from {least:,} tokens on")
    print(
        f"{matrices} of {len(gone)} matrices run 2:4, texts of {arguments.length} tokens: {found['dense'] / found['sparse']:.2f}× as fast as "
        f"dense bf16; lowest cosine between the two {near:.5f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("fisher", "neuron", "2:4"))
    parser.add_argument("model")
    parser.add_argument("--triplets")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=BATCH, help="texts at once in `2:4`")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--sparsity", type=int, default=50, help="per cent of the neurons that go")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    {"fisher": fisher, "neuron": neuron, "2:4": sparse}[arguments.what](arguments)


if __name__ == "__main__":
    main()
