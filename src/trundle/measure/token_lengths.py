"""How many tokens texts take before and after a cut: what a smaller vocabulary costs in work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trundle.measure.token_counts import count_tokens, tokenised
from trundle.model.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens per text and the share of them that is unknown, before and after."""

    before: float
    after: float
    unknown_before: float
    unknown_after: float

    @property
    def ratio(self) -> float:
        """How many times longer texts have become."""
        return self.after / self.before

    def __str__(self) -> str:
        return (
            f"{self.before:.1f} tokens per text become {self.after:.1f} ({self.ratio:.3f}×), "
            f"unknown {self.unknown_before:.2%} → {self.unknown_after:.2%}"
        )

    def as_json(self) -> dict[str, Any]:
        """For machines and the lineage."""
        return {
            "tokens_per_text_before": round(self.before, 3),
            "tokens_per_text_after": round(self.after, 3),
            "unknown_share_before": round(self.unknown_before, 6),
            "unknown_share_after": round(self.unknown_after, 6),
        }


def compare_lengths(before: Vocabulary, after: Vocabulary, texts: Sequence[str]) -> Lengths:
    """The same texts through both tokenizers, without special tokens."""
    (old, old_unknown), (new, new_unknown) = (_length(vocabulary, texts) for vocabulary in (before, after))
    return Lengths(before=old, after=new, unknown_before=old_unknown, unknown_after=new_unknown)


def _length(vocabulary: Vocabulary, texts: Sequence[str]) -> tuple[float, float]:
    counts = count_tokens(tokenised(vocabulary.backend, texts), vocabulary.size)
    unknown = 0 if vocabulary.unknown is None else int(counts.occurrences[vocabulary.unknown])
    return counts.tokens / len(texts), unknown / max(counts.tokens, 1)
