"""vocabulary: keep the tokens that matter in your texts, and rebuild the tokenizer.

The embedding rows of removed tokens are cut. `oov` chooses what happens to a removed token: by default the
rebuilt tokenizer splits it into kept pieces, and the result is a standard folder. `cluster` (the paper's way)
and `unk` keep the tokenizer and map the ids instead, with a small trundle module in the folder. No training
is needed; `align` afterwards recovers quality.

    - vocabulary: {keep: 8000}
    - vocabulary: {fraction: 25%}
    - vocabulary: {parameters: 80%, score: frequency}
    - vocabulary: {parameters: 80%, oov: cluster}

Paper: Words That Matter: Vocabulary Pruning in ModernBERT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import ExactFraction, Heal, Healing, Method, Options, Plan

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_TokenScore = Literal["tfidf", "frequency", "seen", "attention", "cluster", "random"]
_Oov = Literal["decompose", "cluster", "unk"]
_Characters = Literal["auto", "all", "seen"]
_BECOMES = {
    "decompose": "the others are split into kept pieces",
    "cluster": "the others become the nearest of {} representatives",
    "unk": "the others become the unknown token",
}


def _read_ranges(value: object) -> object:
    if not isinstance(value, str):
        return value
    ends = [part.partition("-") for part in value.split(",") if part]
    return tuple(number for low, _, high in ends for number in range(int(low), int(high or low) + 1))


def _write_ranges(ids: tuple[int, ...]) -> str:
    # The shortest form of rising ids, such as '0-4,7'.
    parts: list[list[int]] = []
    for number in ids:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


_IdRanges = Annotated[tuple[int, ...], BeforeValidator(_read_ranges), PlainSerializer(_write_ranges)]


class _VocabularyOptions(Options):
    """How many tokens to keep, which ones, and what happens to the others."""

    keep: int | None = Field(None, strict=True, ge=1, description="How many tokens to keep.")
    fraction: ExactFraction | None = Field(
        None, description="Share of the tokens to keep instead, such as 25%."
    )
    parameters: ExactFraction | None = Field(
        None, description="Share of all parameters to keep instead, such as 80%."
    )
    score: _TokenScore = Field(
        "tfidf", description="How tokens are scored; seen keeps all that occur in your texts."
    )
    scored_by: str | None = Field(
        None,
        description="With score attention: measure it in this model, such as one fine-tuned on the task.",
    )
    oov: _Oov = Field(
        "decompose",
        description="What removed tokens become: kept pieces, a similar token, or the unknown token.",
    )
    clusters: int = Field(
        50, ge=1, description="With oov cluster: number of tokens that represent the removed ones."
    )
    characters: _Characters = Field(
        "auto", description="Characters to keep: all, those in your texts, or (auto) those and ASCII."
    )
    heal: Heal = Field(
        "none",
        description="Fit the layers to the uncut model by least squares; changes the vectors of all texts.",
    )
    texts: int = Field(
        200_000, ge=1, description="Count tokens in at most this many texts; score seen uses all."
    )


class _VocabularyPlan(Plan):
    """The tokens to keep, and how much of the texts they cover."""

    kept: _IdRanges
    of: int
    oov: _Oov
    representatives: _IdRanges = ()
    """With oov: cluster, tokens that are kept only to represent others."""
    coverage: float | None = None
    """Share of the counted texts' tokens that are kept."""
    texts: int = 0
    """Number of texts in which tokens were counted."""
    lost: tuple[str, ...] = ()
    """The most frequent of the removed tokens."""
    heal: Healing = "none"
    characters_lost: int = 0
    """Single characters that are removed because they are not in the texts; they become the unknown token."""

    def __str__(self) -> str:
        if len(self.kept) == self.of:
            return f"keep all {self.of:,} tokens: nothing to cut"
        covers = "" if self.coverage is None else f", {self.coverage:.2%} of tokens in {self.texts:,} texts"
        becomes = _BECOMES[self.oov].format(len(self.representatives))
        unread = ""
        if self.characters_lost:
            unread = f", except {self.characters_lost:,} characters that never occur, which become unknown"
        return f"keep {len(self.kept):,} of {self.of:,} tokens{covers}; {becomes}{unread}"


def _check(options: _VocabularyOptions, corpus: Corpus | None) -> None:
    ways = [name for name in ("keep", "fraction", "parameters") if getattr(options, name) is not None]
    if options.score == "seen" and ways:
        raise ImpossibleCut(f"seen keeps every token that occurs; leave {ways[0]} out")
    if options.score != "seen" and not ways:
        raise ImpossibleCut("choose how much to keep with keep (a number), fraction or parameters (a share)")
    if len(ways) > 1:
        raise ImpossibleCut(f"{ways[0]} and {ways[1]} exclude each other; leave one of them out (or null)")
    for what, share in (("tokens", options.fraction), ("parameters", options.parameters)):
        if share is not None and not 0 < share <= 1:
            raise ImpossibleCut(f"the share of {what} to keep must be over 0 and at most 1, not {share}")
    if options.scored_by is not None and options.score != "attention":
        raise BadInput("scored_by names the model whose attention is measured; add score: attention")
    if options.characters == "seen" and corpus is None:
        raise BadInput("characters: seen needs texts to know which characters occur; pass them with --data")


VOCABULARY = Method(
    name="vocabulary",
    help="Keep the tokens that matter in your texts, remove the others.",
    options=_VocabularyOptions,
    plans=_VocabularyPlan,
    check=_check,
    reads=lambda options: () if options.scored_by is None else (options.scored_by,),
)
