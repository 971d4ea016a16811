"""depth: keep the first layers of a model and drop the rest.

In its plainest form: keep n layers, or drop a share p of them, which keeps floor(L·(1−p)) of L, computed exactly
(L³Prune's n*). Embeddings, pooling and, in pre-norm models, the final norm stay.

    - depth: {keep: 3}
    - depth: {fraction: 50%}
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from pydantic import Field

import trundle.measure as measure
import trundle.model as body
from trundle.errors import ImpossibleCut
from trundle.steps.contract import Applied, Context, ExactFraction, Options, Plan, Step

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost


class DepthOptions(Options):
    """How many layers stay."""

    keep: int | None = Field(None, strict=True, description="How many layers to keep, from the first on.")
    fraction: ExactFraction | None = Field(
        None, description="Share of the layers to drop instead, such as 50%."
    )


class DepthPlan(Plan):
    """The layers that stay."""

    blocks: tuple[int, ...]
    of: int

    def __str__(self) -> str:
        if len(self.blocks) == self.of:
            return f"keep all {self.of} layers: nothing to cut"
        return f"keep {len(self.blocks)} of {self.of} layers: {', '.join(map(str, self.blocks))}"


def layers_left(layers: int, fraction: Fraction) -> int:
    """floor(L·(1−p)) without floating point: nine tenths of ten layers leave one, not none."""
    return math.floor(layers * (1 - fraction))


def plan(model: SentenceTransformer, options: DepthOptions, context: Context) -> DepthPlan:  # noqa: ARG001
    """Turn the wish into a list of layers, or say why it can't be had."""
    layers = body.layout_of(body.transformer_of(model).model).layers
    if options.keep is None and options.fraction is None:
        raise ImpossibleCut(f"say how many of the {layers} layers to keep, with keep or fraction")
    if options.keep is not None and options.fraction is not None:
        raise ImpossibleCut(
            "keep and fraction say the same thing; give one of them and set the other to null"
        )
    if options.keep is not None:
        keep = options.keep
    else:
        assert options.fraction is not None
        if not 0 <= options.fraction < 1:
            raise ImpossibleCut(
                f"the share of layers to drop must be at least 0 and under 1, such as 50%, not {options.fraction}"
            )
        keep = layers_left(layers, options.fraction)
    if not 1 <= keep <= layers:
        raise ImpossibleCut(f"the model has {layers} layers, so {keep} can't be kept; give 1 to {layers}")
    return DepthPlan(blocks=tuple(range(keep)), of=layers)


def forecast(model: SentenceTransformer, plan: DepthPlan) -> Cost:
    """What is left after the cut."""
    return measure.predict(model, blocks=plan.blocks)


def apply(model: SentenceTransformer, plan: DepthPlan, context: Context) -> Applied:  # noqa: ARG001
    """Cut."""
    return Applied(model=body.cut(model, body.Cut(blocks=plan.blocks)))


STEP = Step(
    name="depth",
    help="Keep the first layers and drop the rest.",
    options=DepthOptions,
    plans=DepthPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
)
