"""What nested training costs: a step of a model with all its sizes beside the sum of each one's step by itself.

    python benchmarks/width_cost.py MODEL --widths 1/2,1/4 [--mlp] --batch-size 64 --tokens 64 --rounds 20

A step is a forward and a backward pass; rounds alternate between the two ways, and the median counts. Memory, on a GPU:
the peak of one whole step with AdamW, beside that of training the model alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from trundle.methods.width.narrow import _NarrowModel
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.nested import Selection, default_select, narrow_cut
from trundle.model.surgery import cut, transformer_of

Features = dict[str, Any]


def one_pass(model: nn.Module, features: Features, *, bf16: bool) -> None:
    with torch.autocast(features["input_ids"].device.type, dtype=torch.bfloat16, enabled=bf16):
        vectors = model(dict(features))["sentence_embedding"]
        loss = vectors.float().square().sum(dim=-1).sqrt().mean()
    loss.backward()


def seconds(models: Sequence[nn.Module], features: Features, *, bf16: bool) -> float:
    _wait()
    began = time.perf_counter()
    for model in models:
        one_pass(model, features, bf16=bf16)
    _wait()
    taken = time.perf_counter() - began
    for model in models:
        model.zero_grad()
    return taken


def peak(models: Sequence[nn.Module], weights: nn.Module, features: Features, *, bf16: bool) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    optimizer = torch.optim.AdamW(weights.parameters(), fused=True)
    for _ in range(2):
        for model in models:
            one_pass(model, features, bf16=bf16)
        optimizer.step()
        optimizer.zero_grad()
    _wait()
    return torch.cuda.max_memory_allocated()


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--widths", default="1/2,1/4")
    parser.add_argument("--mlp", action="store_true")
    parser.add_argument("--select", choices=("consecutive", "uniform", "rotary", "importance"))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    wide = load(arguments.model).train()
    backbone = transformer_of(wide).model
    layout, bf16 = layout_of(backbone), torch.cuda.is_available()
    order = torch.randperm(layout.sizes["hidden"]).tolist() if arguments.select == "importance" else ()
    how = Selection(
        select=arguments.select or default_select(layout), mlp=arguments.mlp, hidden_order=tuple(order)
    )
    cuts = [narrow_cut(layout, backbone.config, Fraction(w), how) for w in arguments.widths.split(",")]
    ids = torch.randint(5, layout.sizes["vocab"], (arguments.batch_size, arguments.tokens))
    features = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    features = {name: value.to(wide.device) for name, value in features.items()}
    narrow = [_NarrowModel(wide, what).train() for what in cuts]
    if torch.cuda.is_available():
        alone = peak([wide], wide, features, bf16=bf16)
        together = peak([wide, *narrow], wide, features, bf16=bf16)
        print(
            f"peak memory: alone {alone / 1e9:.2f} GB, nested {together / 1e9:.2f} GB, {together / alone:.3f}×"
        )
    separate = [cut(wide, what).train() for what in cuts]
    ways: dict[str, Callable[[], float]] = {
        "nested": lambda: seconds([wide, *narrow], features, bf16=bf16),
        "separate": lambda: seconds([wide, *separate], features, bf16=bf16),
    }
    for way in ways.values():
        way()
    found = {name: [] for name in ways}  # type: dict[str, list[float]]
    for _ in range(arguments.rounds):
        for name, way in ways.items():
            found[name].append(way())
    nested, apart = (statistics.median(found[name]) for name in ways)
    print(f"step: separate {1e3 * apart:.1f} ms, nested {1e3 * nested:.1f} ms, {nested / apart:.3f}×")


if __name__ == "__main__":
    main()
