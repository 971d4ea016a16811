"""Every token of a vocabulary in the order in which it is worth keeping, by the score that was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
from trundle.errors import BadInput
from trundle.steps.contract import Context

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    from trundle.measure import TokenCounts
    from trundle.model import MergeTree, Vocabulary

Score = Literal["tfidf", "frequency", "seen", "attention", "cluster", "random"]

ATTENTION_TEXTS = 2048
HELD_OUT_TEXTS = 2000
WITHOUT_TEXTS = ("cluster", "random")
FOREIGN, DOUBTFUL = 0.9, 0.05
"""Shares of unknown tokens: with the first, texts say nothing about a vocabulary; the second is worth a line."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """All tokens, the best first: those that occur in the texts by their score, then the others by their id."""

    order: list[int]
    seen: int
    """How many of them occur."""
    counts: TokenCounts | None


def rank_tokens(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: Score,
    context: Context,
    *,
    count: int,
    tree: MergeTree,
) -> Ranking:
    """One pass over the texts, then the score. `count` is how many tokens will be chosen, for a score that asks."""
    known = np.array(sorted(vocabulary.tokens))
    if context.corpus is None:
        if score not in WITHOUT_TEXTS:
            raise BadInput(
                "vocabulary looks at texts to know which tokens matter; say where they are with --data"
            )
        scores = _scores_without_texts(model, vocabulary, score, known, count, context.seed)
        return Ranking(order=known[np.lexsort((known, -scores[known]))].tolist(), seen=0, counts=None)
    counts, scores = _read(model, vocabulary, score, context, count, tree)
    seen = np.flatnonzero((counts.occurrences > 0) | (scores > 0))
    ranked = seen[np.lexsort((seen, -counts.occurrences[seen], -scores[seen]))].tolist()
    others = np.setdiff1d(known, seen).tolist()
    return Ranking(order=ranked + others, seen=len(ranked), counts=counts)


def _read(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: Score,
    context: Context,
    count: int,
    tree: MergeTree,
) -> tuple[TokenCounts, NDArray[np.float64]]:
    """What occurs in the training texts, and the scores by it."""
    assert context.corpus is not None
    texts = (text.text for text in context.corpus.train())
    with measure.spilling() as spill:
        chunks = measure.tokenised(vocabulary.backend, texts, context.progress)
        counts = measure.count_tokens(spill.through(chunks) if score == "tfidf" else chunks, vocabulary.size)
        _check(counts, vocabulary, context)
        if score == "tfidf":
            return counts, measure.passed_down(measure.tfidf_scores(spill.again(), counts), tree)
    if score in ("frequency", "seen"):
        return counts, measure.passed_down(counts.occurrences.astype(np.float64), tree)
    if score == "attention":
        chosen = data.sample(context.corpus.train(), ATTENTION_TEXTS, seed=context.seed)
        lines = [text.text for text in chosen]
        return counts, measure.attention_scores(model, lines, vocabulary.size, context.progress)
    there = np.flatnonzero(counts.occurrences)
    return counts, _scores_without_texts(model, vocabulary, score, there, count, context.seed)


def _scores_without_texts(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: Score,
    among: NDArray[np.int64],
    count: int,
    seed: int,
) -> NDArray[np.float64]:
    """Chance, or standing for a cluster of similar tokens."""
    scores = np.zeros(vocabulary.size)
    if score == "random":
        scores[among] = np.random.default_rng(seed).permutation(len(among)) + 1
    else:
        vectors = body.token_vectors(model, among.tolist())
        scores[among[measure.representatives(vectors, count, seed=seed)]] = 1
    return scores


def what_is_missing(
    vocabulary: Vocabulary, ranking: Ranking, kept: Sequence[int], shown: int
) -> tuple[float | None, tuple[str, ...]]:
    """What share of the texts' tokens is kept, and the most frequent that are not."""
    if ranking.counts is None:
        return None, ()
    gone = ranking.counts.occurrences.copy()
    gone[list(kept)] = 0
    most = [int(number) for number in (-gone).argsort(kind="stable")[:shown] if gone[number]]
    coverage = 1 - float(gone.sum()) / ranking.counts.tokens
    return coverage, tuple(vocabulary.backend.decode([number]) for number in most)


def held_out_texts(context: Context) -> list[str]:
    """Some of the texts nothing was chosen by."""
    if context.corpus is None:
        return []
    distinct = data.distinct(context.corpus.held_out(), key=lambda text: text.text)
    return [text.text for text in data.sample(distinct, HELD_OUT_TEXTS, seed=context.seed)]


def _check(counts: TokenCounts, vocabulary: Vocabulary, context: Context) -> None:
    """Refuse texts that can't say anything."""
    if not counts.tokens:
        raise BadInput("there is no text to count tokens in; give texts with --data")
    if vocabulary.unknown is None:
        return
    share = counts.occurrences[vocabulary.unknown] / counts.tokens
    if share > FOREIGN:
        raise BadInput(
            f"{share:.0%} of the texts is unknown to the model's tokenizer; give texts in a language the model knows"
        )
    if share > DOUBTFUL:
        context.progress.say(f"vocabulary: {share:.0%} of the texts is unknown to the model's tokenizer")
