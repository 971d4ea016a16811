"""How `depth` plans and changes a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from trundle.data.sampling import sample
from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.depth import DepthOptions, DepthPlan, _layers_left
from trundle.methods.depth.curve import measure_curve
from trundle.model.cost import predict, predict_static
from trundle.model.layout import check_blocks, layout_of
from trundle.model.static import shares_by_rank, static_model, static_shape, token_counts
from trundle.model.surgery import Cut, cut, transformer_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

    from trundle.methods.depth.curve import LayerCurve
    from trundle.model.cost import Cost
    from trundle.model.layout import Layout

_COUNTED_TEXTS = 100_000
"""Texts in which tokens are counted at most."""


def _spread(keep: int, layers: int) -> tuple[int, ...]:
    """Evenly spaced layers, the first and the last among them; a single one is the first, which reads the embeddings."""
    gaps = max(1, keep - 1)
    return tuple((2 * number * (layers - 1) + gaps) // (2 * gaps) for number in range(keep))


def plan(model: SentenceTransformer, options: DepthOptions, context: Context) -> DepthPlan:
    """Turn the wish into a list of layers, or say why it can't be had."""
    layout = layout_of(transformer_of(model).model)
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
        return DepthPlan(blocks=check_blocks(layout, options.blocks), of=layers)
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
    return _spread(keep, layout.layers) if order == "spread" else tuple(range(keep))


def _count(options: DepthOptions, layers: int) -> int:
    if options.keep is not None:
        keep = options.keep
    else:
        assert options.fraction is not None
        if not 0 <= options.fraction < 1:
            raise ImpossibleCut(
                f"the share of layers to drop must be at least 0 and under 1, such as 50%, not {options.fraction}"
            )
        keep = _layers_left(layers, options.fraction)
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
    curve: LayerCurve = measure_curve(
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
        return predict_static(model)
    return predict(model, blocks=plan.blocks)


def apply(model: SentenceTransformer, plan: DepthPlan, context: Context) -> Applied:
    """Cut."""
    if not plan.blocks:
        shares = _shares(model, plan, context)
        return Applied(model=static_model(model, shares, progress=context.progress))
    return Applied(model=cut(model, Cut(blocks=plan.blocks)))


def _shares(model: SentenceTransformer, plan: DepthPlan, context: Context) -> NDArray[np.float64]:
    """How much of all text each token makes up."""
    if plan.frequencies == "rank":
        return shares_by_rank(static_shape(model)[0])
    if context.corpus is None:
        raise BadInput("this plan weighs tokens by how often they occur; give the texts with --data")
    texts = sample(context.corpus.train(), _COUNTED_TEXTS, seed=context.seed)
    counts = token_counts(model, (text.text for text in texts))
    if not counts.any():
        raise BadInput("there are no texts to count tokens in; give more with --data, or leave --data out")
    shares: NDArray[np.float64] = counts / counts.sum()
    return shares
