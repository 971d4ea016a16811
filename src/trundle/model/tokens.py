"""Tokenise many texts at once, faster than the library's preprocessing and with the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.embedder import Tokens
from trundle.errors import BadModel
from trundle.model.tokenizer import _NO_LIMIT, _bare_backend
from trundle.progress import ahead

Features = dict[str, Any]
"""The input of a SentenceTransformer's forward pass."""
_TokenSlice = tuple[Tensor, Tensor]
"""The tokens of some texts, and the number, first token and length of each text, the longest first."""

_SAMPLES = ("query: 12 plain words?", "tabs\tand  spaces ", "Größe 東京 🙂", "[MASK] <s> </s> <pad>", "")
_FIRST_SLICE, _SLICE = 2048, 1 << 14
"""Texts tokenised at once for a GPU; it waits for the first slice, so that one is small."""
_PIECE = 256
"""Texts whose tokens are copied at once: other threads wait meanwhile."""


def check_fast_tokenizer(model: SentenceTransformer) -> None:
    """Reject a tokenizer written in Python, because it would slow training down."""
    if not getattr(model.tokenizer, "is_fast", True):
        raise BadModel("the model's tokenizer is not a fast one; save it with a tokenizer.json first")


def make_tokeniser(model: SentenceTransformer) -> Callable[[list[str]], Features]:
    """Return a function from texts to the model's input. Making it is slow, so make it once."""
    return find_short_cut(model) or model.preprocess


def find_short_cut(model: SentenceTransformer) -> ShortCut | None:
    """Return a fast tokeniser if it gives exactly the output of the model's own preprocessing on samples."""
    tokenizer = model.tokenizer
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    longest = min(tokenizer.model_max_length, _NO_LIMIT // 100)
    samples = ["a", "Some more words, ünlike the first.", "long " * longest, *_SAMPLES]
    expected = model.preprocess(samples)
    short_cut = ShortCut(tokenizer, expected)
    found = short_cut(samples)
    same = found.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]
        for name, value in found.items()
    )
    return short_cut if same else None


class ShortCut:
    """A copy of a tokenizer that writes its tokens directly into one array."""

    def __init__(self, tokenizer: Any, like: Mapping[str, Any]) -> None:
        self._rust = _bare_backend(tokenizer, tokenizer.model_max_length)
        self._pad = tokenizer.pad_token_id
        self._longest = tokenizer.model_max_length
        self._left = tokenizer.padding_side == "left"
        self._has_types = "token_type_ids" in like
        self._constants = {name: value for name, value in like.items() if not torch.is_tensor(value)}

    def __call__(self, texts: list[str]) -> Features:
        """Tokenise and pad."""
        tokens, lengths = self.flat(texts)
        return self.features(torch.from_numpy(tokens), lengths.cumsum() - lengths, lengths)

    def flat(self, texts: list[str]) -> Tokens:
        """Return all tokens in one array, and the number of tokens of each text."""
        tokens, lengths = [np.empty(0, np.int32)], [np.empty(0, np.int64)]
        for start in range(0, len(texts), _PIECE):
            rows = [each.ids for each in self._rust.encode_batch_fast(texts[start : start + _PIECE])]
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            tokens.append(np.fromiter(chain.from_iterable(rows), np.int32, int(lengths[-1].sum())))
        return np.concatenate(tokens), np.concatenate(lengths)

    def aligned(self, width: int) -> int:
        """Return the next multiple of 8, which GPU kernels need, unless that is more than the model takes."""
        return min(-(-width // 8) * 8, max(width, int(self._longest)))

    def features(
        self,
        tokens: Tensor,
        starts: NDArray[np.int64] | Tensor,
        lengths: NDArray[np.int64] | Tensor,
        width: int | None = None,
    ) -> Features:
        """Return the texts that begin at `starts` in the array of tokens, on its device, padded to `width`.

        The default is the longest length. Pass a width if the lengths are on a GPU: reading them would wait.
        """
        width = int(lengths.max()) if width is None else width
        first, count = (torch.as_tensor(array).to(tokens.device)[:, None] for array in (starts, lengths))
        count = count.clamp(max=width)
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


@contextmanager
def _tokenise_ahead(short_cut: ShortCut, texts: Sequence[str]) -> Iterator[Iterator[_TokenSlice]]:
    """Yield the texts' tokens in slices, the longest texts first; a thread tokenises the next slice."""

    def slices() -> Iterator[_TokenSlice]:
        order = np.argsort(-np.fromiter(map(len, texts), np.int64, len(texts)), kind="stable")
        start, size = 0, _FIRST_SLICE
        while start < len(order):
            rows = order[start : start + size]
            yield _by_length(short_cut.flat([texts[row] for row in rows]), rows)
            start, size = start + size, min(2 * size, _SLICE)

    with ahead(slices()) as ready:
        yield ready


def _by_length(tokens: Tokens, rows: NDArray[np.int64] | None = None) -> _TokenSlice:
    """Return the tokens of some texts, sorted by how many each has; `rows` are the texts' own numbers."""
    flat, lengths = tokens
    rows = np.arange(len(lengths)) if rows is None else rows
    numbers = np.stack([rows, lengths.cumsum() - lengths, lengths])
    return torch.from_numpy(flat), torch.from_numpy(numbers[:, np.argsort(-lengths, kind="stable")])
