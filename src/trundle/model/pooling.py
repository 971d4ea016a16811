"""How token states become one vector, and what a decoder needs for it: an end token to read the whole text from.

A decoder's tokenizer usually ends a text with nothing, so its last token is some piece of a word. For last-token pooling the
tokenizer is changed to add its end token itself, which every library that opens the folder then does as well.
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
from trundle.model.device import dropping
from trundle.model.layout import layout_of
from trundle.model.surgery import Cut, _cut_backbone, transformer_of, with_modules

_PoolingMode = Literal["mean", "weightedmean", "last", "cls"]
_LIBRARY_NAMES = {"last": "lasttoken"}
_PROBES = ("a", "one two three")


def with_pooling(
    model: SentenceTransformer, mode: _PoolingMode | None = None, *, include_prompt: bool | None = None
) -> SentenceTransformer:
    """The model pooled in another way, as it was where nothing is said.

    With `last`, texts end in the tokenizer's end token from now on. Without `include_prompt`, a prompt is read but its
    tokens don't count.
    """
    modules = list(model)
    places = [place for place, module in enumerate(modules) if isinstance(module, Pooling)]
    if len(places) != 1 or (mode is not None and not isinstance(modules[places[0]].pooling_mode, str)):
        raise BadModel(
            "the model does not pool in one single way, so it can't be changed; leave pooling: keep"
        )
    old = modules[places[0]]
    modules[places[0]] = Pooling(
        old.embedding_dimension,
        old.pooling_mode if mode is None else _LIBRARY_NAMES.get(mode, mode),
        include_prompt=old.include_prompt if include_prompt is None else include_prompt,
    )
    if mode == "last":
        modules[0] = copy.copy(modules[0])
        modules[0].processor = _ending_tokenizer(model.tokenizer)
    return with_modules(model, modules)


def _ending_tokenizer(tokenizer: Any) -> Any:
    """A tokenizer that ends every text with a special token, as it was if it does so already."""
    if _ends_well(tokenizer, tokenizer.all_special_ids):
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
        reopened = AutoTokenizer.from_pretrained(folder)
    if not _ends_well(reopened, [tokenizer.eos_token_id]):
        raise BadModel(
            f"a {type(tokenizer).__name__} does not keep an added end token when it is saved; choose another pooling"
        )
    return reopened


def _ends_well(tokenizer: Any, ends: Sequence[int]) -> bool:
    return all(ids and ids[-1] in ends for ids in tokenizer(list(_PROBES))["input_ids"])


_ENTRY = "is_causal"
_PROBE = 6


def with_both_ways(model: SentenceTransformer) -> SentenceTransformer:
    """A copy of a decoder in which every token sees the whole text. The saved config says so to whoever opens it."""
    transformer = transformer_of(model)
    family = layout_of(transformer.model).family
    if not family.causal:
        raise BadModel(f"a {family.name} model looks both ways already; leave attention: keep")
    twin = copy.deepcopy(model)
    backbone = transformer_of(twin).model
    setattr(backbone.config, _ENTRY, False)
    # Built anew, since blocks remember from their construction which way they look.
    rebuilt = _cut_backbone(backbone, Cut())
    if not _looks_both_ways(rebuilt):
        raise BadModel(
            f"a {family.name} model can't be made to look both ways by its config alone; leave attention: keep"
        )
    transformer_of(twin).model = rebuilt
    return with_modules(model, list(twin))


def _looks_both_ways(backbone: PreTrainedModel) -> bool:
    """Whether the first token's state depends on the last token, tried out with and without padding."""
    one = torch.ones(2, _PROBE, dtype=torch.long, device=backbone.device)
    other = one.clone()
    other[:, -2] = 0
    padded = torch.ones_like(one)
    padded[:, -1] = 0
    with torch.no_grad(), dropping(backbone, False):
        seen = [
            (
                backbone(input_ids=one, attention_mask=mask).last_hidden_state[:, 0]
                - backbone(input_ids=other, attention_mask=mask).last_hidden_state[:, 0]
            ).any()
            for mask in (torch.ones_like(one), padded)
        ]
    return all(bool(answer) for answer in seen)
