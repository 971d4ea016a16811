"""What comes after pooling: the linear layer that leads into another model's space, and normalisation."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling
from torch import nn

from trundle.errors import BadInput
from trundle.model.static import static_table, with_mapped_table
from trundle.model.surgery import transformer_of, with_modules


def normalises(model: SentenceTransformer) -> bool:
    """Whether the model's vectors have length 1 by construction; what truncate_dim cuts them to, afterwards, has not."""
    return len(model) > 0 and isinstance(model[-1], Normalize) and model.truncate_dim is None


def check_untruncated(model: SentenceTransformer, mend: str) -> None:
    """Refuse to train a model whose vectors are cut after its last module: training sees the whole ones."""
    if model.truncate_dim is not None:
        raise BadInput(
            f"the model's vectors are cut to {model.truncate_dim} numbers by its truncate_dim, which training does not "
            f"see; {mend}"
        )


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
    body = with_modules(model, modules)
    body.truncate_dim = None
    return body


def is_bare_table(body: SentenceTransformer) -> bool:
    """Whether pooled vectors are plain means of a table, into which a linear map can go."""
    return static_table(body) is not None and len(body) == 1


def with_new_head(
    model: SentenceTransformer, width: int, *, normalise: bool, seed: int
) -> SentenceTransformer:
    """The model with its linear head replaced by one that knows nothing yet."""
    columns = without_head(model).get_embedding_dimension() or 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(columns, width)
    return with_linear_head(
        model, linear.weight.detach().numpy(), linear.bias.detach().numpy(), normalise=normalise
    )


def with_mean_pooling(model: SentenceTransformer) -> SentenceTransformer:
    """The model with the mean over tokens as its pooled vector."""
    modules = [
        Pooling(module.embedding_dimension, pooling_mode="mean", include_prompt=module.include_prompt)
        if isinstance(module, Pooling)
        else module
        for module in model
    ]
    return with_modules(model, modules)


def with_prompts(
    model: SentenceTransformer, prompts: Mapping[str, str | None], default: str | None
) -> SentenceTransformer:
    """The model asked the way another one is, if that one has prompts at all."""
    if any(prompts.values()):
        model.prompts, model.default_prompt_name = dict(prompts), default
    return model


def copy_of(model: SentenceTransformer) -> SentenceTransformer:
    """A model that can be trained without touching the one it came from."""
    return copy.deepcopy(model)


def with_linear_head(
    model: SentenceTransformer, weight: NDArray[np.float32], bias: NDArray[np.float32], *, normalise: bool
) -> SentenceTransformer:
    """The model with its linear head replaced by this map, saved inside it."""
    body = without_head(model)
    table = static_table(body)
    if table is not None and is_bare_table(body):
        after = [Normalize()] if normalise else []
        return with_modules(body, [with_mapped_table(table, weight, bias), *after])
    dtype = next(body.parameters()).dtype
    return with_modules(
        body, [*body, *(part.to(dtype) for part in linear_head(weight, bias, normalise=normalise))]
    )


def linear_head(
    weight: NDArray[np.float32], bias: NDArray[np.float32], *, normalise: bool
) -> list[nn.Module]:
    """A linear map as the modules after pooling."""
    rows, columns = weight.shape
    dense = Dense(
        columns,
        rows,
        activation_function=nn.Identity(),
        init_weight=torch.tensor(weight),
        init_bias=torch.tensor(bias),
    )
    return [dense, Normalize()] if normalise else [dense]


def rescale_head(model: SentenceTransformer, *, mean: float, spread: float) -> None:
    """Let the model's last linear layer answer in other units, in place."""
    dense = model[-1]
    assert isinstance(dense, Dense)
    with torch.no_grad():
        dense.linear.weight.mul_(spread)
        dense.linear.bias.mul_(spread).add_(mean)


def name_labels(model: SentenceTransformer, labels: Sequence[str]) -> None:
    """Write into the config which class each score is for; without labels there is one score, a number."""
    config = transformer_of(model).model.config
    config.id2label = dict(enumerate(labels)) or {0: "LABEL_0"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "single_label_classification" if labels else "regression"


def reinitialised(model: SentenceTransformer, *, seed: int) -> SentenceTransformer:
    """The model with the backbone's weights drawn anew, as its own code draws them: a student that knows nothing."""
    transformer = transformer_of(model)
    twin = copy.copy(transformer)
    twin._modules = dict(transformer._modules)
    backbone = transformer.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(backbone)(copy.deepcopy(backbone.config))
    if getattr(backbone, "pooler", fresh) is None:
        del fresh.pooler
        fresh.register_module("pooler", None)
    twin.model = nn.Module.to(fresh.train(backbone.training), backbone.device, backbone.dtype)
    return with_modules(model, [twin, *list(model)[1:]])
