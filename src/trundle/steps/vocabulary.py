"""vocabulary: keep the tokens that matter in your texts, with a tokenizer that is really rebuilt.

The rows of the tokens that go are cut out of the embedding. What becomes of a token that is gone is `oov`: by default
the rebuilt tokenizer reads it as the pieces that are left, and the result is a standard folder. `cluster` (the paper's way)
and `unk` keep the tokenizer and map the ids instead, with a small module of ours in the folder. No training is needed;
`align` afterwards heals what was lost.

    - vocabulary: {keep: 8000}
    - vocabulary: {fraction: 25%}
    - vocabulary: {parameters: 80%, score: frequency}
    - vocabulary: {parameters: 80%, oov: cluster}

Paper: Vocabulary pruning for compact text encoders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer

import trundle.measure as measure
import trundle.model as body
from trundle.errors import BadInput, ImpossibleCut
from trundle.measure.score_names import Score
from trundle.steps.contract import Applied, Context, ExactFraction, Options, Plan, Step

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost, Lengths, Ranking
    from trundle.model import Vocabulary

Oov = Literal["decompose", "cluster", "unk"]
Way = Literal["keep", "fraction", "parameters"]
Characters = Literal["auto", "all", "seen"]

WAYS: tuple[Way, ...] = get_args(Way)
LOST_SHOWN = 12
BECOMES = {
    "decompose": "the others are read as pieces",
    "cluster": "the others are read as the nearest of {} tokens that stand for them",
    "unk": "the others are read as the unknown token",
}


def read_ranges(value: object) -> object:
    """'0-4,7' as the ids it stands for."""
    if not isinstance(value, str):
        return value
    ends = [part.partition("-") for part in value.split(",") if part]
    return tuple(number for low, _, high in ends for number in range(int(low), int(high or low) + 1))


def write_ranges(ids: tuple[int, ...]) -> str:
    """Rising ids in the shortest way to write them down."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


IdRanges = Annotated[tuple[int, ...], BeforeValidator(read_ranges), PlainSerializer(write_ranges)]


class VocabularyOptions(Options):
    """How many tokens stay, which, and what becomes of the others."""

    keep: int | None = Field(None, strict=True, ge=1, description="How many tokens to keep.")
    fraction: ExactFraction | None = Field(
        None, description="Share of the tokens to keep instead, such as 25%; in depth it is what goes."
    )
    parameters: ExactFraction | None = Field(
        None, description="Share of all the model's parameters to keep instead, such as 80%."
    )
    score: Score = Field(
        "tfidf", description="What makes a token worth keeping; seen keeps all that occur in your texts."
    )
    oov: Oov = Field(
        "decompose",
        description="What becomes of the others: split into kept pieces, or mapped to a similar or the unknown token.",
    )
    clusters: int = Field(50, ge=1, description="With oov cluster: how many tokens stand for those that go.")
    characters: Characters = Field(
        "auto",
        description="Which single characters always stay: all, those in your texts, or (auto) those and ASCII; others as far as there is room.",
    )


class VocabularyPlan(Plan):
    """The tokens that stay, and how much of the texts they are."""

    kept: IdRanges
    of: int
    oov: Oov
    representatives: IdRanges = ()
    """Kept tokens that only stand for others, with oov: cluster."""
    coverage: float | None = None
    """Share of the texts' tokens that stay."""
    lost: tuple[str, ...] = ()
    """The most frequent of the tokens that go."""
    characters_lost: int = 0
    """Single characters that go because they are in none of the texts; where one is met, it is unknown."""

    def __str__(self) -> str:
        if len(self.kept) == self.of:
            return f"keep all {self.of:,} tokens: nothing to cut"
        covers = "" if self.coverage is None else f", {self.coverage:.2%} of what occurs in your texts"
        becomes = BECOMES[self.oov].format(len(self.representatives))
        unread = ""
        if self.characters_lost:
            unread = f", save {self.characters_lost:,} characters that never occur, which become unknown"
        return f"keep {len(self.kept):,} of {self.of:,} tokens{covers}; {becomes}{unread}"


