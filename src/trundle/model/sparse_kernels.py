"""Matrices of which two in each four weights are zero, on GPUs that multiply them at half the cost.

What this is not: it changes no weight, and where there is no such GPU it changes nothing at all.
"""

from __future__ import annotations

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.sparse import to_sparse_semi_structured

from trundle.model.heads import copy_of
from trundle.model.surgery import transformer_of

OLDEST = (8, 0)
"""The first GPUs with such units."""
TILE = 64
"""The kernels take matrices whose sides are multiples of this."""


def is_two_of_four(weight: Tensor) -> bool:
    """Whether no four weights side by side in a row have more than two that are not zero."""
    if weight.ndim != 2 or weight.shape[1] % 4:
        return False
    return bool(((weight.reshape(-1, 4) != 0).sum(dim=1) <= 2).all())


def with_sparse_kernels(model: SentenceTransformer) -> tuple[SentenceTransformer, int]:
    """A copy in bf16 that runs its 2:4 matrices sparsely, for inference, and how many those are.

    On other devices the model itself comes back, dense, with 0.
    """
    if model.device.type != "cuda" or torch.cuda.get_device_capability(model.device) < OLDEST:
        return model, 0
    fast = copy_of(model).to(torch.bfloat16).requires_grad_(False)
    found = 0
    for module in transformer_of(fast).model.modules():
        if isinstance(module, nn.Linear) and _fits(module.weight):
            module.weight = nn.Parameter(
                to_sparse_semi_structured(module.weight.detach()), requires_grad=False
            )
            found += 1
    return fast, found


def _fits(weight: Tensor) -> bool:
    return all(size % TILE == 0 for size in weight.shape) and is_two_of_four(weight)
