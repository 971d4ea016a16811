"""Texts to token ids with the tokenizers library alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trundle.errors import BadModel
from trundle.runtime.description import Description

_Ids = NDArray[np.int64]


class Reader:
    """A tokenizer with the model's settings. It has no state, so threads can share it."""

    def __init__(self, folder: Path, description: Description) -> None:
        path = folder / description.tokenizer
        if not path.is_file():
            raise BadModel(f"{path} is missing; export the model again")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise BadModel(f"{path} can't be read ({error}); export the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(description.max_tokens)
        self._description = description
        self._end = self._tokenizer.encode(description.after, add_special_tokens=False).ids

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, truncated to the model's limit, special tokens included."""
        before, after = self._description.before, self._description.after
        if not before and not after:
            special = self._description.special_tokens
            read = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            return [encoding.ids for encoding in read]
        framed = [before + text + after for text in texts]
        read = self._tokenizer.encode_batch_fast(framed, add_special_tokens=False)
        return [self._with_end(encoding.ids) for encoding in read]

    def _with_end(self, ids: list[int]) -> list[int]:
        # sentence-transformers keeps the end of the template when it truncates a text.
        truncated = len(ids) == self._description.max_tokens and len(self._end) > 0
        return [*ids[: -len(self._end)], *self._end] if truncated else ids


def padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[_Ids, _Ids]:
    """Ids and attention mask of rows padded on the right.

    The right side, whatever side the model was trained with: positions then start at 0 for every text, and a text's
    vector does not depend on the length of the others.
    """
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return ids, mask
