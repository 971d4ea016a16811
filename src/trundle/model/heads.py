"""What comes after pooling: the linear layer that leads into another model's space, and normalisation."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import nn

from trundle.model.surgery import with_modules


def normalises(model: SentenceTransformer) -> bool:
    """Whether the model's vectors have length 1 by construction."""
    return len(model) > 0 and isinstance(model[-1], Normalize)


def is_linear(module: nn.Module) -> bool:
    """Whether a module after pooling is a linear map or a rescaling, which one linear map can stand in for."""
    if isinstance(module, Dense):
        return isinstance(module.activation_function, nn.Identity) and not module.use_residual
    return isinstance(module, Normalize)


def without_head(model: SentenceTransformer) -> SentenceTransformer:
    """The model up to its pooled vectors. It shares its weights with the model it was taken from."""
    modules = list(model)
    while len(modules) > 1 and is_linear(modules[-1]):
        modules.pop()
    return with_modules(model, modules)


def with_linear_head(
    model: SentenceTransformer, weight: NDArray[np.float32], bias: NDArray[np.float32], *, normalise: bool
) -> SentenceTransformer:
    """The model with its linear head replaced by this map, saved inside it."""
    body = without_head(model)
    rows, columns = weight.shape
    dense = Dense(
        columns,
        rows,
        activation_function=nn.Identity(),
        init_weight=torch.from_numpy(np.ascontiguousarray(weight)),
        init_bias=torch.from_numpy(np.ascontiguousarray(bias)),
    )
    dtype = next(body.parameters()).dtype
    return with_modules(body, [*body, dense.to(dtype), *([Normalize()] if normalise else [])])
