"""Ranks every token of a vocabulary by the chosen score, and measures what a choice of tokens covers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer

from trundle.cache import cache_key
from trundle.data.corpus import Corpus
from trundle.data.sampling import distinct, representatives, sample
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.methods.contract import Context
from trundle.methods.training import check_same_tokens
from trundle.methods.vocabulary import _Characters, _TokenScore, _VocabularyOptions
from trundle.methods.vocabulary import scores as scoring
from trundle.methods.vocabulary.scores import _TokenCounts, count_tokens, tokenised
from trundle.model.load import load
from trundle.model.token_map import Vocabulary, token_vectors
from trundle.model.tokenizer import MergeTree
from trundle.progress import Progress

_ATTENTION_TEXTS = 2048
_HELD_OUT_TEXTS = 2000
_BY_TEXTS = ("tfidf", "frequency", "seen")
"""Scores for which neither the model's weights nor the number of tokens matter."""
_FOREIGN, _DOUBTFUL = 0.9, 0.05
"""Shares of unknown tokens: texts above the first are rejected, above the second the output warns."""


@dataclass(frozen=True, kw_only=True)
class _Ranking:
    """All tokens, the best first: those that occur in the texts by score, then the others by id.

    Tokens that no text can become are last.
    """

    order: list[int]
    seen: int
    """How many of them occur."""
    counts: _TokenCounts | None


def _rank_tokens(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    options: _VocabularyOptions,
    context: Context,
    *,
    count: int,
    tree: MergeTree,
) -> _Ranking:
    """Count the tokens of the texts and score them; the score `cluster` needs the `count` to choose.

    If only the texts decide, all runs of a search share the result.
    """
    known, score = np.array(sorted(vocabulary.tokens)), options.score
    if context.corpus is None:
        if score not in ("cluster", "random"):
            raise BadInput("vocabulary scores tokens on texts; pass them with --data")
        scores = _scores_without_texts(model, vocabulary, score, known, count, context.seed)
        return _Ranking(order=known[np.lexsort((known, -scores[known]))].tolist(), seen=0, counts=None)
    corpus, seed = context.corpus, context.seed
    asked = (score, options.texts, options.oov, seed)
    key = cache_key("ranking", vocabulary.backend.to_str(), corpus.facts(), *asked)
    ranking: _Ranking | None = context.opened.get(key)
    if ranking is not None:
        return ranking
    # The score `seen` must not miss a token.
    texts: Iterable[Text] = corpus.train() if score == "seen" else [*corpus.sample_train(options.texts, seed)]
    with scoring._spilling() as spill:
        chunks = tokenised(vocabulary.backend, (text.text for text in texts), context.progress)
        counts = count_tokens(spill.through(chunks) if score == "tfidf" else chunks, vocabulary.size)
        _check_counts(counts, vocabulary, context.progress)
        if score == "tfidf":
            scores = scoring._passed_down(scoring._tfidf_scores(spill.again(), counts), tree)
    if score in ("frequency", "seen"):
        scores = scoring._passed_down(counts.occurrences.astype(np.float64), tree)
    elif score == "attention":
        lines = [text.text for text in sample(texts, _ATTENTION_TEXTS, seed=context.seed)]
        scorer = _scoring_model(model, options.scored_by, context)
        scores = scoring._attention_scores(scorer, lines, vocabulary.size, context.progress)
    elif score != "tfidf":
        there = np.flatnonzero(counts.occurrences)
        scores = _scores_without_texts(model, vocabulary, score, there, count, context.seed)
    seen = np.flatnonzero((counts.occurrences > 0) | (scores > 0))
    ranked = seen[np.lexsort((seen, -counts.occurrences[seen], -scores[seen]))].tolist()
    unreachable = vocabulary.unreachable()
    others = sorted(np.setdiff1d(known, seen).tolist(), key=lambda number: (number in unreachable, number))
    ranking = _Ranking(order=ranked + others, seen=len(ranked), counts=counts)
    if score in _BY_TEXTS:
        context.opened[key] = ranking
    return ranking


def _scoring_model(model: SentenceTransformer, name: str | None, context: Context) -> SentenceTransformer:
    """The model whose attention is measured: the one to cut, or another one with the same tokens."""
    if name is None:
        return model
    found = context.models.get(name) or load(name, trust_remote_code=context.trust_remote_code)
    check_same_tokens(model, found, "scored_by", "pass a model that was trained from this one")
    return found


def _scores_without_texts(
    model: SentenceTransformer,
    vocabulary: Vocabulary,
    score: _TokenScore,
    among: NDArray[np.int64],
    count: int,
    seed: int,
) -> NDArray[np.float64]:
    """Random scores, or 1 for the representatives of `count` clusters of similar tokens."""
    scores = np.zeros(vocabulary.size)
    if score == "random":
        scores[among] = np.random.default_rng(seed).permutation(len(among)) + 1
    else:
        vectors = token_vectors(model, among.tolist())
        scores[among[representatives(vectors, count, seed=seed)]] = 1
    return scores


