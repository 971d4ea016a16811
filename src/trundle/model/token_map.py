"""The tokens of a model: which of them can be removed, and a map from removed tokens to kept ones.

`MappedTransformer` is the only custom module in a model's folder. If trundle is installed,
`SentenceTransformer(folder, trust_remote_code=True)` loads it; otherwise the library reports that it can't
import trundle. The map is applied in `forward`, so a graph traced from the model contains it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from torch import Tensor

from trundle.errors import BadModel, ImpossibleCut
from trundle.model import tokenizer as tokenizer_file
from trundle.model.anatomy import _family_of, _pinned_ids
from trundle.model.surgery import Cut, _cut_backbone, _shallow_copy, transformer_of, with_modules

_MAP_FILE = "token_map.npy"


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Every token of a model, and which of them it needs."""

    backend: Tokenizer
    size: int
    """Rows of the embedding; there may be more of them than tokens."""
    tokens: Mapping[int, str]
    named: frozenset[int]
    """Special and added tokens, tokens that the config names, and the tokens of the prompts."""
    basic: frozenset[int]
    """Bytes or single characters, which can spell every text."""
    characters: Mapping[int, str]
    """The basic tokens that are characters, which can be removed if no text contains them."""
    unknown: int | None
    tree: tokenizer_file.MergeTree

    @property
    def unknown_token(self) -> str | None:
        """The unknown token."""
        return None if self.unknown is None else self.tokens[self.unknown]

    def least(self, *, rebuilt: bool = True) -> set[int]:
        """Return the tokens that are always kept; the basic ones only if the tokenizer is `rebuilt`."""
        return self.tree.with_halves(self.named | self.basic) if rebuilt else set(self.named)

    def unreachable(self) -> set[int]:
        """Return the WordPiece tokens that no text becomes, such as BERT's `[unused1]`.

        Texts are normalised and split into words before the lookup, so a token that this changes is not met.
        """
        model, normaliser, splitter = self.backend.model, self.backend.normalizer, self.backend.pre_tokenizer
        if not isinstance(model, WordPiece) or splitter is None:
            return set()

        def words(text: str) -> list[str]:
            found = splitter.pre_tokenize_str(text if normaliser is None else normaliser.normalize_str(text))
            return [word for word, _ in found]

        inside = model.continuing_subword_prefix
        bare = {
            number: self.tokens[number].removeprefix(inside) for number in self.tokens.keys() - self.named
        }
        return {number for number, text in bare.items() if words(text) != [text]}


def read_vocabulary(model: SentenceTransformer) -> Vocabulary:
    """Return the vocabulary of a model."""
    transformer = transformer_of(model)
    tokenizer, config = transformer.tokenizer, transformer.model.config
    backend, size = tokenizer_file._backend_of(tokenizer), len(_embedding(model))
    assert tokenizer is not None
    content = tokenizer_file._tokenizer_content(tokenizer, size)
    tokens = tokenizer_file._tokens_by_id(content)
    if beyond := [token for number, token in tokens.items() if number >= size]:
        raise BadModel(f"token {beyond[0]!r} has no embedding; use the model's own tokenizer")
    named = tokenizer_file._named_ids(content) | set(tokenizer.all_special_ids)
    named.update(_pinned_ids(_family_of(config.model_type), config))
    for prompt in model.prompts.values():
        if prompt:
            named.update(backend.encode(prompt, add_special_tokens=False).ids)
    characters = {} if tokenizer_file._knows_bytes(content) else tokenizer_file._single_characters(content)
    least = tokenizer_file._least_likely(content)
    return Vocabulary(
        backend=backend,
        size=size,
        tokens=tokens,
        named=frozenset(named & tokens.keys()),
        basic=frozenset(tokenizer_file._basic_ids(content)),
        characters={number: text for number, text in characters.items() if number != least},
        unknown=tokenizer_file._unknown_id(content, tokenizer.unk_token),
        tree=tokenizer_file.MergeTree(content),
    )