def plan(model: SentenceTransformer, options: VocabularyOptions, context: Context) -> VocabularyPlan:
    """Read the texts, score every token, and choose."""
    if body.has_token_map(model):
        raise ImpossibleCut("the model's tokens are mapped already; cut the model it was made from instead")
    way = _way(options)
    vocabulary = body.read_vocabulary(model)
    wanted = None if way is None else _wanted(model, vocabulary, way, options)
    if wanted is not None and wanted >= vocabulary.size:
        return VocabularyPlan(kept=tuple(range(vocabulary.size)), of=vocabulary.size, oov=options.oov)
    if options.oov == "unk" and vocabulary.unknown is None:
        raise ImpossibleCut("the model's tokenizer has no unknown token; use oov: decompose")
    rebuilt = options.oov == "decompose"
    tree = vocabulary.tree if rebuilt else body.NO_MERGES
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
    ranking = measure.rank_tokens(
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
    free = set() if everything else dispensable(vocabulary, ranking, options.characters) & needed
    needed = tree.with_halves(needed - free)
    if wanted is not None and wanted < len(needed) + spare:
        raise _too_few(model, wanted, len(needed) + spare)
    if wanted is None:
        kept = measure.best_tokens(ranking.order[: ranking.seen], needed, vocabulary.size, tree)
    else:
        order = measure.behind_what_occurs(ranking, free)
        kept = measure.best_tokens(order, needed, wanted - spare, tree)
    representatives = _representatives(model, vocabulary, kept, spare, context.seed)
    coverage, lost = measure.what_is_missing(vocabulary, ranking, kept, LOST_SHOWN)
    return VocabularyPlan(
        kept=tuple(sorted({*kept, *representatives})),
        of=vocabulary.size,
        oov=options.oov,
        representatives=representatives,
        coverage=coverage,
        lost=lost,
        characters_lost=len({vocabulary.characters[number] for number in free - set(kept)}),
    )


def dispensable(vocabulary: Vocabulary, ranking: Ranking, characters: Characters) -> set[int]:
    """Characters that need not stay: in a small vocabulary each would take the place of a token that occurs.

    All that a tokenizer ever saw are a thousand or many thousands, which the texts at hand may never have. ASCII stays with
    `auto`, so that names, numbers and addresses can always be spelled.
    """
    if characters == "all":
        return set()
    absent = measure.absent_characters(vocabulary, ranking)
    if characters == "seen":
        return absent
    return {number for number in absent if not vocabulary.characters[number].isascii()}


def _way(options: VocabularyOptions) -> Way | None:
    """Which option says how many tokens stay; None for all that occur."""
    given = [way for way in WAYS if getattr(options, way) is not None]
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


def _wanted(model: SentenceTransformer, vocabulary: Vocabulary, way: Way, options: VocabularyOptions) -> int:
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
    return tokens_left(*_rows(model), share)


def tokens_left(row: int, tokens: int, rest: int, share: Fraction) -> int:
    """The most tokens whose rows of weights, with the rest of the model, stay within a share of all parameters."""
    return math.floor((share * (row * tokens + rest) - rest) / row)


def _rows(model: SentenceTransformer) -> tuple[int, int, int]:
    """Weights per token, the number of tokens, and the weights that are in no token's row."""
    now = measure.cost(model).parameters
    size = body.layout_of(body.transformer_of(model).model).sizes["vocab"]
    rest = now - (now - measure.predict(model, vocab=1).parameters) * size // max(size - 1, 1)
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
    found = measure.representatives(body.token_vectors(model, gone), count, seed=seed)
    return tuple(gone[place] for place in found)


def forecast(model: SentenceTransformer, plan: VocabularyPlan) -> Cost:
    """What is left after the cut."""
    return measure.predict(model, vocab=len(plan.kept))


def apply(model: SentenceTransformer, plan: VocabularyPlan, context: Context) -> Applied:
    """Cut the rows, and rebuild the tokenizer or map its ids."""
    if len(plan.kept) == plan.of:
        return Applied(model=body.cut(model, body.Cut()))
    vocabulary = body.read_vocabulary(model)
    if plan.oov == "decompose":
        small = body.cut(model, body.Cut(vocab=plan.kept))
        backend = body.read_vocabulary(small).backend
        facts = _evidence(
            context,
            lambda texts: measure.compare_lengths(
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
        targets = body.token_vectors(model, plan.representatives)
        found = measure.nearest(body.token_vectors(model, gone), targets)
        ends = [plan.representatives[place] for place in found]
    for number, end in zip(gone, ends, strict=True):
        stands_for[number] = end
    small = body.cut_with_map(model, plan.kept, stands_for)
    facts = _evidence(
        context,
        lambda texts: measure.lengths_when_mapped(
            vocabulary.backend, texts, stands_for, unknown=vocabulary.unknown
        ),
    )
    return Applied(model=small, facts=facts)


def _evidence(context: Context, look: Callable[[Sequence[str]], Lengths]) -> dict[str, Any]:
    """How held-out texts are read now."""
    texts = measure.held_out_texts(context.corpus, seed=context.seed)
    if not texts:
        return {}
    found = look(texts)
    context.progress.say(f"vocabulary: on {len(texts):,} held-out texts {found}")
    return found.as_json()


STEP = Step(
    name="vocabulary",
    help="Keep the tokens that matter in your texts and rebuild the tokenizer.",
    options=VocabularyOptions,
    plans=VocabularyPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
)
