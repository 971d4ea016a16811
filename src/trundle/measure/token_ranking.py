"""Every token of a vocabulary in the order in which it is worth keeping, by the score that was chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus
from trundle.data.sampling import distinct, sample
from trundle.errors import BadInput
from trundle.measure.clusters import representatives
from trundle.measure.score_names import Score
from trundle.measure.token_choice import passed_down
from trundle.measure.token_counts import TokenCounts, count_tokens, spilling, tokenised
from trundle.measure.token_scores import attention_scores, tfidf_scores
from trundle.model.merge_tree import MergeTree
from trundle.model.vocabulary import Vocabulary, token_vectors
from trundle.progress import SILENT, Progress

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
    corpus: Corpus | None,
    *,
    count: int,
    tree: MergeTree,
    seed: int,
    progress: Progress = SILENT,
) -> Ranking:
    """One pass over the texts, then the score. `count` is how many tokens will be chosen, for a score that asks."""
    known = np.array(sorted(vocabulary.tokens))
    if corpus is None:
        if score not in WITHOUT_TEXTS:
            raise BadInput(
                "vocabulary looks at texts to know which tokens matter; say where they are with --data"
            )
        scores = _scores_without_texts(model, vocabulary, score, known, count, seed)
        return Ranking(order=known[np.lexsort((known, -scores[known]))].tolist(), seen=0, counts=None)
    counts, scores = _read(model, vocabulary, score, corpus, count, tree, seed, progress)
    seen = np.flatnonzero((counts.occurrences > 0) | (scores > 0))
    ranked = seen[np.lexsort((seen, -counts.occurrences[seen], -scores[seen]))].tolist()
    others = np.setdiff1d(known, seen).tolist()
    return Ranking(order=ranked + others, seen=len(ranked), counts=counts)


def _read(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: Score,
    corpus: Corpus,
    count: int,
    tree: MergeTree,
    seed: int,
    progress: Progress,
) -> tuple[TokenCounts, NDArray[np.float64]]:
    """What occurs in the training texts, and the scores by it."""
    texts = (text.text for text in corpus.train())
    with spilling() as spill:
        chunks = tokenised(vocabulary.backend, texts, progress)
        counts = count_tokens(spill.through(chunks) if score == "tfidf" else chunks, vocabulary.size)
        _check(counts, vocabulary, progress)
        if score == "tfidf":
            return counts, passed_down(tfidf_scores(spill.again(), counts), tree)
    if score in ("frequency", "seen"):
        return counts, passed_down(counts.occurrences.astype(np.float64), tree)
    if score == "attention":
        chosen = sample(corpus.train(), ATTENTION_TEXTS, seed=seed)
        lines = [text.text for text in chosen]
        return counts, attention_scores(model, lines, vocabulary.size, progress)
    there = np.flatnonzero(counts.occurrences)
    return counts, _scores_without_texts(model, vocabulary, score, there, count, seed)


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
        vectors = token_vectors(model, among.tolist())
        scores[among[representatives(vectors, count, seed=seed)]] = 1
    return scores


def absent_characters(vocabulary: Vocabulary, ranking: Ranking) -> set[int]:
    """Single characters that are in no token of the texts, and so in no text; none where there are no texts."""
    if ranking.counts is None:
        return set()
    there = set("".join(vocabulary.tokens[int(number)] for number in ranking.counts.occurrences.nonzero()[0]))
    return {number for number, text in vocabulary.characters.items() if text not in there} - vocabulary.named


def behind_what_occurs(ranking: Ranking, characters: Collection[int]) -> list[int]:
    """The ranking with these characters, which never occur, before all else that never does: they can spell it."""
    others = [number for number in ranking.order[ranking.seen :] if number not in characters]
    return [*ranking.order[: ranking.seen], *sorted(characters), *others]


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


def held_out_texts(corpus: Corpus | None, *, seed: int) -> list[str]:
    """Some of the texts nothing was chosen by."""
    if corpus is None:
        return []
    once = distinct(corpus.held_out(), key=lambda text: text.text)
    return [text.text for text in sample(once, HELD_OUT_TEXTS, seed=seed)]


def _check(counts: TokenCounts, vocabulary: Vocabulary, progress: Progress) -> None:
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
        progress.say(f"vocabulary: {share:.0%} of the texts is unknown to the model's tokenizer")
