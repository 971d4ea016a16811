"""How `vocabulary` plans and changes a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from trundle.data import sampling
from trundle.data.sampling import nearest
from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.vocabulary import _WAYS, VocabularyOptions, VocabularyPlan, _Characters, _Way
from trundle.methods.vocabulary.ranking import (
    _absent_characters,
    _behind_what_occurs,
    _compare_lengths,
    _held_out_texts,
    _lengths_when_mapped,
    _rank_tokens,
    _what_is_missing,
)
from trundle.methods.vocabulary.scores import _best_tokens
from trundle.model.cost import cost, predict
from trundle.model.layout import layout_of
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.model.token_map import cut_with_map, has_token_map, read_vocabulary, token_vectors
from trundle.model.tokenizer import NO_MERGES

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.methods.vocabulary.ranking import _Lengths, _Ranking
    from trundle.model.cost import Cost
    from trundle.model.token_map import Vocabulary
_LOST_SHOWN = 12


def plan(model: SentenceTransformer, options: VocabularyOptions, context: Context) -> VocabularyPlan:
    """Read the texts, score every token, and choose."""
    if has_token_map(model):
        raise ImpossibleCut("the model's tokens are mapped already; cut the model it was made from instead")
    way = _way(options)
    vocabulary = read_vocabulary(model)
    wanted = None if way is None else _wanted(model, vocabulary, way, options)
    if wanted is not None and wanted >= vocabulary.size:
        return VocabularyPlan(kept=tuple(range(vocabulary.size)), of=vocabulary.size, oov=options.oov)
    if options.oov == "unk" and vocabulary.unknown is None:
        raise ImpossibleCut("the model's tokenizer has no unknown token; use oov: decompose")
    rebuilt = options.oov == "decompose"
    tree = vocabulary.tree if rebuilt else NO_MERGES
    spare = options.clusters if options.oov == "cluster" else 0
    needed = vocabulary.least(rebuilt=rebuilt)
    if options.characters == "seen" and context.corpus is None:
        raise BadInput(
            "characters: seen looks at texts to know which characters occur; "
            "say where they are with --data, or leave it out"
        )
    spared = set() if options.characters == "all" or context.corpus is None else set(vocabulary.characters)
    if wanted is not None and wanted < len(needed - spared) + spare:  # whatever the texts are
        raise _too_few(model, wanted, len(needed) + spare)
    open_places = (vocabulary.size if wanted is None else wanted) - len(needed - spared) - spare
    ranking = _rank_tokens(
        model,
        vocabulary,
        options.score,
        context.corpus,
        count=max(open_places, 1),
        tree=tree,
        seed=context.seed,
        progress=context.progress,
    )
    everything = wanted is None and options.characters == "auto"
    free = set() if everything else _dispensable(vocabulary, ranking, options.characters) & needed
    needed = tree.with_halves(needed - free)
    if wanted is not None and wanted < len(needed) + spare:
        raise _too_few(model, wanted, len(needed) + spare)
    if wanted is None:
        kept = _best_tokens(ranking.order[: ranking.seen], needed, vocabulary.size, tree)
    else:
        order = _behind_what_occurs(ranking, free)
        kept = _best_tokens(order, needed, wanted - spare, tree)
    representatives = _representatives(model, vocabulary, kept, spare, context.seed)
    coverage, lost = _what_is_missing(vocabulary, ranking, kept, _LOST_SHOWN)
    return VocabularyPlan(
        kept=tuple(sorted({*kept, *representatives})),
        of=vocabulary.size,
        oov=options.oov,
        representatives=representatives,
        coverage=coverage,
        lost=lost,
        characters_lost=len({vocabulary.characters[number] for number in free - set(kept)}),
    )


def _dispensable(vocabulary: Vocabulary, ranking: _Ranking, characters: _Characters) -> set[int]:
    """Characters that need not stay: in a small vocabulary each would take the place of a token that occurs.

    All that a tokenizer ever saw are a thousand or many thousands, which the texts at hand may never have. ASCII stays with
    `auto`, so that names, numbers and addresses can always be spelled.
    """
    if characters == "all":
        return set()
    absent = _absent_characters(vocabulary, ranking)
    if characters == "seen":
        return absent
    return {number for number in absent if not vocabulary.characters[number].isascii()}


def _way(options: VocabularyOptions) -> _Way | None:
    """Which option says how many tokens stay; None for all that occur."""
    given = [way for way in _WAYS if getattr(options, way) is not None]
    if options.score == "seen":
        if given:
            raise ImpossibleCut(
                f"seen keeps every token that occurs; leave {given[0]} out, or choose another score"
            )
        return None
    if not given:
        raise ImpossibleCut(
            "say how much to keep: keep (a number of tokens), fraction or parameters (a share of either, such as 80%)"
        )
    if len(given) > 1:
        raise ImpossibleCut(
            f"{given[0]} and {given[1]} say the same thing; leave one of them out, in a recipe with null"
        )
    return given[0]


def _wanted(model: SentenceTransformer, vocabulary: Vocabulary, way: _Way, options: VocabularyOptions) -> int:
    """How many tokens to keep."""
    if way == "keep":
        assert options.keep is not None
        return options.keep
    share = options.fraction if way == "fraction" else options.parameters
    assert share is not None
    if not 0 < share <= 1:
        what = "tokens" if way == "fraction" else "parameters"
        raise ImpossibleCut(
            f"the share of {what} to keep must be over 0 and at most 1, such as 80%, not {share}"
        )
    if way == "fraction":
        return math.floor(share * vocabulary.size)
    return _tokens_left(*_rows(model), share)


def _tokens_left(row: int, tokens: int, rest: int, share: Fraction) -> int:
    """The most tokens whose rows of weights, with the rest of the model, stay within a share of all parameters."""
    return math.floor((share * (row * tokens + rest) - rest) / row)


def _rows(model: SentenceTransformer) -> tuple[int, int, int]:
    """Weights per token, the number of tokens, and the weights that are in no token's row."""
    now = cost(model).parameters
    size = layout_of(transformer_of(model).model).sizes["vocab"]
    rest = now - (now - predict(model, vocab=1).parameters) * size // max(size - 1, 1)
    return (now - rest) // size, size, rest


