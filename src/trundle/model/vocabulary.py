"""A model's tokenizer as surgery needs it: its content, and a new one with fewer tokens in its place."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from trundle.errors import BadModel
from trundle.model.anatomy import family_of, pinned_ids
from trundle.model.tokenizer_file import basic_ids, cut_file, named_ids, tokens_by_id

SECOND_COPIES = {"_vocab": "vocab", "_merges": "merges"}
"""Where some tokenizer classes keep what their backend was made of, and what it is called in the file."""


def tokenizer_content(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What the tokenizer's tokenizer.json says; a tokenizer without one can't be rebuilt."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BadModel(
            f"the tokenizer {type(tokenizer).__name__} is a slow one without a tokenizer.json; convert it first with "
            "AutoTokenizer.from_pretrained(MODEL, use_fast=True).save_pretrained(MODEL)"
        )
    content: dict[str, Any] = json.loads(backend.to_str())
    return content


def with_tokens(tokenizer: PreTrainedTokenizerBase, kept: Sequence[int]) -> PreTrainedTokenizerBase:
    """The tokenizer with only the kept ids, renumbered in the order given."""
    content = tokenizer_content(tokenizer)
    small = cut_file(content, kept)
    backend = Tokenizer.from_str(json.dumps(small))
    wanted = {token: number for number, token in tokens_by_id(small).items()}
    if backend.get_vocab(with_added_tokens=True) != wanted:
        raise BadModel(
            "the tokenizer's added tokens do not follow its own vocabulary, so it can't be renumbered; keep all tokens"
        )
    new = copy.copy(tokenizer)
    new.init_kwargs = {
        name: value for name, value in tokenizer.init_kwargs.items() if name != "added_tokens_decoder"
    }
    for attribute, name in SECOND_COPIES.items():
        if hasattr(new, attribute):
            setattr(new, attribute, small["model"].get(name))
    new._tokenizer = backend
    return new


def backend_of(model: SentenceTransformer) -> Tokenizer:
    """The tokenizers library's own tokenizer inside a model."""
    tokenizer = model[0].tokenizer
    tokenizer_content(tokenizer)
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def needed_ids(model: SentenceTransformer) -> frozenset[int]:
    """The ids no cut may drop: what the tokenizer needs itself, single characters, and the model's prompts."""
    tokenizer = model[0].tokenizer
    content = tokenizer_content(tokenizer)
    ids = named_ids(content) | basic_ids(content) | set(tokenizer.all_special_ids)
    backbone = model[0].model
    ids.update(pinned_ids(family_of(backbone.config.model_type), backbone.config))
    backend = backend_of(model)
    for prompt in model.prompts.values():
        if prompt:
            ids.update(backend.encode(prompt, add_special_tokens=False).ids)
    return frozenset(ids)
