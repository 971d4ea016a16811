"""Pruned weights stay pruned while a model learns.

A model carries its mask in its zeros (see `model.matrices`). A weight that is exactly zero gets no gradient, so it has no
momentum, counts in no gradient norm, and no step of the optimizer moves it: 0 stays 0 through decay and all. A
resumed run or another process needs no mask handed over.

Beside LoRA's thin matrices the pruned ones are frozen, but what is added to them is not zero there; so the part of it that
falls on zeros is taken out again, in every forward pass and when it is merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.model.matrices import block_weights, says_pruned

PRUNED_SHARE = 0.15
"""Of the weights inside the blocks; rounding to four bits makes zeros, too: up to an eighth of them."""


def count_zeros(model: SentenceTransformer) -> int:
    """How many weights inside the blocks are zero."""
    return sum(int((weight == 0).sum()) for _, weight in block_weights(model))


def keeps_zeros(model: SentenceTransformer, wanted: bool | None) -> bool:
    """As wanted; with None, whether the model says it was pruned, or holds so many zeros that someone must have."""
    if wanted is not None:
        return wanted
    if says_pruned(model):
        return True
    weights = sum(weight.numel() for _, weight in block_weights(model))
    return count_zeros(model) >= PRUNED_SHARE * max(1, weights)


@contextmanager
def zeros_kept(model: SentenceTransformer, wanted: bool | None = True) -> Iterator[None]:
    """While the block runs, what is zero learns nothing; with None, only where the model was pruned."""
    if not keeps_zeros(model, wanted):
        yield
        return

    def silence(weight: nn.Parameter) -> Callable[[Tensor | None], Tensor | None]:
        # Of the weights as they are now: a training that rounds has more zeros while it computes.
        pruned = weight.detach() == 0

        def silent(gradient: Tensor | None) -> Tensor | None:
            if gradient is not None:
                return gradient.masked_fill(pruned.to(gradient.device), 0.0)
            if weight.grad is not None:  # a narrow model has added its part to what was there
                weight.grad.masked_fill_(pruned.to(weight.grad.device), 0.0)
            return None

        return silent

    handles = [
        torch.Tensor.register_hook(weight, silence(weight))  # type: ignore[no-untyped-call]
        for _, weight in block_weights(model)
        if weight.requires_grad and bool((weight == 0).any())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep_zeros_beside(layer: Any, adapter: str, *, transposed: bool) -> Callable[[], None]:
    """Make a LoRA layer leave the zeros of its matrix alone; what comes back is to be called after the merge."""
    weight: nn.Parameter = layer.get_base_layer().weight
    pruned = weight.detach() == 0

    def corrected(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        falls: Tensor = layer.get_delta_weight(adapter) * pruned.to(output.device)
        added: Tensor = inputs[0] @ (falls if transposed else falls.T).to(inputs[0].dtype)
        return output - added.to(output.dtype)

    handle = layer.register_forward_hook(corrected)

    def merged() -> None:
        handle.remove()
        with torch.no_grad():
            weight.masked_fill_(pruned.to(weight.device), 0.0)

    return merged
