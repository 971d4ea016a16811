"""Every model the steps could make of this one, as plain data, sized before any is made.

The grid is small on purpose. A candidate that another one beats or equals in everything that is kept, and that fits just
as well, is no candidate: what stays is the edge of the budget, where one thing can only be had for another. A static model, with no
layers at all, promises least, and is there for budgets that no layer fits into. Int8 is no
question: it costs little, a gate sees to that, and a quarter of the bytes buys four times the model. Int4 has to be learned with, and
buys twice the model again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.cost import Cost, predict, predict_static
from trundle.model.layout import Layout, layout_of
from trundle.model.static import static_shape
from trundle.model.surgery import transformer_of
from trundle.model.token_map import has_token_map
from trundle.model.vocabulary import read_vocabulary
from trundle.precision import Precision, graph_format
from trundle.search.budget import _Budget

_Coverage = Callable[[int], float]
"""The share of all tokens in the texts that the so many most frequent ones are."""

_LAYERS = (
    Fraction(1),
    Fraction(5, 6),
    Fraction(2, 3),
    Fraction(1, 2),
    Fraction(1, 3),
    Fraction(1, 4),
    Fraction(1, 6),
)
_TOKENS = (
    Fraction(1),
    Fraction(3, 4),
    Fraction(1, 2),
    Fraction(1, 3),
    Fraction(1, 4),
    Fraction(1, 6),
    Fraction(1, 8),
)
_NEURONS = (Fraction(1), Fraction(3, 4), Fraction(1, 2))
_WIDTHS = (Fraction(1), Fraction(1, 2))
_INT4_PROMISE = 0.95
_FEWEST_TOKENS = 4000
"""Fewer pieces than this spell words letter by letter."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """What would be kept of which model, and what that costs."""

    base: str
    """The model it is cut from: the one to shrink, or a student's backbone."""
    layers: int
    tokens: int
    neurons: int
    width: Fraction
    precision: Precision
    cost: Cost
    whole: Layout = field(repr=False)
    milliseconds: float | None = None
    untouched: bool = False
    """The model itself: nothing to learn, only to export."""

    @property
    def bytes(self) -> int:
        """Of the file that is shipped."""
        return self.cost.graph_bytes.get(self.precision, self.cost.file_bytes)

    @property
    def in_int4(self) -> bool:
        """Whether its weights are stored in int4, so that it trains with rounded weights."""
        return graph_format("onnx", self.precision).weights == "int4"

    @property
    def name(self) -> str:
        """What is kept, in a few words."""
        sizes = self.whole.sizes
        told = [f"{self.layers} of {self.whole.layers} layers" if self.layers else "no layers (static)"]
        if self.tokens < sizes["vocab"]:
            told.append(f"{self.tokens:,} tokens")
        if self.width != 1:
            told.append(f"{self.width} width")
        if self.neurons < sizes["mlp"]:
            told.append(f"{self.neurons:,} neurons")
        return ", ".join([*told, self.precision])

    @property
    def kept(self) -> tuple[Fraction, ...]:
        """The shares that are kept: more is never worse."""
        sizes = self.whole.sizes
        return (
            Fraction(self.layers, self.whole.layers),
            Fraction(self.tokens, sizes["vocab"]),
            Fraction(self.neurons, sizes["mlp"]) if self.layers else Fraction(0),
            self.width if self.layers else Fraction(0),
            Fraction(1, 2) if self.in_int4 else Fraction(1),
        )

    def steps(self, *, texts: int | None = None) -> list[dict[str, Any]]:
        """The cuts as rows of a recipe: the vocabulary first, so that all others are made on the model that reads it.

        A narrow model is mapped into its own original's space, by the vectors of so many `texts`.
        """
        if self.untouched:
            return [{"depth": {"keep": self.layers}}]
        sizes = self.whole.sizes
        found: list[dict[str, Any]] = []
        if self.tokens < sizes["vocab"]:
            found.append({"vocabulary": {"keep": self.tokens}})
        if self.layers < self.whole.layers:
            found.append({"depth": {"keep": self.layers}})
        if self.width != 1:
            found.append(
                {"width": {"extract": str(self.width)} | ({} if texts is None else {"texts": texts})}
            )
        if self.neurons < sizes["mlp"]:
            share = f"{sizes['mlp'] - self.neurons}/{sizes['mlp']}"
            found.append({"weights": {"structure": "neuron", "method": "magnitude", "sparsity": share}})
        return found