def token_vectors(model: SentenceTransformer, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the embeddings of some tokens."""
    chosen: NDArray[np.float32] = _embedding(model)[list(ids)].float().cpu().numpy()
    return chosen


def _embedding(model: SentenceTransformer) -> Tensor:
    table = cast("Any", transformer_of(model).model).get_input_embeddings()
    weight: Tensor = table.weight.detach()
    return weight


def rebuilt_backend(model: SentenceTransformer, kept: Sequence[int]) -> Tokenizer:
    """Return the model's tokenizer with only the kept tokens, without cutting the model."""
    tokenizer = transformer_of(model).tokenizer
    assert tokenizer is not None
    return tokenizer_file._backend_of(tokenizer_file._with_tokens(tokenizer, kept, len(_embedding(model))))


class MappedTransformer(Transformer):
    """A transformer with fewer tokens than its tokenizer: a table replaces each id by a kept one."""

    token_map: Tensor
    """For each id of the tokenizer, a row of the embedding."""

    @classmethod
    def around(cls, transformer: Transformer, token_map: Tensor) -> Self:
        """Return the transformer with a map in front of it, sharing everything else."""
        mapped = cls.__new__(cls)
        mapped.__dict__.update(transformer.__dict__)
        mapped._modules, mapped._buffers = dict(transformer._modules), dict(transformer._buffers)
        mapped.register_buffer("token_map", token_map.to(transformer.model.device))
        return mapped

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Replace the ids and run the transformer."""
        ids = features["input_ids"]
        result: dict[str, Any] = super().forward({**features, "input_ids": self.token_map[ids]}, **kwargs)
        return result | {"input_ids": ids}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the map next to the weights."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        table = self.token_map.cpu().numpy().astype(np.int32)
        np.save(Path(output_path) / _MAP_FILE, table, allow_pickle=False)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load the transformer and its map. The library inspects this signature."""
        hub: dict[str, Any] = {"subfolder": subfolder, "token": token, "cache_folder": cache_folder}
        hub |= {"revision": revision, "local_files_only": local_files_only}
        transformer = Transformer.load(model_name_or_path, **hub, **kwargs)
        path = cls.load_file_path(model_name_or_path, filename=_MAP_FILE, **hub)
        if path is None:
            raise BadModel(f"{model_name_or_path} has no {_MAP_FILE}; download the full model")
        try:
            table = np.load(path, mmap_mode="r", allow_pickle=False)  # reads no more than the file holds
        except ValueError as error:
            raise BadModel(f"{path} is damaged ({error}); download the model again") from error
        if not isinstance(table, np.ndarray) or table.ndim != 1:
            raise BadModel(f"{path} is not a list of tokens; download the model again")
        if table.max(initial=0) >= transformer.model.config.vocab_size:
            raise BadModel(f"{path} points beyond the model's vocabulary; download the model again")
        return cls.around(transformer, torch.from_numpy(table.astype(np.int64)))


_MAPPED_TYPE = f"{MappedTransformer.__module__}.{MappedTransformer.__name__}"
"""The type in a folder's modules.json."""


def has_token_map(model: SentenceTransformer) -> bool:
    """Return whether loading the model requires trundle."""
    return len(model) > 0 and isinstance(model[0], MappedTransformer)


def cut_with_map(
    model: SentenceTransformer, kept: Sequence[int], stands_for: Sequence[int]
) -> SentenceTransformer:
    """Return the model with only the kept rows; `stands_for` has a kept id for each id of its tokenizer."""
    transformer = transformer_of(model)
    if isinstance(transformer, MappedTransformer):
        raise ImpossibleCut("the model's tokens are mapped already; cut the model it was made from instead")
    new = {old: position for position, old in enumerate(kept)}
    twin = _shallow_copy(transformer)
    twin.model = _cut_backbone(transformer.model, Cut(vocab=tuple(kept)))
    twin.processor = copy.deepcopy(transformer.processor)
    mapped = MappedTransformer.around(twin, torch.tensor([new[old] for old in stands_for]))
    return with_modules(model, [mapped, *(copy.deepcopy(module) for module in list(model)[1:])])
