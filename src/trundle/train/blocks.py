"""Other ways to train the blocks of any family: in less memory, compiled, or with pruned weights.

Not every transformers model supports gradient checkpointing (MPNet does not), and none outside of training
mode. A compiled block is a few large kernels instead of a hundred small ones: with a small model, launching
kernels takes most of a GPU's time.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from subprocess import DEVNULL, PIPE, Popen
from threading import Thread
from typing import IO, Any, cast

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trundle.errors import BadInput
from trundle.model.anatomy import _BY_MODEL_TYPE
from trundle.model.encode import _without_key_values, fast_forward, sound_gradients
from trundle.model.matrices import block_weights, is_pruned

_GRAPHS = 32
"""Compiled versions of one block at most, for gradient, dropout and padding; torch's default is 8."""
_COMPILER = "from trundle.train.blocks import _compile; _compile()"
_COMPILED_BATCHES = ((512, 48), (512, 16))
"""Texts and tokens of the batches that a process compiles with; what it compiles takes any other."""
_NICENESS = 10
"""Lowers the priority of that process, which occupies all cores while this one works."""


@contextmanager
def changed_blocks(
    *backbones: PreTrainedModel, compiled: bool = False, recomputed: bool = False
) -> Iterator[None]:
    """Inside this context, blocks are compiled when they first run, or the backward pass recomputes them.

    With both, it calls the compiled block again: torch 2.11 can't compile recomputation with dropout.
    """
    changed = backbones if compiled or recomputed else ()
    blocks = [block for backbone in changed for block in _blocks(backbone)]
    with ExitStack() as stack:
        if compiled:
            check_compiler()
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=_GRAPHS))
            # Else a batch whose length is equal to the width by chance is compiled for that case alone.
            shapes: Any = torch.fx.experimental._config
            stack.enter_context(shapes.patch(use_duck_shape=False))
        for backbone in changed:
            stack.enter_context(_without_key_values(backbone))
        for block in blocks:
            if compiled:
                block.forward = torch.compile(block.forward, dynamic=True)
            if recomputed:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


@contextmanager
def compiling_ahead(backbone: PreTrainedModel, *, dropout: bool, bf16: bool) -> Iterator[Callable[[], None]]:
    """Inside this context, another process compiles the blocks; yields a function that waits for it.

    When the blocks first run in this process, torch finds them in its cache. Only the shape of the backbone
    matters. If the other process fails, the first run takes longer.
    """
    command, paths = [sys.executable, "-P", "-c", _COMPILER], os.pathsep.join(filter(None, sys.path))
    with Popen(
        command, stdin=PIPE, stderr=DEVNULL, env=os.environ | {"PYTHONPATH": paths}, process_group=0
    ) as compiler:
        try:
            tasks = cast("IO[bytes]", compiler.stdin)  # stays open: the process ends with its parent
            pickle.dump((type(backbone), backbone.config, dropout, bf16), tasks)
            tasks.flush()
            yield lambda: cast("None", compiler.wait())
        finally:
            compiler.kill()


def _compile() -> None:
    """Compile the blocks of the backbone that standard input describes, with weights that do not matter."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    kind, config, dropout, bf16 = pickle.load(sys.stdin.buffer)
    Thread(target=lambda: os._exit(1) if not os.read(0, 1) else None, daemon=True).start()
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    backbone = kind._from_config(config).to(device).train(dropout)
    with fast_forward(backbone), changed_blocks(backbone, compiled=True), sound_gradients():
        for texts, tokens in _COMPILED_BATCHES:
            mask = torch.ones(texts, tokens, dtype=torch.long, device=device)
            mask[0, -1] = 0
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16, cache_enabled=False):
                states = backbone(input_ids=torch.ones_like(mask), attention_mask=mask).last_hidden_state
            states.float().sum().backward()


def can_compile() -> bool:
    """Returns whether this machine has what compiling needs."""
    try:
        check_compiler()
    except BadInput:
        return False
    return True


def check_compiler() -> None:
    """Rejects a machine on which compiling would fail."""
    compilers = [os.environ.get("CXX"), os.environ.get("CC"), "g++", "gcc", "clang", "cc"]
    if not any(name and shutil.which(name) for name in compilers):
        raise BadInput("compile needs a C compiler, and none is installed; install gcc, or leave compile out")
    if torch.cuda.is_available() and find_spec("triton") is None:
        raise BadInput("compile needs triton on this GPU; pip install triton, or leave compile out")


def _blocks(backbone: PreTrainedModel) -> list[nn.Module]:
    family = _BY_MODEL_TYPE.get(backbone.config.model_type)
    return [] if family is None else list(backbone.get_submodule(family.blocks).children())


_PRUNED_SHARE = 0.15
"""Share of the weights inside the blocks; rounding to four bits sets up to an eighth of them to zero."""


def _count_zeros(model: SentenceTransformer) -> int:
    return sum(int((weight == 0).sum()) for _, weight in block_weights(model))


def keeps_zeros(model: SentenceTransformer, wanted: bool | None) -> bool:
    """Returns `wanted`; for None, whether the model is marked as pruned or has many zeros."""
    if wanted is not None:
        return wanted
    if is_pruned(model):
        return True
    weights = sum(weight.numel() for _, weight in block_weights(model))
    return _count_zeros(model) >= _PRUNED_SHARE * max(1, weights)


@contextmanager
def zeros_kept(model: SentenceTransformer, wanted: bool | None = True) -> Iterator[None]:
    """Inside this context, zero weights get no gradient; with None, only if the model was pruned."""
    if not keeps_zeros(model, wanted):
        yield
        return

    def masking_hook(weight: nn.Parameter) -> Callable[[Tensor | None], Tensor | None]:
        # The present zeros: quantisation-aware training has more of them while it computes.
        pruned = weight.detach() == 0

        def mask(gradient: Tensor | None) -> Tensor | None:
            if gradient is not None:
                return gradient.masked_fill(pruned.to(gradient.device), 0.0)
            if weight.grad is not None:  # a narrow model has added its part in place
                weight.grad.masked_fill_(pruned.to(weight.grad.device), 0.0)
            return None

        return mask

    handles = [
        torch.Tensor.register_hook(weight, masking_hook(weight))  # type: ignore[no-untyped-call]
        for _, weight in block_weights(model)
        if weight.requires_grad and bool((weight == 0).any())
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep_zeros_in_adapter(layer: Any, adapter: str, *, transposed: bool) -> Callable[[], None]:
    """Makes a LoRA layer keep the zeros of its matrix; returns a function to call after the merge."""
    weight: nn.Parameter = layer.get_base_layer().weight
    pruned = weight.detach() == 0

    def corrected(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        removed: Tensor = layer.get_delta_weight(adapter) * pruned.to(output.device)
        added: Tensor = inputs[0] @ (removed if transposed else removed.T).to(inputs[0].dtype)
        return output - added.to(output.dtype)

    handle = layer.register_forward_hook(corrected)

    def after_merge() -> None:
        handle.remove()
        with torch.no_grad():
            weight.masked_fill_(pruned.to(weight.device), 0.0)

    return after_merge
