"""The modules after the backbone: linear heads, normalisation, prompts, and pairs of two models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Module, Normalize, Pooling, Router
from torch import nn

from trundle.errors import BadInput, BadModel
from trundle.model.static import _with_mapped_table, static_table
from trundle.model.surgery import _drop_pooler_unless_in, _shallow_copy, transformer_of, with_modules


def normalises(model: SentenceTransformer) -> bool:
    """Return whether all vectors have length 1; vectors that truncate_dim shortens do not."""
    return len(model) > 0 and isinstance(model[-1], Normalize) and model.truncate_dim is None


def check_untruncated(model: SentenceTransformer, fix: str) -> None:
    """Reject a model with a truncate_dim, because training sees its full vectors; `fix` completes the error."""
    if model.truncate_dim is not None:
        raise BadInput(
            f"the model's vectors are truncated to {model.truncate_dim} dimensions by its truncate_dim, which training "
            f"does not see; {fix}"
        )


def without_head(model: SentenceTransformer) -> SentenceTransformer:
    """Return the model up to its pooled vectors, sharing its weights."""
    modules = list(model)
    while len(modules) > 1 and _is_linear(modules[-1]):
        modules.pop()
    body = with_modules(model, modules)
    body.truncate_dim = None
    return body


def _is_linear(module: nn.Module) -> bool:
    """Whether a module after pooling is a linear layer or a normalisation, which a new linear head replaces."""
    if isinstance(module, Dense):
        return isinstance(module.activation_function, nn.Identity) and not module.use_residual
    return isinstance(module, Normalize)


def _is_bare_table(body: SentenceTransformer) -> bool:
    """Whether pooled vectors are plain means of a table, so that a linear map can be applied to the table."""
    return static_table(body) is not None and len(body) == 1


def with_new_head(
    model: SentenceTransformer, width: int, *, normalise: bool, seed: int
) -> SentenceTransformer:
    """Return the model with its linear head replaced by a randomly initialised one."""
    columns = without_head(model).get_embedding_dimension() or 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(columns, width).requires_grad_(False)
    return with_linear_head(model, linear.weight.numpy(), linear.bias.numpy(), normalise=normalise)


def with_mean_pooling(model: SentenceTransformer) -> SentenceTransformer:
    """Return the model with mean pooling."""
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
    """Give the model these prompts in place, unless all of them are empty."""
    if any(prompts.values()):
        model.prompts, model.default_prompt_name = dict(prompts), default
    return model


def copy_of(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy that can be trained without changing the original."""
    return copy.deepcopy(model)


def with_linear_head(
    model: SentenceTransformer, weight: NDArray[np.float32], bias: NDArray[np.float32], *, normalise: bool
) -> SentenceTransformer:
    """Return the model with its linear head replaced by this linear map."""
    body = without_head(model)
    table = static_table(body)
    if table is not None and _is_bare_table(body):
        after = [Normalize()] if normalise else []
        return with_modules(body, [_with_mapped_table(table, weight, bias), *after])
    dtype = next(body.parameters()).dtype
    head = linear_head(weight, bias, normalise=normalise)
    return with_modules(body, [*body, *(module.to(dtype) for module in head)])


def linear_head(
    weight: NDArray[np.float32], bias: NDArray[np.float32], *, normalise: bool
) -> list[nn.Module]:
    """Return a linear map as the modules after pooling."""
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
    """Scale the output of the last linear layer by `spread` and shift it by `mean`, in place."""
    dense = model[-1]
    assert isinstance(dense, Dense)
    with torch.no_grad():
        dense.linear.weight.mul_(spread)
        dense.linear.bias.mul_(spread).add_(mean)