def _too_few(model: SentenceTransformer, wanted: int, needed: int) -> ImpossibleCut:
    row, size, rest = _rows(model)
    share = math.ceil(1000 * (rest + row * needed) / (rest + row * size)) / 10
    return ImpossibleCut(
        f"{needed:,} of the {size:,} tokens must stay (special tokens, single characters or bytes, prompts) and only "
        f"{max(wanted, 0):,} would; keep at least {needed:,}, which is {share:g}% of the parameters"
    )


def _representatives(
    model: SentenceTransformer, vocabulary: Vocabulary, kept: list[int], count: int, seed: int
) -> tuple[int, ...]:
    """Of the tokens that go, those nearest the centres of their clusters."""
    if not count:
        return ()
    gone = sorted(vocabulary.tokens.keys() - set(kept))
    found = sampling.representatives(token_vectors(model, gone), count, seed=seed)
    return tuple(gone[place] for place in found)


def forecast(model: SentenceTransformer, plan: VocabularyPlan) -> Cost:
    """What is left after the cut."""
    return predict(model, vocab=len(plan.kept))


def apply(model: SentenceTransformer, plan: VocabularyPlan, context: Context) -> Applied:
    """Cut the rows, and rebuild the tokenizer or map its ids."""
    if len(plan.kept) == plan.of:
        return Applied(model=cut(model, Cut()))
    vocabulary = read_vocabulary(model)
    if plan.oov == "decompose":
        small = cut(model, Cut(vocab=plan.kept))
        backend = read_vocabulary(small).backend
        facts = _evidence(
            context,
            lambda texts: _compare_lengths(
                vocabulary.backend, backend, texts, unknown=vocabulary.unknown_token
            ),
        )
        return Applied(model=small, facts=facts)
    kept = set(plan.kept)
    gone = sorted(vocabulary.tokens.keys() - kept)
    stands_for = [  # an id that no token has is never met, but has a place
        number if number in kept else plan.kept[0] for number in range(max(vocabulary.tokens) + 1)
    ]
    if plan.oov == "unk":
        assert vocabulary.unknown is not None
        ends = [vocabulary.unknown] * len(gone)
    else:
        targets = token_vectors(model, plan.representatives)
        found = nearest(token_vectors(model, gone), targets)
        ends = [plan.representatives[place] for place in found]
    for number, end in zip(gone, ends, strict=True):
        stands_for[number] = end
    small = cut_with_map(model, plan.kept, stands_for)
    facts = _evidence(
        context,
        lambda texts: _lengths_when_mapped(vocabulary.backend, texts, stands_for, unknown=vocabulary.unknown),
    )
    return Applied(model=small, facts=facts)


def _evidence(context: Context, look: Callable[[Sequence[str]], _Lengths]) -> dict[str, Any]:
    """How held-out texts are read now."""
    texts = _held_out_texts(context.corpus, seed=context.seed)
    if not texts:
        return {}
    found = look(texts)
    context.progress.say(f"vocabulary: on {len(texts):,} held-out texts {found}")
    return found.as_json()
