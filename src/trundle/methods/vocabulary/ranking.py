"""Every token of a vocabulary in the order in which it is worth keeping, by the score that was chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from trundle.data.corpus import Corpus
from trundle.data.sampling import distinct, representatives, sample
from trundle.errors import BadInput
from trundle.methods.vocabulary import _Score
from trundle.methods.vocabulary.scores import (
    _attention_scores,
    _passed_down,
    _spilling,
    _tfidf_scores,
    _TokenCounts,
    count_tokens,
    tokenised,
)
from trundle.model.token_map import Vocabulary, token_vectors
from trundle.model.tokenizer import MergeTree
from trundle.progress import SILENT, Progress

_ATTENTION_TEXTS = 2048
_HELD_OUT_TEXTS = 2000
_WITHOUT_TEXTS = ("cluster", "random")
_FOREIGN, _DOUBTFUL = 0.9, 0.05
"""Shares of unknown tokens: with the first, texts say nothing about a vocabulary; the second is worth a line."""


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """All tokens, the best first: those that occur in the texts by their score, then the others by their id."""

    order: list[int]
    seen: int
    """How many of them occur."""
    counts: _TokenCounts | None


def _rank_tokens(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: _Score,
    corpus: Corpus | None,
    *,
    count: int,
    tree: MergeTree,
    seed: int,
    progress: Progress = SILENT,
) -> _Ranking:
    """One pass over the texts, then the score. `count` is how many tokens will be chosen, for a score that asks."""
    known = np.array(sorted(vocabulary.tokens))
    if corpus is None:
        if score not in _WITHOUT_TEXTS:
            raise BadInput(
                "vocabulary looks at texts to know which tokens matter; say where they are with --data"
            )
        scores = _scores_without_texts(model, vocabulary, score, known, count, seed)
        return _Ranking(order=known[np.lexsort((known, -scores[known]))].tolist(), seen=0, counts=None)
    counts, scores = _read(model, vocabulary, score, corpus, count, tree, seed, progress)
    seen = np.flatnonzero((counts.occurrences > 0) | (scores > 0))
    ranked = seen[np.lexsort((seen, -counts.occurrences[seen], -scores[seen]))].tolist()
    others = np.setdiff1d(known, seen).tolist()
    return _Ranking(order=ranked + others, seen=len(ranked), counts=counts)


def _read(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: _Score,
    corpus: Corpus,
    count: int,
    tree: MergeTree,
    seed: int,
    progress: Progress,
) -> tuple[_TokenCounts, NDArray[np.float64]]:
    """What occurs in the training texts, and the scores by it."""
    texts = (text.text for text in corpus.train())
    with _spilling() as spill:
        chunks = tokenised(vocabulary.backend, texts, progress)
        counts = count_tokens(spill.through(chunks) if score == "tfidf" else chunks, vocabulary.size)
        _check(counts, vocabulary, progress)
        if score == "tfidf":
            return counts, _passed_down(_tfidf_scores(spill.again(), counts), tree)
    if score in ("frequency", "seen"):
        return counts, _passed_down(counts.occurrences.astype(np.float64), tree)
    if score == "attention":
        chosen = sample(corpus.train(), _ATTENTION_TEXTS, seed=seed)
        lines = [text.text for text in chosen]
        return counts, _attention_scores(model, lines, vocabulary.size, progress)
    there = np.flatnonzero(counts.occurrences)
    return counts, _scores_without_texts(model, vocabulary, score, there, count, seed)


def _scores_without_texts(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: _Score,
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


def _absent_characters(vocabulary: Vocabulary, ranking: _Ranking) -> set[int]:
    """Single characters that are in no token of the texts, and so in no text; none where there are no texts."""
    if ranking.counts is None:
        return set()
    there = set("".join(vocabulary.tokens[int(number)] for number in ranking.counts.occurrences.nonzero()[0]))
    return {number for number, text in vocabulary.characters.items() if text not in there} - vocabulary.named


def _behind_what_occurs(ranking: _Ranking, characters: Collection[int]) -> list[int]:
    """The ranking with these characters, which never occur, before all else that never does: they can spell it."""
    others = [number for number in ranking.order[ranking.seen :] if number not in characters]
    return [*ranking.order[: ranking.seen], *sorted(characters), *others]


def _what_is_missing(
    vocabulary: Vocabulary, ranking: _Ranking, kept: Sequence[int], shown: int
) -> tuple[float | None, tuple[str, ...]]:
    """What share of the texts' tokens is kept, and the most frequent that are not."""
    if ranking.counts is None:
        return None, ()
    gone = ranking.counts.occurrences.copy()
    gone[list(kept)] = 0
    most = [int(number) for number in (-gone).argsort(kind="stable")[:shown] if gone[number]]
    coverage = 1 - float(gone.sum()) / ranking.counts.tokens
    return coverage, tuple(vocabulary.backend.decode([number]) for number in most)


