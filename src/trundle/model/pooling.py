"""Change the pooling of a model, and the end token and bidirectional attention that pooling a decoder may need.

A decoder's tokenizer usually adds no end token, so the last token is part of a word. For last-token pooling the
tokenizer is changed to add its end token itself, which every library that loads the folder then does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedModel

from trundle.errors import BadModel
from trundle.model.encode import dropping
from trundle.model.layout import layout_of
from trundle.model.surgery import Cut, _cut_backbone, transformer_of, with_modules

_PoolingMode = Literal["mean", "weightedmean", "last", "cls"]
_PROBE_TEXTS = ["a", "one two three"]
_PROBE_LENGTH = 6


def with_pooling(
    model: SentenceTransformer, mode: _PoolingMode | None = None, *, include_prompt: bool | None = None
) -> SentenceTransformer:
    """Return the model with another pooling; None keeps a setting.

    With `last`, the tokenizer ends every text with its end token. Without `include_prompt`, a prompt is encoded but its
    tokens are not pooled.
    """
    modules = list(model)
    places = [place for place, module in enumerate(modules) if isinstance(module, Pooling)]
    if len(places) != 1 or (mode is not None and not isinstance(modules[places[0]].pooling_mode, str)):
        raise BadModel("the model does not have a single pooling mode to change; use pooling: keep")
    old = modules[places[0]]
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
    if tokenizer.eos_token is None:
        raise BadModel(
            "the tokenizer has no end token for last-token pooling; set eos_token in tokenizer_config.json, "
            "or choose another pooling"
        )
    ending = copy.deepcopy(tokenizer)
    end, backend = f"{tokenizer.eos_token}:0", ending.backend_tokenizer
    adding = processors.TemplateProcessing(
        single=f"$A:0 {end}",
        pair=f"$A:0 {end} $B:1 {tokenizer.eos_token}:1",
        special_tokens=[(tokenizer.eos_token, tokenizer.eos_token_id)],
    )
    before = backend.post_processor
    backend.post_processor = adding if before is None else processors.Sequence([before, adding])
    with TemporaryDirectory() as folder:
        ending.save_pretrained(folder)
        reloaded = AutoTokenizer.from_pretrained(folder)
    if not _ends_with(reloaded, [tokenizer.eos_token_id]):
        raise BadModel(
            f"a {type(tokenizer).__name__} loses an added end token when it is saved; choose another pooling"
        )
    return reloaded


def _ends_with(tokenizer: Any, ends: Sequence[int]) -> bool:
    return all(ids and ids[-1] in ends for ids in tokenizer(_PROBE_TEXTS)["input_ids"])


def with_both_ways(model: SentenceTransformer) -> SentenceTransformer:
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
        raise BadModel(
            f"the config of a {family.name} model can't make its attention bidirectional; use attention: keep"
        )
    transformer_of(twin).model = rebuilt
    return with_modules(model, list(twin))


def _attends_both_ways(backbone: PreTrainedModel) -> bool:
    """Whether the first token's state depends on a later token, with and without padding."""
    one = torch.ones(2, _PROBE_LENGTH, dtype=torch.long, device=backbone.device)
    other = one.clone()
    other[:, -2] = 0
    padded = torch.ones_like(one)
    padded[:, -1] = 0
    with torch.no_grad(), dropping(backbone, False):
        for mask in (torch.ones_like(one), padded):
            first = backbone(input_ids=one, attention_mask=mask).last_hidden_state[:, 0]
            if torch.equal(first, backbone(input_ids=other, attention_mask=mask).last_hidden_state[:, 0]):
                return False
    return True