def _check_counts(counts: _TokenCounts, vocabulary: Vocabulary, progress: Progress) -> None:
    if not counts.tokens:
        raise BadInput("there is no text to count tokens in; pass texts with --data")
    if vocabulary.unknown is None:
        return
    share = counts.occurrences[vocabulary.unknown] / counts.tokens
    if share > _FOREIGN:
        raise BadInput(f"{share:.0%} of the texts is unknown; pass texts in a language the model knows")
    if share > _DOUBTFUL:
        progress.say(f"vocabulary: {share:.0%} of the texts is unknown to the model's tokenizer")


def _dispensable(vocabulary: Vocabulary, ranking: _Ranking, characters: _Characters) -> set[int]:
    """Characters not in the texts: in a small vocabulary each would displace a token that occurs."""
    if characters == "all" or ranking.counts is None:
        return set()
    there = set("".join(vocabulary.tokens[int(number)] for number in ranking.counts.occurrences.nonzero()[0]))
    absent = {number: text for number, text in vocabulary.characters.items() if text not in there}
    # `auto` keeps ASCII, so that names, numbers and addresses can always be spelled.
    keeps_ascii = characters == "auto"
    return {
        number for number, text in absent.items() if not (keeps_ascii and text.isascii())
    } - vocabulary.named


def _order_with_characters(ranking: _Ranking, characters: Collection[int]) -> list[int]:
    others = [number for number in ranking.order[ranking.seen :] if number not in characters]
    return [*ranking.order[: ranking.seen], *sorted(characters), *others]


def _coverage(
    vocabulary: Vocabulary, ranking: _Ranking, kept: Sequence[int], shown: int
) -> tuple[float | None, tuple[str, ...]]:
    """The share of the texts' tokens that is kept, and the most frequent removed tokens."""
    if ranking.counts is None:
        return None, ()
    removed = ranking.counts.occurrences.copy()
    removed[list(kept)] = 0
    most = [int(number) for number in (-removed).argsort(kind="stable")[:shown] if removed[number]]
    coverage = 1 - float(removed.sum()) / ranking.counts.tokens
    return coverage, tuple(vocabulary.backend.decode([number]) for number in most)


def _held_out_texts(corpus: Corpus | None, *, seed: int) -> list[str]:
    if corpus is None:
        return []
    once = distinct(corpus.held_out(), key=lambda text: text.text)
    return [text.text for text in sample(once, _HELD_OUT_TEXTS, seed=seed)]


@dataclass(frozen=True, kw_only=True)
class _Lengths:
    """Tokens per text and the share of unknown tokens, before and after a cut."""

    before: float
    after: float
    unknown_before: float
    unknown_after: float
    replaced: float | None = None
    """If ids are mapped: the share of tokens mapped to a representative. Texts do not become longer then."""

    @property
    def ratio(self) -> float:
        return self.after / self.before

    def __str__(self) -> str:
        unknown = f"unknown {self.unknown_before:.2%} → {self.unknown_after:.2%}"
        if self.replaced is None:
            return f"{self.before:.1f} tokens per text become {self.after:.1f} ({self.ratio:.3f}×), {unknown}"
        return f"{self.before:.1f} tokens per text (unchanged), {self.replaced:.2%} replaced, {unknown}"

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens_per_text_before": round(self.before, 3),
            "tokens_per_text_after": round(self.after, 3),
            "unknown_share_before": round(self.unknown_before, 6),
            "unknown_share_after": round(self.unknown_after, 6),
        } | ({} if self.replaced is None else {"stand_in_share": round(self.replaced, 6)})


def _compare_lengths(
    before: Tokenizer, after: Tokenizer, texts: Sequence[str], *, unknown: str | None
) -> _Lengths:

    def measure(tokenizer: Tokenizer) -> tuple[float, float]:
        size = 1 + max(tokenizer.get_vocab().values())  # there may be more ids than tokens
        counts = count_tokens(tokenised(tokenizer, texts), size)
        number = None if unknown is None else tokenizer.token_to_id(unknown)
        share = 0.0 if number is None else float(counts.occurrences[number] / max(counts.tokens, 1))
        return counts.tokens / len(texts), share

    (old, old_unknown), (new, new_unknown) = measure(before), measure(after)
    return _Lengths(before=old, after=new, unknown_before=old_unknown, unknown_after=new_unknown)


def _lengths_when_mapped(
    tokenizer: Tokenizer, texts: Sequence[str], token_map: Sequence[int], *, unknown: int | None
) -> _Lengths:
    """Count the texts' tokens by what `token_map` (an id for every id) maps them to."""
    counts = count_tokens(tokenised(tokenizer, texts), len(token_map))
    ends, total = np.asarray(token_map), max(counts.tokens, 1)
    moved, unreadable = ends != np.arange(len(ends)), ends == (-1 if unknown is None else unknown)

    def share(chosen: NDArray[np.bool_]) -> float:
        return float(counts.occurrences[chosen].sum() / total)

    each = counts.tokens / len(texts)
    return _Lengths(
        before=each,
        after=each,
        unknown_before=share(unreadable & ~moved),
        unknown_after=share(unreadable),
        replaced=share(moved & ~unreadable),
    )