def _list_candidates(
    model: SentenceTransformer,
    base: str,
    *,
    precision: Precision,
    dimensions: int,
    is_teacher: bool = True,
) -> list[_Candidate]:
    """The whole grid of cuts the model can take, each with a linear map into `dimensions`.

    The teacher as it is needs no map, a student's backbone as it is does. A static model's goes into its table.
    """
    layout = layout_of(transformer_of(model).model)
    sizes = layout.sizes
    grid = itertools.product(
        _counts(layout.layers, _LAYERS, at_least=1),
        (token_counts := _token_counts(model, sizes["vocab"])),
        _counts(sizes["mlp"], _NEURONS, at_least=1),
        _WIDTHS,
    )
    found = []
    for layers, tokens, neurons, width in grid:
        hidden = sizes["hidden"] * width
        kept = (layers, tokens, neurons, width)
        untouched = (
            is_teacher
            and graph_format("onnx", precision).weights != "int4"
            and kept == (layout.layers, sizes["vocab"], sizes["mlp"], _WIDTHS[0])
        )
        try:
            cost = predict(
                model,
                blocks=range(layers),
                vocab=tokens,
                mlp=neurons,
                hidden=int(hidden) if width != 1 else None,
                head=int(sizes["head"] * width) if width != 1 else None,
                dense=None if untouched else (int(hidden), dimensions),
            )
        except ImpossibleCut:
            continue
        found.append(
            _Candidate(
                base=base,
                layers=layers,
                tokens=tokens,
                neurons=neurons,
                width=width,
                precision=precision,
                cost=cost,
                whole=layout,
                untouched=untouched,
            )
        )
    for tokens, cost in _static_costs(model, token_counts, dimensions):
        found.append(
            _Candidate(
                base=base,
                layers=0,
                tokens=tokens,
                neurons=sizes["mlp"],
                width=_WIDTHS[0],
                precision=precision,
                cost=cost,
                whole=layout,
            )
        )
    return found


def _static_costs(
    model: SentenceTransformer, counts: Sequence[int], dimensions: int
) -> Iterator[tuple[int, Cost]]:
    """Static models of so many tokens; none where the tokenizer can't be a static model's."""
    if has_token_map(model):
        return
    try:
        rows, _ = static_shape(model)
    except BadModel:
        return
    for tokens in counts:
        yield tokens, predict_static(model, rows=min(rows, tokens), width=dimensions)


def _edge(
    candidates: Iterable[_Candidate], budget: _Budget, coverage: Mapping[str, _Coverage]
) -> list[_Candidate]:
    """Those that fit and that no other that fits beats in all that is kept, most promising first."""
    fitting = [each for each in candidates if _fits(each, budget)]
    best = [
        each
        for each in fitting
        if not any(
            other is not each
            and other.base == each.base
            and other.kept != each.kept
            and all(theirs >= ours for theirs, ours in zip(other.kept, each.kept, strict=True))
            for other in fitting
        )
    ]
    return sorted(best, key=lambda each: _promise(each, coverage[each.base]), reverse=True)


def _promise(candidate: _Candidate, coverage: _Coverage) -> float:
    """A guess at quality from what is kept, to choose what is tried at all; trials decide, not this.

    In what was measured, a vocabulary hurts most, by what it no longer covers of the texts: not at three quarters of its size, a lot
    at a sixth. Then comes half the width, then the layers; neurons hardly count. Int4 costs nothing beside such cuts once it is learned
    with, but it is the dearest where next to nothing else is cut. (`benchmarks/regret.py` shows how far off this is.)
    """
    layers, _, neurons, width, _ = (float(share) for share in candidate.kept)
    precision = _INT4_PROMISE if candidate.in_int4 else 1.0
    return float(precision * layers**0.4 * neurons**0.2 * width * coverage(candidate.tokens) ** 4)


def _smallest(candidates: Iterable[_Candidate]) -> _Candidate:
    """The least the grid can do."""
    return min(candidates, key=lambda each: (each.bytes, each.cost.parameters))


def _fits(candidate: _Candidate, budget: _Budget) -> bool:
    return budget.allows(
        file_bytes=candidate.bytes, parameters=candidate.cost.parameters, milliseconds=candidate.milliseconds
    )


def _token_counts(model: SentenceTransformer, whole: int) -> list[int]:
    """Counts of tokens that the step `vocabulary` does not refuse, largest first."""
    if has_token_map(model):
        return [whole]
    try:
        least = len(read_vocabulary(model).least())
    except BadModel:  # a tokenizer that can't be rebuilt
        return [whole]
    return _counts(whole, _TOKENS, at_least=max(_FEWEST_TOKENS, least))


def _counts(whole: int, shares: Sequence[Fraction], *, at_least: int) -> list[int]:
    """Counts for these shares, largest first, none under what makes sense unless the whole is."""
    counts = {max(int(whole * share), min(at_least, whole)) for share in shares}
    return sorted(counts, reverse=True)
