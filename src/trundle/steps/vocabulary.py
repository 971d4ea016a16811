"""vocabulary: keep the tokens that matter in your texts, with a tokenizer that is really rebuilt.

The rows of the tokens that go are cut out of the embedding, and the tokenizer is rebuilt without them, so a word that
is gone is read as the pieces that are left. No training is needed; `align` afterwards heals what was lost.

    - vocabulary: {keep: 8000}
    - vocabulary: {parameters: 80%, score: frequency}

Paper: Vocabulary pruning for compact text encoders.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import trundle.measure as measure
import trundle.model as body
from trundle.errors import BadInput, ImpossibleCut
from trundle.steps.contract import Applied, Context, ExactFraction, Options, Plan, Step

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost


class VocabularyOptions(Options):
    """How many tokens stay, which, and what becomes of the others."""

    keep: int | None = Field(None, strict=True, ge=1, description="How many tokens to keep.")
    parameters: ExactFraction | None = Field(
        None, description="Share of all the model's parameters to keep instead, such as 80%."
    )
    score: Literal["tfidf", "frequency", "seen"] = Field(
        "tfidf", description="What makes a token worth keeping; seen keeps all that occur."
    )
    oov: Literal["decompose"] = Field(
        "decompose", description="What becomes of the others: split into kept pieces."
    )


class VocabularyPlan(Plan):
    """The tokens that stay."""

    kept: tuple[int, ...]
    of: int
    oov: Literal["decompose"]

    def __str__(self) -> str:
        if len(self.kept) == self.of:
            return f"keep all {self.of:,} tokens: nothing to cut"
        return f"keep {len(self.kept):,} of {self.of:,} tokens"


def plan(model: SentenceTransformer, options: VocabularyOptions, context: Context) -> VocabularyPlan:
    """Read the texts, score every token, and choose."""
    transformer = body.transformer_of(model)
    layout = body.layout_of(transformer.model)
    size = layout.sizes["vocab"]
    wanted = _wanted(model, options)
    if wanted is not None and wanted >= size:
        return VocabularyPlan(kept=tuple(range(size)), of=size, oov=options.oov)
    needed = body.needed_ids(model)
    if wanted is not None and wanted < len(needed):
        raise ImpossibleCut(_too_few(model, len(needed), size))
    scores = _scores(model, options, context, size)
    seen = np.flatnonzero(scores > 0)
    order = seen if wanted is None else np.argsort(-scores, kind="stable")
    kept = set(needed)
    for number in order.tolist():
        if wanted is not None and len(kept) >= wanted:
            break
        kept.add(number)
    return VocabularyPlan(kept=tuple(sorted(kept)), of=size, oov=options.oov)


def _wanted(model: SentenceTransformer, options: VocabularyOptions) -> int | None:
    """How many tokens to keep; None for all that occur."""
    if options.keep is not None and options.parameters is not None:
        raise ImpossibleCut("keep and parameters say the same thing; give one of them")
    if options.score == "seen":
        if options.keep is not None or options.parameters is not None:
            raise ImpossibleCut("seen keeps every token that occurs; leave keep and parameters out")
        return None
    if options.keep is not None:
        return options.keep
    if options.parameters is None:
        raise ImpossibleCut("say how much to keep: keep (a number of tokens) or parameters (such as 80%)")
    if not 0 < options.parameters <= 1:
        raise ImpossibleCut(
            f"the share of parameters to keep must be over 0 and at most 1, such as 80%, not {options.parameters}"
        )
    return tokens_left(*_row_and_rest(model), options.parameters)


def tokens_left(row: int, tokens: int, rest: int, share: Fraction) -> int:
    """The most tokens whose rows of weights, with the rest of the model, stay within a share of all parameters."""
    return math.floor((share * (row * tokens + rest) - rest) / row)


def _row_and_rest(model: SentenceTransformer) -> tuple[int, int, int]:
    """Weights per token, the number of tokens, and the weights that are in no token's row."""
    now = measure.cost(model).parameters
    size = body.layout_of(body.transformer_of(model).model).sizes["vocab"]
    row = (now - measure.predict(model, vocab=1).parameters) // (size - 1)
    return row, size, now - row * size


def _too_few(model: SentenceTransformer, needed: int, size: int) -> str:
    row, _, rest = _row_and_rest(model)
    share = math.ceil(1000 * (rest + row * needed) / (rest + row * size)) / 10
    return (
        f"{needed:,} of the {size:,} tokens must stay (special tokens, single characters and the model's prompts); "
        f"keep at least so many, or {share:g}% of the parameters"
    )


def _scores(
    model: SentenceTransformer, options: VocabularyOptions, context: Context, size: int
) -> NDArray[np.float64]:
    if context.corpus is None:
        raise BadInput(
            "vocabulary looks at texts to know which tokens matter; say where they are with --data"
        )
    texts = (text.text for text in context.corpus.train())
    with measure.spilling() as spill:
        chunks = measure.tokenised(body.backend_of(model), texts, context.progress)
        counts = measure.count_tokens(spill.through(chunks) if options.score == "tfidf" else chunks, size)
        if not counts.tokens:
            raise BadInput("there is no text to count tokens in; give texts with --data")
        if options.score == "tfidf":
            return measure.tfidf_scores(spill.again(), counts)
    return counts.occurrences.astype(np.float64)


def forecast(model: SentenceTransformer, plan: VocabularyPlan) -> Cost:
    """What is left after the cut."""
    return measure.predict(model, vocab=len(plan.kept))


def apply(model: SentenceTransformer, plan: VocabularyPlan, context: Context) -> Applied:  # noqa: ARG001
    """Cut the rows and rebuild the tokenizer."""
    whole = len(plan.kept) == plan.of
    return Applied(model=body.cut(model, body.Cut(vocab=None if whole else plan.kept)))


STEP = Step(
    name="vocabulary",
    help="Keep the tokens that matter in your texts and rebuild the tokenizer.",
    options=VocabularyOptions,
    plans=VocabularyPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
)
