"""How `depth` plans and changes a model."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.contrast import ContrastOptions
from trundle.methods.contrast.contrast import _file_prompts, prepared
from trundle.methods.depth import _DepthOptions, _DepthPlan, _layers_left
from trundle.methods.depth.curve import measure_curve
from trundle.methods.training import healed, plan_healing
from trundle.model.cost import Cost, predict, predict_static
from trundle.model.layout import check_blocks, layout_of
from trundle.model.static import static_model, static_shape, token_counts
from trundle.model.surgery import Cut, cut, transformer_of

_COUNTED_TEXTS = 100_000
"""The most texts in which tokens are counted."""


def _spread(keep: int, layers: int) -> tuple[int, ...]:
    """Evenly spaced layers including the first and the last; a single one is the first."""
    gaps = max(1, keep - 1)
    return tuple((2 * number * (layers - 1) + gaps) // (2 * gaps) for number in range(keep))


def plan(model: SentenceTransformer, options: _DepthOptions, context: Context) -> _DepthPlan:
    """Choose the layers to keep."""
    found = _chosen(model, options, context)
    if not 0 < len(found.blocks) < found.of:
        return found
    # The curve picks layers after which the others do harm, so their effect is not restored.
    wanted = options.heal or ("none" if options.pick is not None else None)
    return found.model_copy(update={"heal": plan_healing(wanted, context)})


def _chosen(model: SentenceTransformer, options: _DepthOptions, context: Context) -> _DepthPlan:
    layout = layout_of(transformer_of(model).model)
    layers = layout.layers
    if options.blocks is not None:
        return _DepthPlan(blocks=check_blocks(layout, options.blocks), of=layers)
    if options.pick is not None:
        return _picked(model, options.pick, options.scale, context)
    keep = _count(options, layers)
    if keep == 0:
        return _DepthPlan(blocks=(), of=layers, frequencies="rank" if context.corpus is None else "texts")
    order = options.order
    if order == "auto":
        # A decoder's last layers predict the next token; an encoder's last layer produces the vectors.
        order = "first" if layout.family.causal else "spread"
    return _DepthPlan(blocks=_spread(keep, layers) if order == "spread" else tuple(range(keep)), of=layers)


def _count(options: _DepthOptions, layers: int) -> int:
    keep = options.keep
    if options.drop is not None:
        keep = _layers_left(layers, options.drop)
        if keep == 0:
            raise ImpossibleCut(f"drop {options.drop} leaves none; use keep: 0 for a static model")
    assert keep is not None
    if not 0 <= keep <= layers:
        raise ImpossibleCut(f"the model has {layers} layers, so it can't keep {keep}; pass 0 to {layers}")
    if keep == 0 and options.order == "spread":
        raise ImpossibleCut("a static model has no layers to spread; leave order out")
    return keep


def _picked(
    model: SentenceTransformer, pick: Literal["small", "large"], scale: float, context: Context
) -> _DepthPlan:
    assert context.corpus is not None
    training = next((later for later in context.later if isinstance(later, ContrastOptions)), None)
    curve = measure_curve(
        model if training is None else prepared(model, training),
        context.corpus.examples(),
        scale=scale,
        prompts=None if training is None else _file_prompts(model, training),
        max_length=None if training is None else training.max_length,
        seed=context.seed,
        progress=context.progress,
    )
    keep = curve.small if pick == "small" else curve.large
    if pick == "small" and curve.advice is not None:
        context.progress.say(curve.advice)
    if keep is None:
        raise ImpossibleCut("the model has 1 layer, so it has no lower half to pick from; use keep instead")
    return _DepthPlan(blocks=tuple(range(keep)), of=curve.layers, pick=pick, losses=curve.losses)


def forecast(model: SentenceTransformer, plan: _DepthPlan) -> Cost:
    """Return the cost of the model after the cut."""
    return predict(model, blocks=plan.blocks) if plan.blocks else predict_static(model)


def apply(model: SentenceTransformer, plan: _DepthPlan, context: Context) -> Applied:
    """Cut the layers, or build the static model."""
    if plan.blocks:
        what = Cut(blocks=plan.blocks)
        small, facts = healed(model, cut(model, what), what, plan.heal, context)
        return Applied(model=small, facts=facts)
    if plan.frequencies == "rank":
        shares = _shares_by_rank(static_shape(model)[0])
    elif context.corpus is None:
        raise BadInput("this plan weights tokens by their frequency; pass the texts with --data")
    else:
        texts = context.corpus.sample_train(_COUNTED_TEXTS, context.seed)
        counts = token_counts(model, (text.text for text in texts))
        if not counts.any():
            raise BadInput("there are no texts to count tokens in; pass more with --data, or leave it out")
        shares = counts / counts.sum()
    return Applied(model=static_model(model, shares, progress=context.progress))


def _shares_by_rank(rows: int) -> NDArray[np.float64]:
    """Returns each token's share of all text by Zipf's law, for a vocabulary sorted by frequency."""
    shares: NDArray[np.float64] = 1 / np.arange(2, rows + 2, dtype=np.float64)
    return shares / float(shares.sum())
