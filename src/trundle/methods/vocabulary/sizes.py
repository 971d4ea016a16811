"""What a vocabulary of each size would cover, weigh and cost in tokens: a look before the cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trundle.errors import BadInput
from trundle.methods.contract import Context
from trundle.methods.vocabulary import _Score
from trundle.methods.vocabulary.ranking import (
    _behind_what_occurs,
    _compare_lengths,
    _held_out_texts,
    _rank_tokens,
    _what_is_missing,
)
from trundle.methods.vocabulary.scores import _best_tokens
from trundle.methods.vocabulary.vocabulary import _dispensable
from trundle.model.cost import predict
from trundle.model.token_map import read_vocabulary, rebuilt_backend

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.methods.vocabulary.ranking import _Lengths
    from trundle.model.cost import Cost

_SHARES = (2, 4, 8, 16)
_LOST_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class _SizeRow:
    """One size a vocabulary could be cut to."""

    keep: int
    why: str
    coverage: float
    """Share of the texts' tokens that stay."""
    after: Cost
    lengths: _Lengths | None
    """On held-out texts, where there are any."""
    lost: tuple[str, ...]
    """The most frequent of the tokens that go."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
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
    """The sizes worth a look, the largest first, and what they were judged by."""

    texts: int
    tokens: int
    held_out: int
    rows: tuple[_SizeRow, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        rows = [row.as_json() for row in self.rows]
        return {"texts": self.texts, "tokens": self.tokens, "held_out": self.held_out, "sizes": rows}


def list_sizes(model: SentenceTransformer, score: _Score, context: Context) -> VocabularySizes:
    """What `vocabulary` would choose with its tokenizer rebuilt, from the whole vocabulary down to the least there can be."""
    if context.corpus is None:
        raise BadInput("a vocabulary is judged by texts; say where they are with --data")
    vocabulary = read_vocabulary(model)
    tree = vocabulary.tree
    needed = vocabulary.least()
    ranking = _rank_tokens(
        model,
        vocabulary,
        score,
        context.corpus,
        count=vocabulary.size,
        tree=tree,
        seed=context.seed,
        progress=context.progress,
    )
    assert ranking.counts is not None
    free = _dispensable(vocabulary, ranking, "auto")
    seen = len(tree.with_halves([*needed, *ranking.order[: ranking.seen]]))  # as `--score seen` keeps them
    needed, order = tree.with_halves(needed - free), _behind_what_occurs(ranking, free)
    sizes = {
        vocabulary.size // share: f"1/{share}" for share in _SHARES if vocabulary.size // share > len(needed)
    }
    sizes |= {vocabulary.size: "all", seen: "all that occur", len(needed): "the least"}
    texts = _held_out_texts(context.corpus, seed=context.seed)
    rows = []
    for size, why in sorted(sizes.items(), reverse=True):
        kept = _best_tokens(order, needed, size, tree)
        small = rebuilt_backend(model, kept)
        coverage, lost = _what_is_missing(vocabulary, ranking, kept, _LOST_SHOWN)
        lengths = None
        if texts:
            unknown = vocabulary.unknown_token
            lengths = _compare_lengths(vocabulary.backend, small, texts, unknown=unknown)
        after = predict(model, vocab=size)
        assert coverage is not None
        rows.append(_SizeRow(keep=size, why=why, coverage=coverage, after=after, lengths=lengths, lost=lost))
    return VocabularySizes(
        texts=ranking.counts.texts, tokens=ranking.counts.tokens, held_out=len(texts), rows=tuple(rows)
    )
