"""A transformers tokenizer with fewer tokens, and every setting it had."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from trundle.errors import BadModel
from trundle.model.tokenizer_file import cut_file, tokens_by_id

SECOND_COPIES = {"_vocab": "vocab", "_merges": "merges"}
"""Where some tokenizer classes keep what their backend was made of, and what it is called in the file."""


def tokenizer_content(tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
    """What the tokenizer's tokenizer.json says; a tokenizer without one can't be rebuilt."""
    content: dict[str, Any] = json.loads(backend_of(tokenizer).to_str())
    return content


def backend_of(tokenizer: PreTrainedTokenizerBase | None) -> Tokenizer:
    """The tokenizers library's own object inside a tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise BadModel(
            f"the tokenizer {type(tokenizer).__name__} is a slow one, without a tokenizer.json; make one with "
            "transformers.convert_slow_tokenizer and save it with the model"
        )
    return backend


def with_tokens(tokenizer: PreTrainedTokenizerBase, kept: Sequence[int]) -> PreTrainedTokenizerBase:
    """The tokenizer with only the kept ids, renumbered in the order given."""
    small = cut_file(tokenizer_content(tokenizer), kept)
    backend = _checked(small)
    # Everything is copied but the backend, which the new one takes the place of.
    new = copy.deepcopy(tokenizer, {id(backend_of(tokenizer)): backend})
    new.init_kwargs.pop("added_tokens_decoder", None)
    for attribute, name in SECOND_COPIES.items():
        if hasattr(new, attribute):
            setattr(new, attribute, small["model"].get(name))
    return new


def _checked(content: dict[str, Any]) -> Tokenizer:
    """The content as the library reads it, if that is what it says: it numbers added tokens by its own rule."""
    backend = Tokenizer.from_str(json.dumps(content))
    wanted = {token: number for number, token in tokens_by_id(content).items()}
    if backend.get_vocab(with_added_tokens=True) != wanted:
        raise BadModel(
            "the tokenizer's added tokens do not follow its own vocabulary, so it can't be renumbered; keep all tokens"
        )
    return backend
