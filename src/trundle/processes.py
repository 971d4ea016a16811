"""Which of several processes this is, as `torchrun` and `accelerate launch` tell in the environment."""

from __future__ import annotations

import os


def own_rank() -> int:
    """The number of this process, from 0."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """How many processes work together; alone, 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """Whether this process is the one that asks, writes and reports; alone, it always is."""
    return own_rank() == 0
