"""depth: keep some layers of a model and drop the rest.

Say how many stay (`keep`, or `fraction` to drop: floor(L·(1−p)) of L stay, computed exactly), which ones (`blocks`), or let
the layer-loss curve say it (`pick`: the low point of the lower or of the upper half of the model, from one forward pass
over labelled tuples). Embeddings, pooling and, in pre-norm models, the final norm stay. A number of layers means evenly spaced ones
in an encoder, from two on with the last among them, which made the vectors; in a decoder the first ones (`order` says otherwise).

`keep: 0` leaves a static model, the fastest embedder there is: one vector a token, which starts as the model's own output for
that token alone, weighed by how frequent the token is in the texts of --data, or by its rank where there are none.

    - depth: {keep: 3}
    - depth: {fraction: 50%, order: first}
    - depth: {pick: small}
    - depth: {blocks: [0, 1, 2, 5, 8]}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
from trundle.errors import BadInput, ImpossibleCut
from trundle.steps.contract import Applied, Context, ExactFraction, Options, Plan, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost, LayerCurve
    from trundle.model import Layout

COUNTED_TEXTS = 100_000
"""Texts in which tokens are counted at most."""


def listed(value: object) -> object:
    """Read '0,1,5' as a list, as a person types it."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value


Blocks = Annotated[tuple[int, ...], BeforeValidator(listed)]


class DepthOptions(Options):
    """Which layers stay; exactly one of keep, fraction, pick and blocks says it."""

    keep: int | None = Field(
        None, strict=True, description="How many layers to keep; 0 leaves a static model, one vector a token."
    )
    fraction: ExactFraction | None = Field(
        None, description="Share of the layers to drop instead, such as 50%; in vocabulary it is what stays."
    )
    pick: Literal["small", "large"] | None = Field(
        None, description="Let the layer losses on tuples from --data choose: the low point of either half."
    )
    blocks: Blocks | None = Field(None, description="The layers to keep, counted from 0, such as 0,1,2,5,8.")
    order: Literal["auto", "first", "spread"] = Field(
        "auto",
        description="Which ones keep and fraction keep: the first, or evenly spaced ones; auto: first in decoders.",
    )


class DepthPlan(Plan):
    """The layers that stay, and the curve that chose them where one did."""

    blocks: tuple[int, ...]
    of: int
    pick: Literal["small", "large"] | None = None
    losses: tuple[float, ...] = ()
    """The loss of each layer as the last one, where they were compared."""

    frequencies: Literal["texts", "rank"] = "rank"
    """Where a static model has its token frequencies from."""

    def __str__(self) -> str:
        if not self.blocks:
            known = "the texts" if self.frequencies == "texts" else "their rank"
            return f"keep none of {self.of} layers: static, tokens weighed by {known}"
        kept = f"keep {len(self.blocks)} of {self.of} layers: {', '.join(map(str, self.blocks))}"
        if self.pick is None:
            return f"keep all {self.of} layers: nothing to cut" if len(self.blocks) == self.of else kept
        loss = f"loss {self.losses[len(self.blocks) - 1]:.3f}, whole model {self.losses[-1]:.3f}"
        if len(self.blocks) == self.of:
            return f"{self.pick} is the whole model ({loss}): nothing to cut"
        return f"{self.pick} ({loss}): {kept}"


def layers_left(layers: int, fraction: Fraction) -> int:
    """floor(L·(1−p)) without floating point: nine tenths of ten layers leave one, not none."""
    return math.floor(layers * (1 - fraction))


