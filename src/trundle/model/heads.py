"""The modules after the backbone: pooling, linear heads, normalisation, prompts, and pairs of two models."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Module, Normalize, Pooling, Router
from tokenizers import processors
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from trundle.embedder import Role
from trundle.errors import BadInput, BadModel
from trundle.model.layout import layout_of
from trundle.model.static import _with_mapped_table, static_table
from trundle.model.surgery import (
    Cut,
    _cut_backbone,
    _match_pooler,
    _shallow_copy,
    transformer_of,
    with_modules,
)


def normalises(model: SentenceTransformer) -> bool:
    """Return whether all vectors have length 1; vectors that truncate_dim shortens do not."""
    return len(model) > 0 and isinstance(model[-1], Normalize) and model.truncate_dim is None


def check_untruncated(model: SentenceTransformer, fix: str) -> None:
    """Reject a model with a truncate_dim, because training ignores it; `fix` completes the error."""
    if model.truncate_dim is not None:
        what = f"the model's vectors are truncated to {model.truncate_dim} dimensions by its truncate_dim"
        raise BadInput(f"{what}, which training does not see; {fix}")


def without_head(model: SentenceTransformer) -> SentenceTransformer:
    """Return the model up to its pooled vectors, sharing its weights."""
    body = with_modules(model, _modules_without_head(model))
    body.truncate_dim = None
    return body


def _modules_without_head(model: SentenceTransformer) -> list[nn.Module]:
    """Return the modules up to the pooled vectors."""
    modules = list(model)
    while len(modules) > 1 and _is_linear(modules[-1]):
        modules.pop()
    return modules


def _is_linear(module: nn.Module) -> bool:
    """Whether a new linear head replaces this module: a linear layer or a normalisation."""
    if isinstance(module, Dense):
        return isinstance(module.activation_function, nn.Identity) and not module.use_residual
    return isinstance(module, Normalize)


def with_new_head(
    model: SentenceTransformer, width: int, *, normalise: bool, seed: int
) -> SentenceTransformer:
    """Return the model with its linear head replaced by a randomly initialised one."""
    columns = without_head(model).get_embedding_dimension() or 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        linear = nn.Linear(columns, width).requires_grad_(False)
    return with_linear_head(model, linear.weight.numpy(), linear.bias.numpy(), normalise=normalise)


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
    if table is not None and len(body) == 1:
        # a linear map of a mean is the mean of the mapped vectors
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
    matrix, offset = torch.tensor(weight), torch.tensor(bias)
    dense = Dense(columns, rows, activation_function=nn.Identity(), init_weight=matrix, init_bias=offset)
    return [dense, Normalize()] if normalise else [dense]


def reinitialised(model: SentenceTransformer, *, seed: int) -> SentenceTransformer:
    """Return the model with the backbone's weights initialised again, by its own code."""
    transformer = transformer_of(model)
    twin = _shallow_copy(transformer)
    backbone = transformer.model
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        fresh = type(backbone)(copy.deepcopy(backbone.config))
    _match_pooler(backbone, fresh)
    twin.model = nn.Module.to(fresh.train(backbone.training), backbone.device, backbone.dtype)
    return with_modules(model, [twin, *list(model)[1:]])


_MARK = "marked place"
_PoolingMode = Literal["mean", "weightedmean", "last", "cls", "max"]


def with_pooling(
    model: SentenceTransformer, mode: _PoolingMode | None = None, *, include_prompt: bool | None = None
) -> SentenceTransformer:
    """Return the model with another pooling; None keeps a setting.

    With `last`, the tokenizer adds its end token. Without `include_prompt`, a prompt's tokens are not pooled.
    """
    modules = list(model)
    places = [place for place, module in enumerate(modules) if isinstance(module, Pooling)]
    if len(places) != 1:
        raise BadModel("the model does not have a single pooling module to change; use pooling: keep")
    old = modules[places[0]]
    followed = any(isinstance(module, Dense) for module in modules[places[0] :])
    if mode is not None and not isinstance(old.pooling_mode, str) and followed:
        raise BadModel("the model's linear layer needs vectors pooled in several ways; use pooling: keep")
    modules[places[0]] = Pooling(
        old.embedding_dimension,
        old.pooling_mode if mode is None else "lasttoken" if mode == "last" else mode,
        include_prompt=old.include_prompt if include_prompt is None else include_prompt,
    )
    if mode == "last":
        modules[0] = copy.copy(modules[0])
        modules[0].processor = _ending_tokenizer(model.tokenizer)
    return with_modules(model, modules)


