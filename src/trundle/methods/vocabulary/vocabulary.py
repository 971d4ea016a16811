"""How `vocabulary` plans and changes a model, and what `trundle inspect --vocabulary` shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.data import sampling
from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.training import healed, plan_healing
from trundle.methods.vocabulary import _VocabularyOptions, _VocabularyPlan
from trundle.methods.vocabulary import ranking as ranks
from trundle.methods.vocabulary.ranking import _compare_lengths, _Lengths, _lengths_when_mapped
from trundle.methods.vocabulary.scores import _best_tokens
from trundle.model import token_map as mapping
from trundle.model.cost import Cost, cost, predict
from trundle.model.layout import layout_of
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.model.token_map import Vocabulary, read_vocabulary, token_vectors
from trundle.model.tokenizer import NO_MERGES

_LOST_SHOWN = 12
_SHARES = (2, 4, 8, 16)
_LOST_SHOWN_PER_SIZE = 5


def plan(model: SentenceTransformer, options: _VocabularyOptions, context: Context) -> _VocabularyPlan:
    """Score every token on the texts, and choose which to keep."""
    if mapping.has_token_map(model):
        raise ImpossibleCut("the model's tokens are mapped already; cut the model it was made from instead")
    vocabulary = read_vocabulary(model)
    wanted = _wanted(model, vocabulary, options)
    if wanted is not None and wanted >= vocabulary.size:
        return _VocabularyPlan(kept=tuple(range(vocabulary.size)), of=vocabulary.size, oov=options.oov)
    if options.oov == "unk" and vocabulary.unknown is None:
        raise ImpossibleCut("the model's tokenizer has no unknown token; use oov: decompose")
    rebuilt = options.oov == "decompose"
    tree = vocabulary.tree if rebuilt else NO_MERGES
    spare = options.clusters if options.oov == "cluster" else 0
    needed = vocabulary.least(rebuilt=rebuilt)
    spared = set() if options.characters == "all" or context.corpus is None else set(vocabulary.characters)
    if wanted is not None and wanted < len(needed - spared) + spare:  # too few for any texts
        raise _too_few(model, wanted, len(needed) + spare)
    count = max((vocabulary.size if wanted is None else wanted) - len(needed - spared) - spare, 1)
    ranking = ranks._rank_tokens(model, vocabulary, options, context, count=count, tree=tree)
    everything = wanted is None and options.characters == "auto"
    free = set() if everything else ranks._dispensable(vocabulary, ranking, options.characters) & needed
    needed = tree.with_halves(needed - free)
    if wanted is not None and wanted < len(needed) + spare:
        raise _too_few(model, wanted, len(needed) + spare)
    if wanted is None:
        kept = _best_tokens(ranking.order[: ranking.seen], needed, vocabulary.size, tree)
    else:
        kept = _best_tokens(ranks._order_with_characters(ranking, free), needed, wanted - spare, tree)
    representatives: tuple[int, ...] = ()
    if spare:
        removed = sorted(vocabulary.tokens.keys() - set(kept))
        found = sampling.representatives(token_vectors(model, removed), spare, seed=context.seed)
        representatives = tuple(removed[place] for place in found)
    coverage, lost = ranks._coverage(vocabulary, ranking, kept, _LOST_SHOWN)
    return _VocabularyPlan(
        kept=tuple(sorted({*kept, *representatives})),
        of=vocabulary.size,
        oov=options.oov,
        representatives=representatives,
        coverage=coverage,
        texts=0 if ranking.counts is None else ranking.counts.texts,
        lost=lost,
        heal=plan_healing(options.heal, context),
        characters_lost=len({vocabulary.characters[number] for number in free - set(kept)}),
    )


def _wanted(model: SentenceTransformer, vocabulary: Vocabulary, options: _VocabularyOptions) -> int | None:
    if options.fraction is not None:
        return math.floor(options.fraction * vocabulary.size)
    if options.parameters is not None:
        return _tokens_left(*_weights_per_token(model), options.parameters)
    rows = layout_of(transformer_of(model).model).sizes["vocab"]
    if options.keep is not None and options.keep > rows:
        raise ImpossibleCut(f"the model has {rows:,} tokens, so it can't keep {options.keep:,}; keep fewer")
    return options.keep


def _tokens_left(row: int, tokens: int, rest: int, share: Fraction) -> int:
    return math.floor((share * (row * tokens + rest) - rest) / row)


def _weights_per_token(model: SentenceTransformer) -> tuple[int, int, int]:
    """Weights per token, the number of tokens, and the weights that belong to no token."""
    now = cost(model).parameters
    size = layout_of(transformer_of(model).model).sizes["vocab"]
    rest = now - (now - predict(model, vocab=1).parameters) * size // max(size - 1, 1)
    return (now - rest) // size, size, rest


def _too_few(model: SentenceTransformer, wanted: int, needed: int) -> ImpossibleCut:
    row, size, rest = _weights_per_token(model)
    share = math.ceil(1000 * (rest + row * needed) / (rest + row * size)) / 10
    return ImpossibleCut(
        f"{needed:,} of the {size:,} tokens must be kept (special tokens, characters or bytes, prompts), "
        f"not {max(wanted, 0):,}; keep at least {needed:,}, which is {share:g}% of the parameters"
    )


def forecast(model: SentenceTransformer, plan: _VocabularyPlan) -> Cost:
    """Return the cost of the model after the cut."""
    return predict(model, vocab=len(plan.kept))


def apply(model: SentenceTransformer, plan: _VocabularyPlan, context: Context) -> Applied:
    """Cut the rows, and rebuild the tokenizer or map its ids."""
    if len(plan.kept) == plan.of:
        return Applied(model=cut(model, Cut()))
    vocabulary = read_vocabulary(model)
    if plan.oov == "decompose":
        what = Cut(vocab=plan.kept)
        small, facts = healed(model, cut(model, what), what, plan.heal, context)
        backend, unknown = read_vocabulary(small).backend, vocabulary.unknown_token
        compare = partial(_compare_lengths, vocabulary.backend, backend, unknown=unknown)
        return Applied(model=small, facts=_measured(context, compare) | facts)
    removed = sorted(vocabulary.tokens.keys() - set(plan.kept))
    if plan.oov == "unk":
        assert vocabulary.unknown is not None
        ends = [vocabulary.unknown] * len(removed)
    else:
        found = sampling.nearest(token_vectors(model, removed), token_vectors(model, plan.representatives))
        ends = [plan.representatives[place] for place in found]
    becomes = dict(zip(removed, ends, strict=True)) | {number: number for number in plan.kept}
    # An id without a token never occurs, but has an entry.
    token_map = [becomes.get(number, plan.kept[0]) for number in range(max(vocabulary.tokens) + 1)]
    small = mapping.cut_with_map(model, plan.kept, token_map)
    small, facts = healed(model, small, Cut(vocab=plan.kept), plan.heal, context)
    compare = partial(
        _lengths_when_mapped, vocabulary.backend, token_map=token_map, unknown=vocabulary.unknown
    )
    return Applied(model=small, facts=_measured(context, compare) | facts)


def _measured(context: Context, measure: Callable[[Sequence[str]], _Lengths]) -> dict[str, Any]:
    texts = ranks._held_out_texts(context.corpus, seed=context.seed)
    if not texts:
        return {}
    lengths = measure(texts)
    context.progress.say(f"vocabulary: on {len(texts):,} held-out texts {lengths}")
    return lengths.as_json()


@dataclass(frozen=True, kw_only=True)
class _SizeRow:
    """One size a vocabulary could be cut to."""

    keep: int
    why: str
    coverage: float
    """Share of the texts' tokens that are kept."""
    after: Cost
    lengths: _Lengths | None
    """Token lengths of held-out texts, if there are any."""
    lost: tuple[str, ...]
    """The most frequent of the removed tokens."""

    def as_json(self) -> dict[str, Any]:
        return {
            "keep": self.keep,
            "why": self.why,
            "coverage": self.coverage,
            "parameters": self.after.parameters,
            "bytes": self.after.file_bytes,
            **({} if self.lengths is None else self.lengths.as_json()),
            "lost": list(self.lost),
        }


