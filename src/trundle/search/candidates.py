"""Every model that the methods could make of a model, with its predicted cost.

A candidate that keeps no more of anything than another one that fits is dropped, so what remains is the edge
of the budget. A static model, with no layers, is for budgets that no layer fits into.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, partial
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.cost import Cost, predict, predict_static
from trundle.model.layout import Layout, layout_of
from trundle.model.static import static_shape
from trundle.model.surgery import transformer_of
from trundle.model.token_map import has_token_map, read_vocabulary
from trundle.precision import Precision, graph_format
from trundle.search.limits import _Budget

_Coverage = Callable[[int], float]
"""Maps a number of tokens to the share of the texts that the most frequent ones cover."""

_LAYERS = tuple(map(Fraction, ("1", "5/6", "2/3", "1/2", "1/3", "1/4", "1/6")))
_TOKENS = tuple(map(Fraction, ("1", "3/4", "1/2", "1/3", "1/4", "1/6", "1/8")))
_NEURONS = tuple(map(Fraction, ("1", "3/4", "1/2")))
_WIDTHS = tuple(map(Fraction, ("1", "1/2")))
_INT4_PROMISE, _INT4_TOKENS_PROMISE = 0.95, 0.98
_FEWEST_TOKENS = 4000
"""With fewer tokens, words are split into letters."""
_FILLED = 0.997
"""The share of a budget that tokens may fill; predicted graphs are this exact."""


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """What is kept of which model, and what that costs."""

    base: str
    """The model it is cut from: the source or a student."""
    layers: int
    tokens: int
    neurons: int
    width: Fraction
    precision: Precision
    cost: Cost
    whole: Layout = field(repr=False)
    milliseconds: float | None = None
    untouched: bool = False
    """The source itself: nothing is trained, only exported."""
    reachable: int | None = None
    """How many tokens texts become; None: all of them."""
    in_space: bool = False
    """Only tokens and bits of the source are reduced, so its vectors need no linear map."""

    @property
    def bytes(self) -> int:
        return self.cost.graph_bytes.get(self.precision, self.cost.file_bytes)

    @property
    def in_int4(self) -> bool:
        return graph_format("onnx", self.precision).weights == "int4"

    @property
    def bits(self) -> int:
        """Of a weight in a matrix and of one in the token table, added; 16 at most, like int8."""
        row = graph_format("onnx", self.precision)
        return sum(4 if part == "int4" else 8 for part in (row.weights, row.tokens or row.weights))

    @property
    def name(self) -> str:
        sizes = self.whole.sizes
        parts = [f"{self.layers} of {self.whole.layers} layers" if self.layers else "no layers (static)"]
        if self.tokens < sizes["vocab"]:
            parts.append(f"{self.tokens:,} tokens")
        if self.width != 1:
            parts.append(f"{self.width} width")
        if self.neurons < sizes["mlp"]:
            parts.append(f"{self.neurons:,} neurons")
        return ", ".join([*parts, self.precision])

    @property
    def kept(self) -> tuple[Fraction, ...]:
        """The shares that are kept; a larger share is never worse."""
        sizes = self.whole.sizes
        return (
            Fraction(self.layers, self.whole.layers),
            Fraction(self.tokens, sizes["vocab"]),
            Fraction(self.neurons, sizes["mlp"]) if self.layers else Fraction(0),
            self.width if self.layers else Fraction(0),
            Fraction(self.bits, 16),
        )

    def steps(self, *, texts: int | None = None, heal: bool = True) -> list[dict[str, Any]]:
        """Returns the cuts as recipe rows; `texts` texts map a narrower model into its original's space.

        Without `heal` the cuts are not healed, which takes time.
        """
        if self.untouched:
            return [{"depth": {"keep": self.layers}}]
        sizes = self.whole.sizes
        found: list[dict[str, Any]] = []
        if self.tokens < sizes["vocab"]:  # first, because the other methods use the new tokenizer
            lossless = self.reachable is not None and self.tokens >= self.reachable
            found.append({"vocabulary": {"keep": self.tokens} | ({"heal": "none"} if lossless else {})})
        if self.layers < self.whole.layers:
            # A decoder loses its last layers: the linear map replaces them better than a healed layer does.
            unhealed = {"heal": "none"} if self.whole.family.causal else {}
            found.append({"depth": {"keep": self.layers} | unhealed})
        if self.width != 1:
            mapped_on = {} if texts is None else {"texts": texts}
            found.append({"width": {"extract": str(self.width), **mapped_on}})
        if self.neurons < sizes["mlp"]:
            share = f"{sizes['mlp'] - self.neurons}/{sizes['mlp']}"
            found.append({"weights": {"structure": "neuron", "method": "magnitude", "sparsity": share}})
        if not heal:
            found = [{name: options | {"heal": "none"} for name, options in row.items()} for row in found]
        return found


def _list_candidates(
    model: SentenceTransformer,
    base: str,
    *,
    precisions: Sequence[Precision],
    dimensions: int,
    is_teacher: bool = True,
    budget: _Budget | None = None,
) -> list[_Candidate]:
    """Lists all cuts of `model`, each with a linear map into `dimensions`; the teacher needs no map.

    With a budget there is one more for each shape and precision: with as many tokens as fit.
    """
    layout = layout_of(transformer_of(model).model)
    sizes = layout.sizes
    token_counts, reachable = _token_counts(model, sizes["vocab"])
    candidate = partial(_Candidate, base=base, whole=layout, reachable=reachable)

    @cache  # one cost holds the sizes of all precisions
    def cost_of(tokens: int, layers: int, neurons: int, width: Fraction, in_space: bool) -> Cost:
        hidden = int(sizes["hidden"] * width)
        return predict(
            model,
            blocks=range(layers),
            vocab=tokens,
            mlp=neurons,
            hidden=hidden if width != 1 else None,
            head=int(sizes["head"] * width) if width != 1 else None,
            dense=None if in_space else (hidden, dimensions),
        )

    def with_tokens(
        tokens: int, precision: Precision, *, layers: int, neurons: int, width: Fraction
    ) -> _Candidate:
        in_space = is_teacher and (layers, neurons, width) == (layout.layers, sizes["mlp"], _WIDTHS[0])
        exact = graph_format("onnx", precision).weights != "int4" and tokens == sizes["vocab"]
        return candidate(
            precision=precision,
            layers=layers,
            tokens=tokens,
            neurons=neurons,
            width=width,
            cost=cost_of(tokens, layers, neurons, width, in_space),
            untouched=in_space and exact,
            in_space=in_space,
        )

    def static(tokens: int, precision: Precision, *, rows: int) -> _Candidate:
        # The map is multiplied into the table, so its width is that of the teacher.
        cost = predict_static(model, rows=min(rows, tokens), width=dimensions)
        return candidate(
            precision=precision, layers=0, tokens=tokens, neurons=sizes["mlp"], width=_WIDTHS[0], cost=cost
        )

    shapes = itertools.product(
        _counts(layout.layers, _LAYERS, at_least=1), _counts(sizes["mlp"], _NEURONS, at_least=1), _WIDTHS
    )
    makers: list[Callable[[int, Precision], _Candidate]] = [
        partial(with_tokens, layers=layers, neurons=neurons, width=width) for layers, neurons, width in shapes
    ]
    if not has_token_map(model):
        with suppress(BadModel):  # its tokenizer does not allow a static model
            makers.append(partial(static, rows=static_shape(model)[0]))
    found = []
    for precision, make in itertools.product(precisions, makers):
        with suppress(ImpossibleCut):
            shape = [make(tokens, precision) for tokens in token_counts]
            most = None if budget is None else _most_tokens(shape, budget)
            found += shape if most is None else [*shape, make(most, precision)]
    return found


def _most_tokens(shape: Sequence[_Candidate], budget: _Budget) -> int | None:
    """How many tokens fill the budget, between the most of `shape` that fit and the fewest that don't."""
    ordered = sorted(shape, key=lambda each: each.tokens)
    pairs = itertools.pairwise(ordered)
    edge = next(((a, b) for a, b in pairs if _fits(a, budget) and not _fits(b, budget)), None)
    if edge is None:
        return None
    low, high = edge
    limits = [
        (budget.bytes, low.bytes, high.bytes),
        (budget.parameters, low.cost.parameters, high.cost.parameters),
    ]
    room = (
        (_FILLED * limit - least) / (most - least)
        for limit, least, most in limits
        if limit is not None and most > limit
    )
    tokens = low.tokens + int(min(room, default=0.0) * (high.tokens - low.tokens))
    return tokens if tokens > low.tokens else None


