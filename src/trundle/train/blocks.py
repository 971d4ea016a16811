"""Other ways to run a model's blocks while it learns, for any family: in less memory, or compiled.

The anatomy knows where the blocks are, which is all that is needed. Gradient checkpointing is not offered by every
transformers model (MPNet has none), and by none outside of training mode. Compiled, a block is a few large kernels in
place of a hundred small ones: a GPU that runs a small model spends its time waiting to be told what to do next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trundle.errors import BadInput
from trundle.model.anatomy import family_of

GRAPHS = 32
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
    with _without_cache(backbone), torch._dynamo.config.patch(recompile_limit=GRAPHS):
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
