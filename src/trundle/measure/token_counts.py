"""How often a model's tokens occur in texts: one stream, all cores, memory for a few thousand texts at a time.

Texts are read whole, without prompts and special tokens. Documents are kept beside the counts only where a score needs
them again (tf-idf weighs a token by how many texts have it, which is known at the end), and then on disk.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trundle.progress import SILENT, Progress

CHUNK = 4096
"""Texts per call of the tokenizers library, which shares them out over the cores."""

Ids = NDArray[np.int64]
Documents = tuple[Ids, Ids]
"""Token ids of some texts one after the other, and how many of them each text has."""


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """What one pass over the texts found, by token id."""

    texts: int
    occurrences: Ids
    """How often each token occurs."""
    documents: Ids
    """In how many texts it occurs."""

    @property
    def tokens(self) -> int:
        """All tokens of all texts."""
        return int(self.occurrences.sum())


def tokenised(tokenizer: Tokenizer, texts: Iterable[str], progress: Progress = SILENT) -> Iterator[Documents]:
    """The texts' token ids, some thousand texts at a time."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    stream = iter(texts)
    with progress.task("reading texts", None) as advance:
        while chunk := list(itertools.islice(stream, CHUNK)):
            encodings = plain.encode_batch_fast(chunk, add_special_tokens=False)
            lists = [encoding.ids for encoding in encodings]
            lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
            flat = itertools.chain.from_iterable(lists)
            yield np.fromiter(flat, dtype=np.int64, count=int(lengths.sum())), lengths
            advance(len(chunk))


def count_tokens(chunks: Iterable[Documents], size: int) -> TokenCounts:
    """Count tokens with ids below `size`."""
    texts, occurrences, documents = 0, np.zeros(size, np.int64), np.zeros(size, np.int64)
    for ids, lengths in chunks:
        occurrences += np.bincount(ids, minlength=size)
        _, terms, _ = terms_of((ids, lengths), size)
        documents += np.bincount(terms, minlength=size)
        texts += len(lengths)
    return TokenCounts(texts=texts, occurrences=occurrences, documents=documents)


def terms_of(chunk: Documents, size: int) -> tuple[Ids, Ids, Ids]:
    """Each token of each text once: the number of its text, its id, and how often it is there."""
    ids, lengths = chunk
    texts = np.repeat(np.arange(len(lengths)), lengths)
    pairs, counts = np.unique(texts * size + ids, return_counts=True)
    return pairs // size, pairs % size, counts


class Spill:
    """Chunks on their way past, written to a file so that they can be read once more."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._written = file, 0

    def through(self, chunks: Iterable[Documents]) -> Iterator[Documents]:
        """The same chunks, kept."""
        for ids, lengths in chunks:
            for array in (ids, lengths):
                np.save(self._file, array.astype(np.int32), allow_pickle=False)
            self._written += 1
            yield ids, lengths

    def again(self) -> Iterator[Documents]:
        """The chunks that went past."""
        self._file.seek(0)
        for _ in range(self._written):
            ids, lengths = (np.load(self._file, allow_pickle=False).astype(np.int64) for _ in range(2))
            yield ids, lengths


@contextmanager
def spilling() -> Iterator[Spill]:
    """A spill that is gone afterwards."""
    with tempfile.TemporaryFile() as file:
        yield Spill(file)
