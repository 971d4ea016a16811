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

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PlainSerializer

from trundle.methods.contract import ExactFraction, Method, Options, Plan

_Score = Literal["tfidf", "frequency", "seen", "attention", "cluster", "random"]

_Oov = Literal["decompose", "cluster", "unk"]
_Way = Literal["keep", "fraction", "parameters"]
_Characters = Literal["auto", "all", "seen"]

_WAYS: tuple[_Way, ...] = get_args(_Way)
_BECOMES = {
    "decompose": "the others are read as pieces",
    "cluster": "the others are read as the nearest of {} tokens that stand for them",
    "unk": "the others are read as the unknown token",
}


def _read_ranges(value: object) -> object:
    """'0-4,7' as the ids it stands for."""
    if not isinstance(value, str):
        return value
    ends = [part.partition("-") for part in value.split(",") if part]
    return tuple(number for low, _, high in ends for number in range(int(low), int(high or low) + 1))


def _write_ranges(ids: tuple[int, ...]) -> str:
    """Rising ids in the shortest way to write them down."""
    parts: list[list[int]] = []
    for number in ids:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


_IdRanges = Annotated[tuple[int, ...], BeforeValidator(_read_ranges), PlainSerializer(_write_ranges)]


class VocabularyOptions(Options):
    """How many tokens stay, which, and what becomes of the others."""

    keep: int | None = Field(None, strict=True, ge=1, description="How many tokens to keep.")
    fraction: ExactFraction | None = Field(
        None, description="Share of the tokens to keep instead, such as 25%; in depth it is what goes."
    )
    parameters: ExactFraction | None = Field(
        None, description="Share of all the model's parameters to keep instead, such as 80%."
    )
    score: _Score = Field(
        "tfidf", description="What makes a token worth keeping; seen keeps all that occur in your texts."
    )
    oov: _Oov = Field(
        "decompose",
        description="What becomes of the others: split into kept pieces, or mapped to a similar or the unknown token.",
    )
    clusters: int = Field(50, ge=1, description="With oov cluster: how many tokens stand for those that go.")
    characters: _Characters = Field(
        "auto",
        description="Which single characters always stay: all, those in your texts, or (auto) those and ASCII; others as far as there is room.",
    )


class VocabularyPlan(Plan):
    """The tokens that stay, and how much of the texts they are."""

    kept: _IdRanges
    of: int
    oov: _Oov
    representatives: _IdRanges = ()
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
        becomes = _BECOMES[self.oov].format(len(self.representatives))
        unread = ""
        if self.characters_lost:
            unread = f", save {self.characters_lost:,} characters that never occur, which become unknown"
        return f"keep {len(self.kept):,} of {self.of:,} tokens{covers}; {becomes}{unread}"


VOCABULARY = Method(
    name="vocabulary",
    help="Keep the tokens that matter in your texts and rebuild the tokenizer.",
    options=VocabularyOptions,
    plans=VocabularyPlan,
)
