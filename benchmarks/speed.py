"""How long trundle takes against the plainest code for the same work, interleaved in one process.

    python benchmarks/speed.py loop MODEL        the training loop against a bare torch loop (goal: 0.9 or more)
    python benchmarks/speed.py lora MODEL        a LoRA step of `contrast` against a script with peft (goal: 1.1 or less)
    python benchmarks/speed.py precision MODEL --data TEXTS   steps/s of `align` in bf16 against float32
    python benchmarks/speed.py nested MODEL      a step of nested widths against the separate steps (time and memory)
    python benchmarks/speed.py neurons MODEL     encoding with half of the MLP neurons, and what the FLOPs predict
    python benchmarks/speed.py bench MODEL       texts/s that `trundle bench` reports against a bare loop (goal: 0.9)

Every round runs both ways; ratios are medians over rounds with their range.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

import harness
from trundle.bench.process import COMMAND, Worker
from trundle.bench.workload import workload
from trundle.data import Example, read_texts, sample
from trundle.measure import best_neurons, cost
from trundle.model import (
    Cut,
    NarrowModel,
    Selection,
    cut,
    default_select,
    embedder,
    layout_of,
    load,
    narrow_cut,
    transformer_of,
)
from trundle.model.tokenise import make_tokeniser
from trundle.train import (
    Batches,
    ByLength,
    Lora,
    Prompts,
    TrainSettings,
    add_adapters,
    compiled_blocks,
    leaf,
    make_contrast,
    train,
)

Batch = tuple[dict[str, Any], Tensor]
WORDS = ("shrink", "any", "text", "embedding", "model", "and", "keep", "your", "index")
SOURCE = "made up"
HELD_OUT = 512
LENGTH, TEXTS = 128, 256
"""Tokens of a text and texts of a round in `neurons`."""
DEFAULTS = {
    "loop": {"steps": 40, "rounds": 7, "batch_size": 32},
    "lora": {"steps": 20, "rounds": 5, "batch_size": 16},
    "precision": {"steps": 60, "rounds": 3, "batch_size": 32},
    "nested": {"rounds": 20, "batch_size": 64},
    "neurons": {"rounds": 5, "batch_size": 32},
    "bench": {"rounds": 7, "batch_size": 32},
}


def aligned_batches(
    model: SentenceTransformer, texts: Sequence[str], targets: Tensor, size: int
) -> Batches[Batch]:
    """Make batches of texts of similar length with their target vectors."""
    tokenise = make_tokeniser(model)

    def load_batch(places: Any) -> Batch:
        return tokenise([texts[place] for place in places]), targets[places]

    return Batches(order=ByLength([len(text) for text in texts], batch_size=size), load=load_batch)


def distance(model: SentenceTransformer, batch: Batch) -> Tensor:
    return leaf(model(dict(batch[0]))["sentence_embedding"], batch[1])


def bare_steps(
    model: nn.Module, batches: Sequence[Any], loss_of: Callable[[Any], Tensor], *, bf16: bool
) -> float:
    """Return the seconds per step of the plainest training loop."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    model.train()

    def run() -> None:
        for batch in batches:
            with torch.autocast(weights[0].device.type, dtype=torch.bfloat16, enabled=bf16):
                loss = loss_of(batch)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return harness.timed(run)[0] / len(batches)


def trained(
    model: SentenceTransformer, objective: Any, batches: Any, settings: TrainSettings, validation: Any = None
) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return train(model, objective, batches, settings, validation=validation, folder=Path(folder))


def loop(options: argparse.Namespace) -> None:
    model, rng = load(options.model), np.random.default_rng(0)
    texts = [
        " ".join(rng.choice(WORDS, rng.integers(5, 60))) for _ in range(options.steps * options.batch_size)
    ]
    width = model.get_embedding_dimension() or 0
    targets = torch.from_numpy(rng.normal(size=(len(texts), width)).astype(np.float32))
    batches = aligned_batches(model, texts, targets, options.batch_size)
    ready = [
        send_to_device(batches.load(batches.order.batch(step)), model.device) for step in range(options.steps)
    ]
    settings = TrainSettings(steps=options.steps, learning_rate=1e-5, precision=options.precision)
    ways = {
        "bare torch loop": lambda: bare_steps(
            model, ready, lambda batch: distance(model, batch), bf16=options.precision == "bf16"
        ),
        "trundle's loop": lambda: float(
            trained(model, lambda batch: distance(model, batch), batches, settings).seconds / options.steps
        ),
    }
    found = harness.interleave(ways, options.rounds)
    bare, ours = found.values()
    print(f"steps/s of trundle's loop to a bare loop: {harness.ratio_of(bare, ours)}")