def spread(keep: int, layers: int) -> tuple[int, ...]:
    """Evenly spaced layers, the first and the last among them; a single one is the first, which reads the embeddings."""
    gaps = max(1, keep - 1)
    return tuple((2 * number * (layers - 1) + gaps) // (2 * gaps) for number in range(keep))


def plan(model: SentenceTransformer, options: DepthOptions, context: Context) -> DepthPlan:
    """Turn the wish into a list of layers, or say why it can't be had."""
    layout = body.layout_of(body.transformer_of(model).model)
    layers = layout.layers
    ways = [name for name in ("keep", "fraction", "pick", "blocks") if getattr(options, name) is not None]
    if not ways:
        raise ImpossibleCut(
            f"say how many of the {layers} layers to keep, with keep, fraction, pick or blocks"
        )
    if len(ways) > 1:
        raise ImpossibleCut(
            f"{ways[0]} and {ways[1]} say the same thing; leave one of them out, in a recipe with null"
        )
    if options.order != "auto" and ways[0] in ("pick", "blocks"):
        raise ImpossibleCut(f"order says which layers keep and fraction mean; leave it out beside {ways[0]}")
    if options.blocks is not None:
        return DepthPlan(blocks=body.check_blocks(layout, options.blocks), of=layers)
    if options.pick is not None:
        return _picked(model, options.pick, context)
    keep = _count(options, layers)
    if keep == 0:
        return DepthPlan(blocks=(), of=layers, frequencies="rank" if context.corpus is None else "texts")
    return DepthPlan(blocks=_ordered(keep, layout, options.order), of=layers)


def _ordered(keep: int, layout: Layout, order: Literal["auto", "first", "spread"]) -> tuple[int, ...]:
    """A decoder's last layers serve the next word, an encoder's last one makes the vectors: it stays if two do."""
    if order == "auto":
        order = "first" if layout.family.causal else "spread"
    return spread(keep, layout.layers) if order == "spread" else tuple(range(keep))


def _count(options: DepthOptions, layers: int) -> int:
    if options.keep is not None:
        keep = options.keep
    else:
        assert options.fraction is not None
        if not 0 <= options.fraction < 1:
            raise ImpossibleCut(
                f"the share of layers to drop must be at least 0 and under 1, such as 50%, not {options.fraction}"
            )
        keep = layers_left(layers, options.fraction)
        if keep == 0:
            raise ImpossibleCut(
                f"dropping {options.fraction} of {layers} layers leaves none; use keep: 0 if a static model is meant"
            )
    if not 0 <= keep <= layers:
        raise ImpossibleCut(f"the model has {layers} layers, so {keep} can't be kept; give 0 to {layers}")
    if keep == 0 and options.order == "spread":
        raise ImpossibleCut("a static model keeps no layers to be spread; leave order out")
    return keep


def _picked(model: SentenceTransformer, pick: Literal["small", "large"], context: Context) -> DepthPlan:
    """What the layer-loss curve says."""
    if context.corpus is None:
        raise BadInput("pick compares the layers on tuples of query and positive; give them with --data")
    curve: LayerCurve = measure.measure_curve(
        model, context.corpus.examples(), seed=context.seed, progress=context.progress
    )
    keep = curve.small if pick == "small" else curve.large
    if pick == "small" and curve.advice is not None:
        context.progress.say(curve.advice)
    if keep is None:
        raise ImpossibleCut("the model has 1 layer, so it has no lower half to pick from; use keep instead")
    return DepthPlan(blocks=tuple(range(keep)), of=curve.layers, pick=pick, losses=curve.losses)


def forecast(model: SentenceTransformer, plan: DepthPlan) -> Cost:
    """What is left after the cut."""
    if not plan.blocks:
        return measure.predict_static(model)
    return measure.predict(model, blocks=plan.blocks)


def apply(model: SentenceTransformer, plan: DepthPlan, context: Context) -> Applied:
    """Cut."""
    if not plan.blocks:
        shares = _shares(model, plan, context)
        return Applied(model=body.static_model(model, shares, progress=context.progress))
    return Applied(model=body.cut(model, body.Cut(blocks=plan.blocks)))


def _shares(model: SentenceTransformer, plan: DepthPlan, context: Context) -> NDArray[np.float64]:
    """How much of all text each token makes up."""
    if plan.frequencies == "rank":
        return body.shares_by_rank(body.static_shape(model)[0])
    if context.corpus is None:
        raise BadInput("this plan weighs tokens by how often they occur; give the texts with --data")
    texts = data.sample(context.corpus.train(), COUNTED_TEXTS, seed=context.seed)
    counts = body.token_counts(model, (text.text for text in texts))
    if not counts.any():
        raise BadInput("there are no texts to count tokens in; give more with --data, or leave --data out")
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares


STEP = Step(
    name="depth",
    help="Keep some layers and drop the rest, down to none.",
    options=DepthOptions,
    plans=DepthPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
)
