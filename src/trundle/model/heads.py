"""What comes after pooling: the linear layer that leads into another model's space, and normalisation."""

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


def _is_linear(module: nn.Module) -> bool:
    """Whether a module after pooling is a linear map or a rescaling, which one linear map can stand in for."""
    if isinstance(module, Dense):
        return isinstance(module.activation_function, nn.Identity) and not module.use_residual
    return isinstance(module, Normalize)


def without_head(model: SentenceTransformer) -> SentenceTransformer:
    """The model up to its pooled vectors. It shares its weights with the model it was taken from."""
    modules = list(model)
    while len(modules) > 1 and _is_linear(modules[-1]):
        modules.pop()
    body = with_modules(model, modules)
    body.truncate_dim = None
    return body


def _is_bare_table(body: SentenceTransformer) -> bool:
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
    if table is not None and _is_bare_table(body):
        after = [Normalize()] if normalise else []
        return with_modules(body, [_with_mapped_table(table, weight, bias), *after])
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


_Role = Literal["text", "query", "document"]
_DOCUMENT_NAMES = ("document", "passage", "corpus")


def prompts_by_role(model: SentenceTransformer) -> dict[_Role, str]:
    """The prompt for each of the roles text, query and document; empty where there is none."""
    prompts = model.prompts
    default = prompts.get(model.default_prompt_name or "") or ""
    document = next((prompts[name] for name in _DOCUMENT_NAMES if name in prompts), default)
    return {"text": default, "query": prompts.get("query", default) or "", "document": document or ""}


def _pools_prompts(model: SentenceTransformer) -> bool:
    """Whether a prompt is for this model nothing but the beginning of the text."""
    return not any(isinstance(module, Pooling) and not module.include_prompt for module in model)


def check_prompts_are_pooled(model: SentenceTransformer, prompts: Mapping[str, str | None]) -> None:
    """Refuse the one arrangement training can't imitate: prompts that are read but not pooled."""
    if not _pools_prompts(model) and (any(prompts.values()) or any(prompts_by_role(model).values())):
        raise BadModel(
            "the model leaves its prompts out of pooling, which align can't train; set include_prompt to true"
        )


_TEXT_PROMPT = "text"


def check_pairable(student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Refuse two models whose vectors can't be compared."""
    ours, theirs = student.get_embedding_dimension(), teacher.get_embedding_dimension()
    if ours != theirs:
        raise BadInput(
            f"the student's vectors are {ours} wide and the teacher's {theirs}, so they make no pair; "
            "bring the student into the teacher's space with trundle align"
        )


def paired(student: SentenceTransformer, teacher: SentenceTransformer) -> SentenceTransformer:
    """One model of both; it shares its weights with them."""
    check_pairable(student, teacher)
    prompts, default = _prompts(student, teacher)
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


def _prompts(student: SentenceTransformer, teacher: SentenceTransformer) -> tuple[dict[str, str], str | None]:
    """The prompts of both by role, the teacher's other ones, and the name of the one that plain `encode` uses."""
    theirs = prompts_by_role(teacher)
    prompts = {name: prompt or "" for name, prompt in teacher.prompts.items()}
    prompts |= {"query": prompts_by_role(student)["query"], "document": theirs["document"]}
    default = teacher.default_prompt_name
    if default is not None and prompts.get(default) != theirs["text"]:
        default = _TEXT_PROMPT
        prompts[default] = theirs["text"]
    return prompts, default


def is_pair(model: SentenceTransformer) -> bool:
    """Whether the model is two, one for queries and one for documents."""
    router = model[0] if len(model) == 1 else None
    return isinstance(router, Router) and {"query", "document"} <= set(router.sub_modules)


def one_route(both: SentenceTransformer, route: str) -> SentenceTransformer:
    """The student or the teacher of a pair as a model of its own; it shares its weights with the pair."""
    router = both[0]
    if not isinstance(router, Router) or route not in router.sub_modules:
        raise BadInput(f"the model has no route {route!r}; give a folder that trundle pair wrote")
    prompts = prompts_by_role(both)
    own = {name: prompt or "" for name, prompt in both.prompts.items()} if route == "document" else {}
    kept = {**own, "query": prompts["query"], "document": prompts["document"]}
    return SentenceTransformer(
        modules=list(cast("nn.Sequential", router.sub_modules[route])),
        device=str(both.device),
        prompts=kept,
        default_prompt_name=both.default_prompt_name if route == "document" else None,
        similarity_fn_name=both.similarity_fn_name,
    ).eval()