def _ending_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer, or if it does not end texts with a special token, one that adds its end token."""
    if _ends_with(tokenizer, tokenizer.all_special_ids):
        return tokenizer
    if (end := tokenizer.eos_token) is None:
        raise BadModel("the tokenizer has no end token for last-token pooling; choose another pooling")
    ending = copy.deepcopy(tokenizer)
    backend, special = ending.backend_tokenizer, [(end, tokenizer.eos_token_id)]
    adding = processors.TemplateProcessing(
        single=f"$A:0 {end}:0", pair=f"$A:0 {end}:0 $B:1 {end}:1", special_tokens=special
    )
    before = backend.post_processor
    backend.post_processor = adding if before is None else processors.Sequence([before, adding])
    with TemporaryDirectory() as folder:
        ending.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
    if not _ends_with(reloaded, [tokenizer.eos_token_id]):
        raise BadModel(f"a saved {type(tokenizer).__name__} loses an added end token; choose another pooling")
    return reloaded


def _ends_with(tokenizer: Any, ends: Sequence[int]) -> bool:
    return all(ids and ids[-1] in ends for ids in tokenizer(["a", "one two three"])["input_ids"])


def with_bidirectional_attention(model: SentenceTransformer) -> SentenceTransformer:
    """Return a copy of a decoder with bidirectional attention, which its saved config records."""
    family = layout_of(transformer_of(model).model).family
    if not family.causal:
        raise BadModel(f"a {family.name} model has bidirectional attention already; use attention: keep")
    twin = copy.deepcopy(model)
    backbone = transformer_of(twin).model
    backbone.config.is_causal = False
    # Built again, because blocks read the attention direction in their constructors.
    rebuilt = _cut_backbone(backbone, Cut())
    if not _attends_both_ways(rebuilt):
        raise BadModel(f"a {family.name} model can't get bidirectional attention; use attention: keep")
    transformer_of(twin).model = rebuilt
    return with_modules(model, list(twin))


def _attends_both_ways(backbone: PreTrainedModel) -> bool:
    """Whether the first token's state depends on a later token, with and without padding."""
    one = torch.ones(2, 6, dtype=torch.long, device=backbone.device)
    other = one.clone()
    other[:, -2] = 0
    padded = torch.ones_like(one)
    padded[:, -1] = 0
    training = backbone.training
    backbone.train(False)
    with torch.no_grad():
        states = [
            [backbone(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0] for ids in (one, other)]
            for mask in (torch.ones_like(one), padded)
        ]
    backbone.train(training)
    return not any(torch.equal(first, second) for first, second in states)


def prompts_by_role(model: SentenceTransformer) -> dict[Role, str]:
    """Return the prompt of each of the roles text, query and document; empty if there is none."""
    prompts = model.prompts
    default = prompts.get(model.default_prompt_name or "") or ""
    names = ("document", "passage", "corpus")
    document = next((prompts[name] for name in names if name in prompts), default)
    return {"text": default, "query": prompts.get("query", default) or "", "document": document or ""}


def chat_start(model: SentenceTransformer) -> str:
    """Return what the chat template puts before a user's text, without a token that the tokenizer adds.

    It is empty without a template. What the template puts after a text can't change the states of the text's
    own tokens in a causal model.
    """
    tokenizer = model.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        return ""
    if "message" in transformer_of(model).modality_config:
        raise BadInput("the model puts its chat template around every text already; leave chat out")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": _MARK}], tokenize=False)
    start, mark, _ = str(rendered).partition(_MARK)
    if not mark:
        raise BadModel("the model's chat template changes the text itself; leave chat out")
    adds_first = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return start.removeprefix(tokenizer.bos_token) if adds_first else start


def _pools_prompts(model: SentenceTransformer) -> bool:
    return not any(isinstance(module, Pooling) and not module.include_prompt for module in model)


def prompt_tokens(model: SentenceTransformer, prompt: str) -> int:
    """Return how many tokens of a prompt stand before a text; its last space may become part of a word."""
    alone, followed = model.tokenizer([prompt, f"{prompt}a"])["input_ids"]
    same = [first == second for first, second in zip(alone, followed, strict=False)]
    return same.index(False) if False in same else len(same)


def check_first_words_are_pooled(model: SentenceTransformer) -> None:
    """Reject a prompt that is not pooled and merges with the word after it, which would be lost as well.

    sentence-transformers counts the tokens of the prompt alone.
    """
    special = set(model.tokenizer.all_special_ids)
    for prompt in {} if _pools_prompts(model) else {*prompts_by_role(model).values()} - {""}:
        alone = model.tokenizer(prompt)["input_ids"]
        if prompt_tokens(model, prompt) < len(alone) - (alone[-1] in special):
            raise BadInput(
                f"the end of the prompt {prompt!r} merges with the first word of a text, so pooling would "
                "leave that word out; end the prompt with a newline, or pool prompts"
            )


def check_prompts_are_pooled(model: SentenceTransformer, prompts: Mapping[str, str | None]) -> None:
    """Reject a model that encodes prompts but leaves them out of pooling, which training can't imitate."""
    if not _pools_prompts(model) and (any(prompts.values()) or any(prompts_by_role(model).values())):
        raise BadModel("align can't train a model that does not pool its prompts; set include_prompt to true")


def check_pairable(student: SentenceTransformer, teacher: SentenceTransformer) -> None:
    """Reject two models whose vectors can't be compared."""
    ours, theirs = student.get_embedding_dimension(), teacher.get_embedding_dimension()
    if ours != theirs:
        raise BadInput(
            f"student vectors have {ours} dimensions, the teacher's {theirs}; align the student first"
        )


def paired(student: SentenceTransformer, teacher: SentenceTransformer) -> SentenceTransformer:
    """Return one model that encodes queries with the student and documents with the teacher."""
    check_pairable(student, teacher)
    theirs = prompts_by_role(teacher)
    prompts = {name: prompt or "" for name, prompt in teacher.prompts.items()}
    prompts |= {"query": prompts_by_role(student)["query"], "document": theirs["document"]}
    default = teacher.default_prompt_name
    if default is not None and prompts.get(default) != theirs["text"]:
        default, prompts["text"] = "text", theirs["text"]
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
