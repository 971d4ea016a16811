"""What a device is good at."""

from __future__ import annotations

import torch


def multiplies_bf16(device: torch.device) -> bool:
    """Whether there are units for it: on every GPU of today, and on processors with AMX."""
    return device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())
