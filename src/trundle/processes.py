"""Which of several processes this is, as `torchrun` and `accelerate launch` tell in the environment."""

from __future__ import annotations

import os


def is_first() -> bool:
    """Whether this process is the one that asks, writes and reports; alone, it always is."""
    return int(os.environ.get("RANK", "0")) == 0


def several() -> bool:
    """Whether other processes work on the same run."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
