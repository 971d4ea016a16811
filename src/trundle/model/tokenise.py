"""Texts → what a model takes, without the detours of the library's own preprocessing.

What the library does between tokens and tensors holds Python's lock, and costs a fast device a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from torch import Tensor

from trundle.errors import BadModel

Features = dict[str, Any]
"""What a SentenceTransformer takes."""

NO_LIMIT = 1_000_000
"""Tokenizers without a length limit state an absurd one."""

SAMPLES = ("query: 12 plain words?", "tabs\tand  spaces ", "Größe 東京 🙂", "[MASK] <s> </s> <pad>", "")


def check_fast_tokenizer(model: SentenceTransformer) -> None:
    """Refuse a tokenizer written in Python: it would hold up the training."""
    if not getattr(model.tokenizer, "is_fast", True):
        raise BadModel("the model's tokenizer is not a fast one; save it with a tokenizer.json first")


def make_tokeniser(model: SentenceTransformer) -> Callable[[list[str]], Features]:
    """What the model takes for texts. Costly to make and cheap to use: make it once."""
    return find_short_cut(model) or model.preprocess


def find_short_cut(model: SentenceTransformer) -> ShortCut | None:
    """The fast way, where it gives exactly what the model's own preprocessing gives, which is tried out first."""
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    longest = min(tokenizer.model_max_length, NO_LIMIT // 100)
    samples = ["a", "Some more words, ünlike the first.", "long " * longest, *SAMPLES]
    expected = model.preprocess(samples)
    short_cut = ShortCut(tokenizer, expected)
    return short_cut if _alike(short_cut(samples), expected) else None


class ShortCut:
    """A tokenizer of its own, whose tokens go straight into one array."""

    def __init__(self, tokenizer: Any, like: Mapping[str, Any]) -> None:
        self._rust = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._rust.no_padding()
        self._rust.no_truncation()
        if tokenizer.model_max_length < NO_LIMIT:
            self._rust.enable_truncation(tokenizer.model_max_length, direction=tokenizer.truncation_side)
        self._pad = tokenizer.pad_token_id
        self._left = tokenizer.padding_side == "left"
        self._has_types = "token_type_ids" in like
        self._constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}

    def __call__(self, texts: list[str]) -> Features:
        """Tokenise and pad."""
        tokens, lengths = self.flat(texts)
        return self.features(torch.from_numpy(tokens), lengths.cumsum() - lengths, lengths)

    def flat(self, texts: list[str]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """All tokens in one row, and how many each text has."""
        rows = [encoding.ids for encoding in self._rust.encode_batch_fast(texts)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum())), lengths

    def features(self, tokens: Tensor, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Features:
        """The texts that begin at `starts` in the row of tokens, padded, on the device of the tokens."""
        width = int(lengths.max())
        first, count = (torch.from_numpy(array).to(tokens.device)[:, None] for array in (starts, lengths))
        places = torch.arange(width, device=tokens.device)[None, :]
        if self._left:
            places = places - (width - count)
        real = (places >= 0) & (places < count)
        where = (first + places).clamp(0, len(tokens) - 1)
        features = {
            "input_ids": torch.where(real, tokens[where].long(), self._pad),
            "attention_mask": real.long(),
        }
        if self._has_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        return features | self._constants


def _alike(ours: Features, theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        for name, value in ours.items()
    )