def _held_out_texts(corpus: Corpus | None, *, seed: int) -> list[str]:
    """Some of the texts nothing was chosen by."""
    if corpus is None:
        return []
    once = distinct(corpus.held_out(), key=lambda text: text.text)
    return [text.text for text in sample(once, _HELD_OUT_TEXTS, seed=seed)]


def _check(counts: _TokenCounts, vocabulary: Vocabulary, progress: Progress) -> None:
    """Refuse texts that can't say anything."""
    if not counts.tokens:
        raise BadInput("there is no text to count tokens in; give texts with --data")
    if vocabulary.unknown is None:
        return
    share = counts.occurrences[vocabulary.unknown] / counts.tokens
    if share > _FOREIGN:
        raise BadInput(
            f"{share:.0%} of the texts is unknown to the model's tokenizer; give texts in a language the model knows"
        )
    if share > _DOUBTFUL:
        progress.say(f"vocabulary: {share:.0%} of the texts is unknown to the model's tokenizer")


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """Tokens per text and the share of them that is unknown, before and after a cut."""

    before: float
    after: float
    unknown_before: float
    unknown_after: float
    stand_in: float | None = None
    """Share of the tokens that are read as another one that is known, where ids are mapped; no text is longer then."""

    @property
    def ratio(self) -> float:
        """How many times longer texts have become."""
        return self.after / self.before

    def __str__(self) -> str:
        unknown = f"unknown {self.unknown_before:.2%} → {self.unknown_after:.2%}"
        if self.stand_in is None:
            return f"{self.before:.1f} tokens per text become {self.after:.1f} ({self.ratio:.3f}×), {unknown}"
        return f"{self.before:.1f} tokens per text as before, {self.stand_in:.2%} of them read as a stand-in, {unknown}"

    def as_json(self) -> dict[str, Any]:
        """For machines and the lineage."""
        return {
            "tokens_per_text_before": round(self.before, 3),
            "tokens_per_text_after": round(self.after, 3),
            "unknown_share_before": round(self.unknown_before, 6),
            "unknown_share_after": round(self.unknown_after, 6),
        } | ({} if self.stand_in is None else {"stand_in_share": round(self.stand_in, 6)})


def _compare_lengths(
    before: Tokenizer, after: Tokenizer, texts: Sequence[str], *, unknown: str | None
) -> _Lengths:
    """The same texts through both tokenizers, without special tokens."""
    old, old_unknown = _length(before, texts, unknown)
    new, new_unknown = _length(after, texts, unknown)
    return _Lengths(before=old, after=new, unknown_before=old_unknown, unknown_after=new_unknown)


def _length(tokenizer: Tokenizer, texts: Sequence[str], unknown: str | None) -> tuple[float, float]:
    size = 1 + max(tokenizer.get_vocab().values())  # there may be more ids than tokens
    counts = count_tokens(tokenised(tokenizer, texts), size)
    number = None if unknown is None else tokenizer.token_to_id(unknown)
    share = 0.0 if number is None else float(counts.occurrences[number] / max(counts.tokens, 1))
    return counts.tokens / len(texts), share


def _lengths_when_mapped(
    tokenizer: Tokenizer, texts: Sequence[str], stands_for: Sequence[int], *, unknown: int | None
) -> _Lengths:
    """The texts' tokens, without special ones, by what each is read as: `stands_for` has an id for every id."""
    counts = count_tokens(tokenised(tokenizer, texts), len(stands_for))
    ends, total = np.asarray(stands_for), max(counts.tokens, 1)
    other, lost = ends != np.arange(len(ends)), ends == (-1 if unknown is None else unknown)

    def share(chosen: NDArray[np.bool_]) -> float:
        return float(counts.occurrences[chosen].sum() / total)

    each = counts.tokens / len(texts)
    return _Lengths(
        before=each,
        after=each,
        unknown_before=share(lost & ~other),
        unknown_after=share(lost),
        stand_in=share(other & ~lost),
    )
