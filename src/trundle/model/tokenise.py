"""Texts → what a model takes, without the detours of the library's own preprocessing.

What the library does between tokens and tensors holds Python's lock, and costs a fast device a fifth of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

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
    """What the model takes for texts. Costly to make and cheap to use: make it once.

    A short cut is taken where it gives exactly what the model's own preprocessing gives, which is tried out first.
    """
    tokenizer = model.tokenizer
    preprocess: Callable[[list[str]], Features] = model.preprocess
    if hasattr(tokenizer, "backend_tokenizer"):
        longest = min(tokenizer.model_max_length, NO_LIMIT // 100)
        samples = ["a", "Some more words, ünlike the first.", "long " * longest, *SAMPLES]
        expected = preprocess(samples)
        short_cut = _ShortCut(tokenizer, expected)
        if _alike(short_cut(samples), expected):
            preprocess = short_cut
    return preprocess


class _ShortCut:
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
        rows = [encoding.ids for encoding in self._rust.encode_batch_fast(texts)]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        width = int(lengths.max())
        places = np.arange(width)
        real = places >= (width - lengths)[:, None] if self._left else places < lengths[:, None]
        tokens = np.full(real.shape, self._pad, np.int64)
        tokens[real] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
        features = {
            "input_ids": torch.from_numpy(tokens),
            "attention_mask": torch.from_numpy(real.astype(np.int64)),
        }
        if self._has_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        return features | self._constants


def _alike(ours: Features, theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        for name, value in ours.items()
    )
