"""Gradient checkpointing for any family: between forward and backward pass only what goes from block to block is kept.

Not every transformers model offers it (MPNet does not), and none does outside of training mode. The anatomy knows where
the blocks are, which is all that is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trundle.model.anatomy import family_of


@contextmanager
def recomputed_blocks(backbone: PreTrainedModel) -> Iterator[None]:
    """Inside, each block's inner states are computed again when the backward pass needs them.

    A decoder's cache of keys and values is off meanwhile: blocks that run twice would fill it twice.
    """
    caching = getattr(backbone.config, "use_cache", None)
    if caching:
        backbone.config.use_cache = False
    blocks: list[nn.Module] = list(
        backbone.get_submodule(family_of(backbone.config.model_type).blocks).children()
    )
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
        if caching:
            backbone.config.use_cache = caching
