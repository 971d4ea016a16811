"""Scores of tokens: each function returns one number per token id."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from trundle.embedder import LONGEST
from trundle.errors import BadModel
from trundle.model.encode import _plain_attention
from trundle.model.surgery import transformer_of
from trundle.model.tokenizer import MergeTree
from trundle.progress import SILENT, Progress

_CHUNK = 4096
"""Texts per call of the tokenizers library, which distributes them over the cores."""
_ATTENTION_BATCH = 16

_Ids = NDArray[np.int64]
_Documents = tuple[_Ids, _Ids]
"""The concatenated token ids of some texts, and the number of ids of each text."""
_Scores = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _TokenCounts:
    """Counts by token id from one pass over the texts."""

    texts: int
    occurrences: _Ids
    """How often each token occurs."""
    documents: _Ids
    """In how many texts each token occurs."""

    @property
    def tokens(self) -> int:
        return int(self.occurrences.sum())


def tokenised(
    tokenizer: Tokenizer, texts: Iterable[str], progress: Progress = SILENT
) -> Iterator[_Documents]:
    """Yield the token ids of the texts, without special tokens, a few thousand texts at a time."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    stream = iter(texts)
    with progress.task("tokenising texts", None) as advance:
        while chunk := list(itertools.islice(stream, _CHUNK)):
            lists = [one.ids for one in plain.encode_batch_fast(chunk, add_special_tokens=False)]
            lengths = np.array([len(ids) for ids in lists], dtype=np.int64)
            flat = itertools.chain.from_iterable(lists)
            yield np.fromiter(flat, dtype=np.int64, count=int(lengths.sum())), lengths
            advance(len(chunk))


def count_tokens(chunks: Iterable[_Documents], size: int) -> _TokenCounts:
    """Count tokens whose ids are below `size`."""
    texts, occurrences, documents = 0, np.zeros(size, np.int64), np.zeros(size, np.int64)
    for ids, lengths in chunks:
        occurrences += np.bincount(ids, minlength=size)
        _, terms, _ = _terms_of((ids, lengths), size)
        documents += np.bincount(terms, minlength=size)
        texts += len(lengths)
    return _TokenCounts(texts=texts, occurrences=occurrences, documents=documents)


def _terms_of(chunk: _Documents, size: int) -> tuple[_Ids, _Ids, _Ids]:
    """Each distinct token of each text: the number of its text, its id, and its count."""
    ids, lengths = chunk
    texts = np.repeat(np.arange(len(lengths)), lengths)
    pairs, counts = np.unique(texts * size + ids, return_counts=True)
    return pairs // size, pairs % size, counts


class _Spill:
    """Copies chunks to a file while they are used, so that a second pass can read them again."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._written = file, 0

    def through(self, chunks: Iterable[_Documents]) -> Iterator[_Documents]:
        for ids, lengths in chunks:
            for array in (ids, lengths):
                np.save(self._file, array.astype(np.int32), allow_pickle=False)
            self._written += 1
            yield ids, lengths

    def again(self) -> Iterator[_Documents]:
        self._file.seek(0)
        for _ in range(self._written):
            ids, lengths = (np.load(self._file, allow_pickle=False).astype(np.int64) for _ in range(2))
            yield ids, lengths


@contextmanager
def _spilling() -> Iterator[_Spill]:
    with tempfile.TemporaryFile() as file:
        yield _Spill(file)


def _tfidf_scores(chunks: Iterable[_Documents], counts: _TokenCounts) -> _Scores:
    """The mean tf-idf weight of each token: smooth idf, the weights of each text normalised to length 1."""
    size = len(counts.documents)
    idf = np.log((1 + counts.texts) / (1 + counts.documents)) + 1
    scores = np.zeros(size)
    for chunk in chunks:
        documents, terms, term_counts = _terms_of(chunk, size)
        weights = term_counts * idf[terms]
        lengths = np.sqrt(np.bincount(documents, weights**2))
        scores += np.bincount(terms, weights / lengths[documents], minlength=size)
    return scores / max(counts.texts, 1)


def _attention_scores(
    model: SentenceTransformer, texts: Sequence[str], size: int, progress: Progress = SILENT
) -> _Scores:
    """The attention each token receives per occurrence (as in the paper), averaged over heads and layers."""
    received, occurrences = np.zeros(size), np.zeros(size)
    with progress.task("attention", len(texts)) as advance, torch.inference_mode(), _plain_attention(model):
        for start in range(0, len(texts), _ATTENTION_BATCH):
            batch = list(texts[start : start + _ATTENTION_BATCH])
            ids, amounts = _received(model, batch)
            received += np.bincount(ids, amounts, minlength=size)[:size]
            occurrences += np.bincount(ids, minlength=size)[:size]
            advance(len(batch))
    return received / np.maximum(occurrences, 1)


def _received(model: SentenceTransformer, texts: list[str]) -> tuple[NDArray[np.int64], _Scores]:
    """The token ids of some texts, and the attention each token received."""
    transformer = transformer_of(model)
    limit = int(min(model.max_seq_length or LONGEST, LONGEST))
    features = {
        name: value.to(model.device)
        for name, value in transformer.preprocess(texts, max_length=limit).items()
        if isinstance(value, torch.Tensor)
    }
    layers = transformer.model(**features, output_attentions=True).attentions
    if not layers:
        raise BadModel("the model does not return its attention; choose another score, such as tfidf")
    mask = features["attention_mask"].bool()
    total = sum(layer.float().mean(dim=1) for layer in layers) / len(layers)
    per_token = (total * mask[:, :, None]).sum(dim=1)
    return features["input_ids"][mask].cpu().numpy(), per_token[mask].cpu().double().numpy()


def _passed_down(scores: _Scores, tree: MergeTree) -> _Scores:
    """Add to each token's score the scores of all tokens it is a part of."""
    total = scores.copy()
    for token in _largest_first(tree.with_halves(np.flatnonzero(scores > 0).tolist()), tree):
        for half in tree.halves(token) or ():
            total[half] += total[token]
    return total


def _best_tokens(order: Sequence[int], needed: Collection[int], count: int, tree: MergeTree) -> list[int]:
    """The first tokens in order that fit into `count`, together with the tokens they are merged from."""
    kept = tree.with_halves(needed)
    for token in order:
        if len(kept) >= count:
            break
        missing = tree.with_halves([token]) - kept
        if len(kept) + len(missing) <= count:
            kept |= missing
    return sorted(kept)


def _largest_first(tokens: Collection[int], tree: MergeTree) -> list[int]:
    """Sort tokens so that each comes before the two it is merged from."""
    depth: dict[int, int] = {}
    waiting = list(tokens)
    while waiting:
        token = waiting[-1]
        halves = [half for half in tree.halves(token) or () if half not in depth]
        waiting.extend(halves)
        if not halves:
            waiting.pop()
            depth[token] = 1 + max((depth[half] for half in tree.halves(token) or ()), default=0)
    return sorted(tokens, key=lambda token: -depth[token])