@dataclass(frozen=True, kw_only=True)
class VocabularySizes:
    """Possible sizes of a vocabulary, the largest first, and the number of texts they were measured on."""

    texts: int
    tokens: int
    held_out: int
    rows: tuple[_SizeRow, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the table for JSON."""
        rows = [row.as_json() for row in self.rows]
        return {"texts": self.texts, "tokens": self.tokens, "held_out": self.held_out, "sizes": rows}


def list_sizes(model: SentenceTransformer, context: Context) -> VocabularySizes:
    """Measure what `vocabulary` would choose at several sizes, from all tokens to the fewest possible."""
    if context.corpus is None:
        raise BadInput("a vocabulary is measured on texts; pass them with --data")
    vocabulary = read_vocabulary(model)
    tree, needed = vocabulary.tree, vocabulary.least()
    options = _VocabularyOptions()
    ranking = ranks._rank_tokens(model, vocabulary, options, context, count=vocabulary.size, tree=tree)
    assert ranking.counts is not None
    free = ranks._dispensable(vocabulary, ranking, "auto")
    seen = len(tree.with_halves([*needed, *ranking.order[: ranking.seen]]))  # the same as `--score seen`
    needed, order = tree.with_halves(needed - free), ranks._order_with_characters(ranking, free)
    shares = {vocabulary.size // share: f"1/{share}" for share in _SHARES}
    sizes = {size: why for size, why in shares.items() if size > len(needed)}
    sizes |= {vocabulary.size: "all", seen: "all that occur", len(needed): "the least"}
    texts = ranks._held_out_texts(context.corpus, seed=context.seed)
    compare = partial(_compare_lengths, vocabulary.backend, unknown=vocabulary.unknown_token)
    rows = []
    for size, why in sorted(sizes.items(), reverse=True):
        kept = _best_tokens(order, needed, size, tree)
        small = mapping.rebuilt_backend(model, kept)
        coverage, lost = ranks._coverage(vocabulary, ranking, kept, _LOST_SHOWN_PER_SIZE)
        assert coverage is not None
        lengths = compare(small, texts) if texts else None
        after = predict(model, vocab=size)
        rows.append(_SizeRow(keep=size, why=why, coverage=coverage, after=after, lengths=lengths, lost=lost))
    return VocabularySizes(
        texts=ranking.counts.texts, tokens=ranking.counts.tokens, held_out=len(texts), rows=tuple(rows)
    )
