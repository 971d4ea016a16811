"""What a device is good at, and what it can't be trusted with."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trundle.errors import BadInput


def multiplies_bf16(device: torch.device) -> bool:
    """Whether there are units for it: on every GPU of today, and on processors with AMX."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())


def _too_large(what: str, mend: str) -> BadInput:
    """What is said of a device that runs full, instead of a page of addresses."""
    return BadInput(f"{what} needs more memory than the GPU has left; {mend}")


def free_gpu_memory() -> None:
    """Let go of what nobody holds any more: a training leaves cycles behind, and Python does not hurry to collect those."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def memory_told(what: str, mend: str) -> Iterator[None]:
    """A device that runs full names the mend."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_large(what, mend) from error


@contextmanager
def sound_gradients() -> Iterator[None]:
    """Attention without cuDNN's kernels: with a mask, their gradients are NaN for some lengths.

    Seen with Qwen2.5 and texts of 64 tokens on an H200, torch 2.11 (pytorch/pytorch issue 196678).
    """
    before: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


@contextmanager
def dropping(model: nn.Module, drops: bool) -> Iterator[None]:
    """While the block runs the model drops out as in training, or not; afterwards each module does what it did."""
    before = {module: module.training for module in model.modules()}
    model.train(drops)
    try:
        yield
    finally:
        for module, trained in before.items():
            module.training = trained
