"""Labelled tuples as the model takes them: each text of a batch once, in chunks of similar length, and who belongs to whom.

A text that occurs twice in a batch is encoded once, and a document that is known to answer a query is never its rival,
whichever tuple it came from: repeated questions and shared passages would otherwise teach the model to push a right answer
away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor

from trundle.data.examples import Example
from trundle.errors import BadInput
from trundle.model.encode import Features, make_tokeniser
from trundle.train.batches import Indices


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """What is put before the queries and documents of one source."""

    query: str = ""
    document: str = ""


class _Chunks(NamedTuple):
    """Texts ready for the model, a few at a time, and in which row of the joined results each text is found."""

    features: tuple[Features, ...]
    rows: Tensor


class _TupleBatch(NamedTuple):
    """One batch: its queries, its documents, and how they belong together.

    `answers[i]` is the document of query i; `excluded[i, j]` is true where document j is another right answer to it, or its
    own text. `pairs` are (query, document) with `labels` 1 for right and 0 for wrong.
    """

    queries: _Chunks
    documents: _Chunks
    answers: Tensor
    excluded: Tensor
    pairs: Tensor
    labels: Tensor


@dataclass(frozen=True, kw_only=True)
class _Relations:
    """Who belongs to whom in a batch, before anything is tokenised."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    asked: Indices
    """Which query each tuple asks."""
    answers: Indices
    """Which document answers each tuple."""
    excluded: np.ndarray[tuple[int, int], np.dtype[np.bool_]]
    wrong: tuple[tuple[int, int], ...]
    """(tuple, document) pairs that don't belong together: the hard negatives, or a rival where a tuple has none."""


def relate(examples: Sequence[Example], *, negatives: int | None = None) -> _Relations:
    """Give every text of a batch one place; at most so many hard negatives of each tuple are used."""
    hard = [example.negatives[:negatives] for example in examples]
    queries = {text: place for place, text in enumerate(dict.fromkeys(e.query for e in examples))}
    texts = [example.positive for example in examples] + [text for texts in hard for text in texts]
    documents = {text: place for place, text in enumerate(dict.fromkeys(texts))}
    asked = np.asarray([queries[example.query] for example in examples])
    answers = np.asarray([documents[example.positive] for example in examples])
    right = np.zeros((len(queries), len(documents)), dtype=bool)
    right[asked, answers] = True
    for text, place in queries.items():
        if text in documents:
            right[place, documents[text]] = True
    excluded = right[asked]
    wrong = [
        (row, documents[text])
        for row, texts in enumerate(hard)
        for text in texts
        if not excluded[row, documents[text]]
    ]
    without = set(range(len(examples))) - {row for row, _ in wrong}
    for row in sorted(without):
        rivals = np.flatnonzero(~excluded[row])
        if len(rivals):
            wrong.append((row, int(rivals[row % len(rivals)])))
    excluded[np.arange(len(examples)), answers] = False
    return _Relations(
        queries=tuple(queries),
        documents=tuple(documents),
        asked=asked,
        answers=answers,
        excluded=excluded,
        wrong=tuple(wrong),
    )


def _make_tuple_loader(
    model: SentenceTransformer,
    examples: Sequence[Example],
    prompts: Mapping[str, Prompts],
    *,
    chunk: int,
    negatives: int | None = None,
) -> Callable[[Indices], _TupleBatch]:
    """How the tuples of a batch become what the objective takes; `prompts` are found by an example's source."""
    chunked = make_chunker(model, chunk)

    def load(indices: Indices) -> _TupleBatch:
        chosen = [examples[index] for index in indices]
        found = relate(chosen, negatives=negatives)
        prompt = prompts[chosen[0].source]
        queries, documents = chunked(found.queries, prompt.query), chunked(found.documents, prompt.document)
        right = np.stack([np.arange(len(chosen)), found.answers], axis=1)
        wrong = np.asarray(found.wrong, dtype=np.int64).reshape(-1, 2)
        return _TupleBatch(
            queries=_Chunks(queries.features, queries.rows[found.asked]),
            documents=documents,
            answers=torch.from_numpy(found.answers),
            excluded=torch.from_numpy(found.excluded),
            pairs=torch.from_numpy(np.concatenate([right, wrong])),
            labels=torch.from_numpy(np.repeat(np.asarray([1, 0], np.float32), [len(right), len(wrong)])),
        )

    return load


def make_chunker(model: SentenceTransformer, size: int) -> Callable[[Sequence[str], str], _Chunks]:
    """Texts of similar length together, each chunk with what pooling must know of the prompt."""
    tokenise = make_tokeniser(model)
    prompt_counts = any(isinstance(module, Pooling) and not module.include_prompt for module in model)
    special = set(model.tokenizer.all_special_ids)

    def prompt_length(prompt: str) -> int:
        tokens = tokenise([prompt])["input_ids"][0].tolist()
        return len(tokens) - (tokens[-1] in special)

    def chunked(texts: Sequence[str], prompt: str) -> _Chunks:
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        order = np.argsort(lengths, kind="stable")
        unpooled = prompt_length(prompt) if prompt and prompt_counts else 0
        parts = []
        for start in range(0, len(texts), size):
            chosen = [texts[place] for place in order[start : start + size]]
            features = tokenise([prompt + text for text in chosen])
            if unpooled:
                _check_something_is_pooled(features, unpooled, chosen)
                features["prompt_length"] = unpooled
            parts.append(features)
        rows = np.empty(len(texts), np.int64)
        rows[order] = np.arange(len(texts))
        return _Chunks(tuple(parts), torch.from_numpy(rows))

    return chunked


def _check_something_is_pooled(features: Features, unpooled: int, texts: Sequence[str]) -> None:
    """A text of which only the prompt is left would get a vector of zeros."""
    left = features["attention_mask"].sum(dim=1) - unpooled
    if int(left.min()) < 1:
        text = texts[int(left.argmin())]
        raise BadInput(
            f"of the text {text[:60]!r} nothing is left to pool beside its prompt; shorten the prompt, "
            "raise max_length, or leave the text out"
        )