def name_labels(model: SentenceTransformer, labels: Sequence[str]) -> None:
    """Write the class names of the scores into the config; no labels means regression."""
    config = transformer_of(model).model.config
    config.id2label = dict(enumerate(labels)) or {0: "LABEL_0"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "single_label_classification" if labels else "regression"


def reinitialised(model: SentenceTransformer, *, seed: int) -> SentenceTransformer:
    """Return the model with the backbone's weights initialised again, by its own code."""
    transformer = transformer_of(model)
    twin = _shallow_copy(transformer)
    backbone = transformer.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(backbone)(copy.deepcopy(backbone.config))
    _drop_pooler_unless_in(backbone, fresh)
    twin.model = nn.Module.to(fresh.train(backbone.training), backbone.device, backbone.dtype)
    return with_modules(model, [twin, *list(model)[1:]])


_Role = Literal["text", "query", "document"]
_DOCUMENT_NAMES = ("document", "passage", "corpus")


def prompts_by_role(model: SentenceTransformer) -> dict[_Role, str]:
    """Return the prompt of each of the roles text, query and document; empty if there is none."""
    prompts = model.prompts
    default = prompts.get(model.default_prompt_name or "") or ""
    document = next((prompts[name] for name in _DOCUMENT_NAMES if name in prompts), default)
    return {"text": default, "query": prompts.get("query", default) or "", "document": document or ""}


def _pools_prompts(model: SentenceTransformer) -> bool:
    return not any(isinstance(module, Pooling) and not module.include_prompt for module in model)


def check_prompts_are_pooled(model: SentenceTransformer, prompts: Mapping[str, str | None]) -> None:
    """Reject a model that encodes prompts but leaves them out of pooling, which training can't imitate."""
    if not _pools_prompts(model) and (any(prompts.values()) or any(prompts_by_role(model).values())):
        raise BadModel(
            "the model leaves its prompts out of pooling, which align can't train; set include_prompt to true"
        )


_TEXT_PROMPT = "text"


def check_pairable(student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Reject two models whose vectors can't be compared."""
    ours, theirs = student.get_embedding_dimension(), teacher.get_embedding_dimension()
    if ours != theirs:
        raise BadInput(
            f"the student's vectors have {ours} dimensions and the teacher's {theirs}, so they can't be paired; "
            "align the student with the teacher's space with trundle align"
        )


def paired(student: SentenceTransformer, teacher: SentenceTransformer) -> SentenceTransformer:
    """Return one model that encodes queries with the student and documents with the teacher, sharing their weights."""
    check_pairable(student, teacher)
    theirs = prompts_by_role(teacher)
    prompts = {name: prompt or "" for name, prompt in teacher.prompts.items()}
    prompts |= {"query": prompts_by_role(student)["query"], "document": theirs["document"]}
    default = teacher.default_prompt_name
    if default is not None and prompts.get(default) != theirs["text"]:
        default = _TEXT_PROMPT
        prompts[default] = theirs["text"]
    router = Router.for_query_document(
        query_modules=cast("list[Module]", list(student)),
        document_modules=cast("list[Module]", list(teacher)),
    )
    return SentenceTransformer(
        modules=[router],
        device=str(student.device),
        prompts=prompts,
        default_prompt_name=default,
        similarity_fn_name=teacher.similarity_fn_name,
    ).eval()


def is_pair(model: SentenceTransformer) -> bool:
    """Return whether the model is a pair of a query model and a document model."""
    router = model[0] if len(model) == 1 else None
    return isinstance(router, Router) and {"query", "document"} <= set(router.sub_modules)


def one_route(both: SentenceTransformer, route: str) -> SentenceTransformer:
    """Return the query or document model of a pair, sharing its weights."""
    router = both[0]
    if not isinstance(router, Router) or route not in router.sub_modules:
        raise BadInput(f"the model has no route {route!r}; pass a folder that trundle pair wrote")
    prompts = prompts_by_role(both)
    own = {name: prompt or "" for name, prompt in both.prompts.items()} if route == "document" else {}
    return SentenceTransformer(
        modules=list(cast("nn.Sequential", router.sub_modules[route])),
        device=str(both.device),
        prompts={**own, "query": prompts["query"], "document": prompts["document"]},
        default_prompt_name=both.default_prompt_name if route == "document" else None,
        similarity_fn_name=both.similarity_fn_name,
    ).eval()