def lora(options: argparse.Namespace) -> None:
    model, rng = load(options.model), np.random.default_rng(0)

    def text(shortest: int, longest: int, number: int) -> str:
        return f"{number} " + " ".join(rng.choice(WORDS, rng.integers(shortest, longest)))

    examples = [
        Example(query=text(4, 16, i), positive=text(20, 80, i), negatives=(text(20, 80, -i),), source=SOURCE)
        for i in range(options.steps * options.batch_size)
    ]

    def by_contrast(mini_batch: int | None = None, *, compiled: bool = False) -> float:
        student = copy.deepcopy(model)
        add_adapters(student, Lora(), seed=0)
        task = make_contrast(
            student,
            examples,
            [],
            prompts={SOURCE: Prompts()},
            batch_size=options.batch_size,
            mini_batch=mini_batch,
        )
        settings = TrainSettings(steps=options.steps, learning_rate=1e-4, precision=options.precision)
        with compiled_blocks(transformer_of(student).model) if compiled else nullcontext():
            return float(trained(student, task.objective, task.batches, settings).seconds / options.steps)

    ways = {"peft alone": lambda: by_peft(model, examples, options), "contrast": by_contrast}
    if options.mini_batch:
        ways["contrast, cached"] = lambda: by_contrast(options.mini_batch)
    if options.compile:
        ways["contrast, compiled"] = lambda: by_contrast(compiled=True)
    found = harness.interleave(ways, options.rounds)
    for name, rounds in found.items():
        ratio = harness.ratio_of(rounds, found["peft alone"])
        print(f"{name:18} {1e3 * statistics.median(rounds):9.1f} ms/step   ratio {ratio}")


def by_peft(model: SentenceTransformer, examples: list[Example], options: argparse.Namespace) -> float:
    """Train the same adapters in a plain script; its batches are tokenised and on the device beforehand."""
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    backbone = get_peft_model(copy.deepcopy(transformer_of(model).model), config)
    ready = []
    for start in range(0, len(examples), options.batch_size):
        chosen = examples[start : start + options.batch_size]
        columns = ([e.query for e in chosen], [e.positive for e in chosen], [e.negatives[0] for e in chosen])
        ready.append(
            [
                model.tokenizer(c, padding=True, truncation=True, return_tensors="pt").to(model.device)
                for c in columns
            ]
        )

    def vectors(column: Any) -> Tensor:
        states, mask = backbone(**column).last_hidden_state, column["attention_mask"][:, :, None]
        return functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)

    def loss_of(batch: list[Any]) -> Tensor:
        queries, positives, negatives = map(vectors, batch)
        scores = (queries @ torch.cat([positives, negatives]).T / 0.05).float()
        return functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))

    return bare_steps(backbone, ready, loss_of, bf16=options.precision == "bf16")


def precision(options: argparse.Namespace) -> None:
    teacher = load(options.model)
    layers = layout_of(transformer_of(teacher).model).layers
    student = cut(teacher, Cut(blocks=tuple(range(1, layers, 2))))
    count = options.steps * options.batch_size + HELD_OUT
    texts = sample((text.text for text in read_texts(options.data)), count, seed=0)
    targets = torch.from_numpy(embedder(teacher).text(texts))
    held_out, learned = (
        aligned_batches(teacher, texts[part], targets[part], options.batch_size)
        for part in (slice(HELD_OUT), slice(HELD_OUT, None))
    )

    def run(way: Any) -> float:
        mine = copy.deepcopy(student)
        settings = TrainSettings(
            steps=options.steps,
            learning_rate=1e-4,
            warmup=options.steps // 10,
            precision=way,
            dropout=False,
            validate_every=options.steps,
        )
        result = trained(mine, lambda batch: distance(mine, batch), learned, settings, held_out)
        print(
            f"{way} {options.steps / result.seconds:6.2f} steps/s   distance {result.validation:.4f}",
            flush=True,
        )
        return float(result.seconds)

    found = harness.interleave({"fp32": lambda: run("fp32"), "bf16": lambda: run("bf16")}, options.rounds)
    print(f"steps/s of bf16 to float32: {harness.ratio_of(found['fp32'], found['bf16'])}")