def _edge(
    candidates: Iterable[_Candidate], budget: _Budget, coverage: Mapping[str, _Coverage]
) -> list[_Candidate]:
    """The candidates that fit and keep more of something than any other that fits, most promising first."""
    fitting = [(each, each.kept) for each in candidates if _fits(each, budget)]
    best = [
        each
        for each, kept in fitting
        if not any(
            other.base == each.base
            and more != kept
            and all(theirs >= ours for theirs, ours in zip(more, kept, strict=True))
            for other, more in fitting
        )
    ]
    return sorted(best, key=lambda each: _promise(each, coverage[each.base]), reverse=True)


def _promise(candidate: _Candidate, coverage: _Coverage) -> float:
    """Estimates quality from what is kept, to decide which candidates get a trial.

    In measurements, a smaller vocabulary hurts most, by what it no longer covers. Then follow half the width
    and the layers; neurons hardly matter. Int4 costs little once it is fitted or trained, and the token table
    alone in int4 even less. `benchmarks/planner.py regret` measures the error.
    """
    layers, _, neurons, width, _ = (float(share) for share in candidate.kept)
    precision = {8: _INT4_PROMISE, 12: _INT4_TOKENS_PROMISE}.get(candidate.bits, 1.0)
    return float(precision * layers**0.4 * neurons**0.2 * width * coverage(candidate.tokens) ** 4)


def _smallest(candidates: Iterable[_Candidate]) -> _Candidate:
    return min(candidates, key=lambda each: (each.bytes, each.cost.parameters))


def _fits(candidate: _Candidate, budget: _Budget) -> bool:
    return budget.allows(
        file_bytes=candidate.bytes, parameters=candidate.cost.parameters, milliseconds=candidate.milliseconds
    )


def _token_counts(model: SentenceTransformer, whole: int) -> tuple[list[int], int | None]:
    """The numbers of tokens to try, and how many tokens texts become, if that is known."""
    if has_token_map(model):
        return [whole], None
    try:
        vocabulary = read_vocabulary(model)
    except BadModel:  # a tokenizer that can't be rebuilt
        return [whole], None
    found = _counts(whole, _TOKENS, at_least=max(_FEWEST_TOKENS, len(vocabulary.least())))
    reachable = max(found[-1], whole - len(vocabulary.unreachable()))
    return sorted({*found, reachable}, reverse=True), reachable


def _counts(whole: int, shares: Sequence[Fraction], *, at_least: int) -> list[int]:
    return sorted({max(int(whole * share), min(at_least, whole)) for share in shares}, reverse=True)
