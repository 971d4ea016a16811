"""What a LoRA step of `contrast` costs beside a script that uses peft alone.

    python benchmarks/lora_step.py MODEL_FOLDER [--steps 20] [--rounds 5] [--batch-size 16] [--precision fp32]

Both train the same adapters on the same tuples (a query, its answer, a hard negative) with in-batch negatives, the same
optimizer and clipping. The peft script finds its batches tokenised, column by column, and on the device; trundle's loop
tokenises while it trains. Rounds alternate, the medians are compared: wanted is a ratio of 1.1 or less.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import functional

from trundle.data.examples import Example
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _add_adapters
from trundle.methods.contrast.contrastive import make_contrast_task
from trundle.methods.training import Prompts
from trundle.model.load import load
from trundle.model.surgery import transformer_of
from trundle.train.blocks import compiled_blocks
from trundle.train.loop import TrainSettings, train

WORDS = ("shrink", "any", "text", "embedding", "model", "and", "keep", "your", "index")
SOURCE = "made up"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--mini-batch", type=int, help="also show what gradient caching with this size costs")
    parser.add_argument("--compile", action="store_true", help="also show what compiled layers bring")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    model = load(options.model)
    examples = some_examples(options.steps * options.batch_size)
    ways = {
        "peft alone": lambda: by_peft(model, examples, options),
        "contrast": lambda: by_contrast(model, examples, options),
    }
    if options.mini_batch:
        ways["contrast, cached"] = lambda: by_contrast(
            model, examples, options, mini_batch=options.mini_batch
        )
    if options.compile:
        ways["contrast, compiled"] = lambda: by_contrast(model, examples, options, compiled=True)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            seconds = ways[name]()
            memory = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else float("nan")
            if number:  # the first round warms up
                found[name].append((seconds, memory))
    plain = found["peft alone"]
    for name, rounds in found.items():
        ratios = sorted(ours / theirs for (ours, _), (theirs, _) in zip(rounds, plain, strict=True))
        print(
            f"{name:18} {1e3 * statistics.median(seconds for seconds, _ in rounds):9.1f} ms/step   "
            f"ratio {statistics.median(ratios):5.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})   "
            f"peak {max(memory for _, memory in rounds):8.0f} MiB"
        )


def some_examples(count: int) -> list[Example]:
    """Queries of 4 to 16 words, documents of 20 to 80, all different."""
    rng = np.random.default_rng(0)

    def text(shortest: int, longest: int, number: int) -> str:
        return f"{number} " + " ".join(rng.choice(WORDS, rng.integers(shortest, longest)))

    return [
        Example(query=text(4, 16, i), positive=text(20, 80, i), negatives=(text(20, 80, -i),), source=SOURCE)
        for i in range(count)
    ]


def by_contrast(
    model: SentenceTransformer,
    examples: list[Example],
    options: argparse.Namespace,
    *,
    mini_batch: int | None = None,
    compiled: bool = False,
) -> float:
    """Seconds per step of trundle's loop, from its first batch to its result."""
    student = copy.deepcopy(model)
    _add_adapters(student, seed=0)
    task = make_contrast_task(
        student,
        examples,
        [],
        ContrastOptions(batch_size=options.batch_size, mini_batch=mini_batch),
        prompts={SOURCE: Prompts()},
    )
    settings = TrainSettings(steps=options.steps, learning_rate=1e-4, precision=options.precision)
    layers = compiled_blocks(transformer_of(student).model) if compiled else nullcontext()
    with tempfile.TemporaryDirectory() as folder, layers:
        result = train(student, task, settings, folder=Path(folder))
    return float(result.seconds / options.steps)


def by_peft(model: SentenceTransformer, examples: list[Example], options: argparse.Namespace) -> float:
    """Seconds per step of the plainest script there is."""
    torch.manual_seed(0)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    backbone = get_peft_model(copy.deepcopy(transformer_of(model).model), config).train()
    device = next(backbone.parameters()).device
    ready = []
    for start in range(0, len(examples), options.batch_size):
        chosen = examples[start : start + options.batch_size]
        columns = [
            [e.query for e in chosen],
            [e.positive for e in chosen],
            [e.negatives[0] for e in chosen],
        ]
        ready.append(
            [
                model.tokenizer(column, padding=True, truncation=True, return_tensors="pt").to(device)
                for column in columns
            ]
        )
    trained = [weight for weight in backbone.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    synchronise(device)
    began = time.perf_counter()
    for batch in ready:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=options.precision == "bf16"):
            queries, positives, negatives = (mean_vectors(backbone, column) for column in batch)
            scores = queries @ torch.cat([positives, negatives]).T / 0.05
        loss = functional.cross_entropy(scores.float(), torch.arange(len(scores), device=device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    synchronise(device)
    return (time.perf_counter() - began) / len(ready)


def mean_vectors(backbone: Any, column: Any) -> Tensor:
    states = backbone(**column).last_hidden_state
    mask = column["attention_mask"][:, :, None]
    vectors: Tensor = functional.normalize((states * mask).sum(dim=1) / mask.sum(dim=1), dim=-1)
    return vectors


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
