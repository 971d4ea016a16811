"""How texts are read before and after a cut: in more tokens with a rebuilt tokenizer, in other ones with a map of ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from trundle.measure.token_counts import count_tokens, tokenised


@dataclass(frozen=True, kw_only=True)
class Lengths:
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


def compare_lengths(
    before: Tokenizer, after: Tokenizer, texts: Sequence[str], *, unknown: str | None
) -> Lengths:
    """The same texts through both tokenizers, without special tokens."""
    old, old_unknown = _length(before, texts, unknown)
    new, new_unknown = _length(after, texts, unknown)
    return Lengths(before=old, after=new, unknown_before=old_unknown, unknown_after=new_unknown)


def _length(tokenizer: Tokenizer, texts: Sequence[str], unknown: str | None) -> tuple[float, float]:
    size = 1 + max(tokenizer.get_vocab().values())  # there may be more ids than tokens
    counts = count_tokens(tokenised(tokenizer, texts), size)
    number = None if unknown is None else tokenizer.token_to_id(unknown)
    share = 0.0 if number is None else float(counts.occurrences[number] / max(counts.tokens, 1))
    return counts.tokens / len(texts), share


def lengths_when_mapped(
    tokenizer: Tokenizer, texts: Sequence[str], stands_for: Sequence[int], *, unknown: int | None
) -> Lengths:
    """The texts' tokens, without special ones, by what each is read as: `stands_for` has an id for every id."""
    counts = count_tokens(tokenised(tokenizer, texts), len(stands_for))
    ends, total = np.asarray(stands_for), max(counts.tokens, 1)
    other, lost = ends != np.arange(len(ends)), ends == (-1 if unknown is None else unknown)

    def share(chosen: NDArray[np.bool_]) -> float:
        return float(counts.occurrences[chosen].sum() / total)

    each = counts.tokens / len(texts)
    return Lengths(
        before=each,
        after=each,
        unknown_before=share(lost & ~other),
        unknown_after=share(lost),
        stand_in=share(other & ~lost),
    )