def nested(options: argparse.Namespace) -> None:
    wide = load(options.model).train()
    backbone = transformer_of(wide).model
    layout = layout_of(backbone)
    how = Selection(select=default_select(layout), mlp=options.mlp, hidden_order=())
    cuts = [narrow_cut(layout, backbone.config, Fraction(w), how) for w in harness.names(options.widths)]
    ids = torch.randint(5, layout.sizes["vocab"], (options.batch_size, options.tokens), device=wide.device)
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    narrow = [NarrowModel(wide, what).train() for what in cuts]

    def passes(models: Sequence[nn.Module]) -> None:
        for model in models:
            with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=harness.on_gpu()):
                vectors = model(dict(features))["sentence_embedding"]
                loss = vectors.float().square().sum(dim=-1).sqrt().mean()
            loss.backward()

    def seconds(models: Sequence[nn.Module]) -> float:
        taken = harness.timed(lambda: passes(models))[0]
        for model in models:
            model.zero_grad()
        return taken

    def peak(models: Sequence[nn.Module]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        optimizer = torch.optim.AdamW(wide.parameters(), fused=True)
        for _ in range(2):
            passes(models)
            optimizer.step()
            optimizer.zero_grad()
        return torch.cuda.max_memory_allocated()

    if harness.on_gpu():
        alone, together = peak([wide]), peak([wide, *narrow])
        print(
            f"peak memory: alone {alone / 1e9:.2f} GB, nested {together / 1e9:.2f} GB, {together / alone:.3f}×"
        )
    separate = [cut(wide, what).train() for what in cuts]
    ways = {"nested": lambda: seconds([wide, *narrow]), "separate": lambda: seconds([wide, *separate])}
    found = harness.interleave(ways, options.rounds)
    print(
        f"time of a nested step to the separate steps: {harness.ratio_of(found['nested'], found['separate'])}"
    )


def neurons(options: argparse.Namespace) -> None:
    model = load(options.model).eval()
    layout = layout_of(transformer_of(model).model)
    keep = layout.sizes["mlp"] - layout.sizes["mlp"] * options.sparsity // 100
    chosen = tuple(best_neurons(torch.rand(layout.sizes["mlp"]), keep) for _ in range(layout.layers))
    small = cut(model, Cut(mlp=chosen))
    ids = torch.randint(1000, 2000, (TEXTS, LENGTH), device=model.device)

    @torch.inference_mode()
    def encode(one: SentenceTransformer) -> None:
        for part in ids.split(options.batch_size):
            one({"input_ids": part, "attention_mask": torch.ones_like(part)})

    ways = {
        name: (lambda one=one: harness.timed(lambda: encode(one))[0])
        for name, one in (("all", model), ("some", small))
    }  # type: dict[str, Callable[[], float]]
    found = harness.interleave(ways, options.rounds)
    predicted = cost(model, length=LENGTH).flops_per_token / cost(small, length=LENGTH).flops_per_token
    print(
        f"{keep} of {layout.sizes['mlp']} neurons on {model.device.type}, texts of {LENGTH} tokens: "
        f"{harness.ratio_of(found['all'], found['some'])} × as fast, FLOPs predict {predicted:.2f}×"
    )


def bare_worker(folder: str) -> None:
    """Encode in a loop in a process of its own, with nothing of trundle in it."""
    model = SentenceTransformer(folder)

    def answer(request: harness.Json) -> harness.Json:
        texts, size = request["texts"], 32
        batches = itertools.cycle([texts[start : start + size] for start in range(0, len(texts), size)])
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < request["seconds"]:
            batch = next(batches)
            model.encode(batch, batch_size=size)
            done += len(batch)
        return {"texts": done, "seconds": time.perf_counter() - began}

    harness.reply_to_requests(answer)


def bench(options: argparse.Namespace) -> None:
    work, threads = workload(), torch.get_num_threads()
    bare_command = (sys.executable, __file__, "bench-worker", options.model)
    with (
        tempfile.TemporaryDirectory() as scratch,
        Worker("bench", threads=threads, timeout=300, command=COMMAND) as ours,
        Worker("bare loop", threads=threads, timeout=300, command=bare_command) as bare,
    ):
        place = Path(scratch) / "texts.json"
        place.write_text(work.as_json(), encoding="utf-8")
        opening = {"ask": "open", "model": options.model, "engine": "torch", "texts": str(place)}
        ours.ask({**opening, "threads": threads, "batch_size": options.batch_size})

        def rate(worker: Worker, request: harness.Json) -> float:
            answer = worker.ask(request | {"seconds": options.seconds})
            return float(answer["texts"] / answer["seconds"])

        for kind, texts in (("short", work.short), ("long", work.long)):
            asked, plain = {"ask": "throughput", "kind": kind}, {"texts": list(texts)}
            ways = {"bench": lambda a=asked: rate(ours, a), "bare": lambda p=plain: rate(bare, p)}  # type: ignore[misc]
            found = harness.interleave(ways, options.rounds)
            print(
                f"{kind} texts/s of bench to a bare loop: {harness.ratio_of(found['bench'], found['bare'])}"
            )


COMMANDS = {
    "loop": loop,
    "lora": lora,
    "precision": precision,
    "nested": nested,
    "neurons": neurons,
    "bench": bench,
}


def main() -> None:
    if sys.argv[1:2] == ["bench-worker"]:
        bare_worker(sys.argv[2])
        return
    parser = harness.make_parser(__doc__, *COMMANDS)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", help="precision: texts")
    parser.add_argument("--steps", type=int, help="loop, lora, precision")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="loop, lora")
    parser.add_argument("--mini-batch", type=int, help="lora: also with gradient caching of this size")
    parser.add_argument("--compile", action="store_true", help="lora: also with compiled layers")
    parser.add_argument("--widths", default="1/2,1/4", help="nested")
    parser.add_argument("--mlp", action="store_true", help="nested: narrow MLPs too")
    parser.add_argument("--tokens", type=int, default=64, help="nested: tokens of a text")
    parser.add_argument("--sparsity", type=int, default=50, help="neurons: percentage removed")
    parser.add_argument("--seconds", type=float, default=2.0, help="bench: of each measurement")
    options = parser.parse_args()
    harness.set_defaults(options, DEFAULTS[options.what])
    COMMANDS[options.what](options)


if __name__ == "__main__":
    main()
