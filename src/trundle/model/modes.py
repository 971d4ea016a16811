"""Looking at a model without changing how it stands.

A SentenceTransformer may say that it trains while none of its modules does, so `model.train(model.training)` would switch
dropout on: each module is put back by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


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
