"""A model's vocabulary as a choice among its tokens needs to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from torch import Tensor

from trundle.errors import BadModel
from trundle.model.anatomy import _pinned_ids, family_of
from trundle.model.surgery import transformer_of
from trundle.model.tokenizer import (
    MergeTree,
    _backend_of,
    _basic_ids,
    _characters,
    _Content,
    _knows_bytes,
    _least_likely,
    _named_ids,
    _tokenizer_content,
    _tokens_by_id,
    _unknown_id,
    _with_tokens,
)


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Every token of a model, and which of them it can't do without."""

    backend: Tokenizer
    size: int
    """Rows of the embedding; a model may have more of them than its tokenizer has tokens."""
    tokens: Mapping[int, str]
    named: frozenset[int]
    """What the tokenizer, the config or a prompt names: special and added tokens, and those the prompts are read as."""
    basic: frozenset[int]
    """Bytes or single characters, with which everything can be spelled."""
    characters: Mapping[int, str]
    """Those of the basic tokens that are characters, which can be done without where a text has none of them."""
    unknown: int | None
    tree: MergeTree

    @property
    def unknown_token(self) -> str | None:
        """What is written for what can't be read."""
        return None if self.unknown is None else self.tokens[self.unknown]

    def least(self, *, rebuilt: bool = True) -> set[int]:
        """What stays whatever is chosen: what is named and, where the tokenizer is rebuilt, all that it spells with."""
        return self.tree.with_halves(self.named | self.basic) if rebuilt else set(self.named)


def read_vocabulary(model: SentenceTransformer) -> Vocabulary:
    """What there is to choose from."""
    transformer = transformer_of(model)
    tokenizer, backbone = transformer.tokenizer, transformer.model
    backend, content = _backend_of(tokenizer), _tokenizer_content(tokenizer)
    assert tokenizer is not None
    tokens = _tokens_by_id(content)
    size = len(_embedding(model))
    beyond = [number for number in tokens if number >= size]
    if beyond:
        raise BadModel(
            f"the tokenizer has the token {tokens[beyond[0]]!r} with id {beyond[0]}, but the model only {size} rows; "
            "use the tokenizer the model was made with"
        )
    named = _named_ids(content) | set(tokenizer.all_special_ids)
    named.update(_pinned_ids(family_of(backbone.config.model_type), backbone.config))
    for prompt in model.prompts.values():
        if prompt:
            named.update(backend.encode(prompt, add_special_tokens=False).ids)
    return Vocabulary(
        backend=backend,
        size=size,
        tokens=tokens,
        named=frozenset(named & tokens.keys()),
        basic=frozenset(_basic_ids(content)),
        characters={} if _knows_bytes(content) else _spare_characters(content),
        unknown=_unknown_id(content, tokenizer.unk_token),
        tree=MergeTree(content),
    )


def _spare_characters(content: _Content) -> dict[int, str]:
    least = _least_likely(content)
    return {number: text for number, text in _characters(content).items() if number != least}


def token_vectors(model: SentenceTransformer, ids: Sequence[int]) -> NDArray[np.float32]:
    """The embeddings of some tokens."""
    chosen: NDArray[np.float32] = _embedding(model)[list(ids)].float().cpu().numpy()
    return chosen


def rebuilt_backend(model: SentenceTransformer, kept: Sequence[int]) -> Tokenizer:
    """The model's tokenizer with only some tokens, to try it out without cutting the model."""
    tokenizer = transformer_of(model).tokenizer
    assert tokenizer is not None
    return _backend_of(_with_tokens(tokenizer, kept))


def _embedding(model: SentenceTransformer) -> Tensor:
    table = cast("Any", transformer_of(model).model).get_input_embeddings()
    weight: Tensor = table.weight.detach()
    return weight
