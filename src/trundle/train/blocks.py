"""Other ways to run a model's blocks while it learns, for any family: in less memory, or compiled.

The anatomy knows where the blocks are, which is all that is needed. Gradient checkpointing is not offered by every
transformers model (MPNet has none), and by none outside of training mode. Compiled, a block is a few large kernels in
place of a hundred small ones: a GPU that runs a small model spends its time waiting to be told what to do next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trundle.errors import BadInput
from trundle.model.anatomy import family_of
from trundle.model.matrices import block_weights, is_pruned

_GRAPHS = 32
"""Versions of one block at most: with and without gradient, dropout, padding. torch gives up after 8."""


@contextmanager
def recomputed_blocks(backbone: PreTrainedModel) -> Iterator[None]:
    """Inside, each block's inner states are computed again when the backward pass needs them."""
    blocks = _blocks(backbone)
    with _without_cache(backbone):
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


@contextmanager
def compiled_blocks(backbone: PreTrainedModel) -> Iterator[None]:
    """Inside, blocks are compiled when they are first run: once for all of them, since they are alike."""
    check_compiler()
    blocks = _blocks(backbone)
    with _without_cache(backbone), torch._dynamo.config.patch(recompile_limit=_GRAPHS):
        for block in blocks:
            block.compile(dynamic=True)
        try:
            yield
        finally:
            for block in blocks:
                block._compiled_call_impl = None


def check_compiler() -> None:
    """Refuse before the first step what would fail in it."""
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise BadInput("compile needs a C compiler, and there is none; install gcc, or leave compile out")
    if torch.cuda.is_available() and find_spec("triton") is None:
        raise BadInput("compile needs triton on this GPU; pip install triton, or leave compile out")


def _blocks(backbone: PreTrainedModel) -> list[nn.Module]:
    return list(backbone.get_submodule(family_of(backbone.config.model_type).blocks).children())


@contextmanager
def _without_cache(backbone: PreTrainedModel) -> Iterator[None]:
    """A decoder's cache of keys and values is off: blocks that run twice would fill it twice, and it tells blocks apart."""
    caching = getattr(backbone.config, "use_cache", None)
    if caching:
        backbone.config.use_cache = False
    try:
        yield
    finally:
        if caching:
            backbone.config.use_cache = caching


_PRUNED_SHARE = 0.15
"""Of the weights inside the blocks; rounding to four bits makes zeros, too: up to an eighth of them."""


def _count_zeros(model: SentenceTransformer) -> int:
    """How many weights inside the blocks are zero."""
    return sum(int((weight == 0).sum()) for _, weight in block_weights(model))


def keeps_zeros(model: SentenceTransformer, wanted: bool | None) -> bool:
    """As wanted; with None, whether the model says it was pruned, or holds so many zeros that someone must have."""
    if wanted is not None:
        return wanted
    if is_pruned(model):
        return True
    weights = sum(weight.numel() for _, weight in block_weights(model))
    return _count_zeros(model) >= _PRUNED_SHARE * max(1, weights)


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
