"""The sizes of `width`: which positions they keep, their linear maps in closed form, and taking one out."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.steps.align_options import AlignOptions
from trundle.steps.align_texts import RIDGE_TEXTS, targets_for
from trundle.steps.contract import Context
from trundle.steps.teacher import original_teacher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sentence_transformers import SentenceTransformer

    from trundle.data import Targets
    from trundle.model import Cut, Map, Select, Selection
    from trundle.steps.width import WidthPlan

MEASURED_TEXTS = 512
"""Texts on which importance is measured."""


def folder_name(width: Fraction) -> str:
    """What a size is called in a folder's name: 1-2 for 1/2."""
    return "full" if width == 1 else f"{width.numerator}-{width.denominator}"


def cut_for(model: SentenceTransformer, width: Fraction, how: Selection) -> Cut:
    """What a size keeps."""
    backbone = body.transformer_of(model).model
    return body.narrow_cut(body.layout_of(backbone), backbone.config, width, how)


def made_ready(
    model: SentenceTransformer, select: Select, widths: Sequence[Fraction], context: Context, *, mlp: bool
) -> tuple[SentenceTransformer, Selection]:
    """A model to take sizes from, and how: with `importance` its neurons and head dimensions are put in order first."""
    if select != "importance":
        return model, body.Selection(select=select, mlp=mlp)
    if context.corpus is None:
        raise BadInput("importance is measured on texts; give some with --data, or choose another select")
    texts = [text.text for text in data.sample(context.corpus.train(), MEASURED_TEXTS, seed=context.seed)]
    found = measure.measure_importance(model, texts, progress=context.progress)
    how = body.Selection(select=select, mlp=mlp, hidden_order=found.hidden_order)
    heads = [cut_for(model, width, how).head or () for width in widths]
    return body.reordered(model, found.orders(heads)), how


def fitted_map(wide: SentenceTransformer, cut: Cut, targets: Targets, context: Context) -> tuple[Map, float]:
    """A size's linear map into the targets' space in closed form, and how near it comes on texts it was not fitted on."""
    small = body.cut(body.without_head(wide), cut)
    positions = data.sample(range(len(targets)), RIDGE_TEXTS, seed=context.seed)
    pooled = body.embedder(small, name=f"width {len(cut.hidden or ())}", progress=context.progress)
    inputs = data.encode_by_role(pooled, targets.chosen(positions))
    found = train.fit_ridge(inputs, targets.vectors(positions), seed=context.seed)
    return body.Map(weight=found.weight, bias=found.bias), found.held_out_cosine


def taken_out(model: SentenceTransformer, plan: WidthPlan, context: Context) -> SentenceTransformer:
    """The size that a plan without training asks for."""
    width = plan.result
    nested = None if context.source is None else body.nested_in(context.source)
    if width == 1:
        return model
    if plan.trained:
        assert nested is not None
        return body.at_width(model, width, nested.selection, nested)
    if nested is not None and nested.selection.select == plan.select:
        wide, how = model, replace(nested.selection, mlp=plan.mlp)
    else:
        wide, how = made_ready(model, plan.select, plan.widths, context, mlp=plan.mlp)
    if plan.options.start == "random":
        return body.reinitialised(body.at_width(wide, width, how), seed=context.seed)
    if not plan.mapped:
        return body.at_width(wide, width, how)
    teacher = original_teacher(context)
    targets, _ = targets_for(
        teacher, AlignOptions(steps=0, texts=plan.options.texts, augment=plan.options.augment), context
    )
    linear, _ = fitted_map(wide, cut_for(wide, width, how), targets, context)
    small = body.at_width(wide, width, how)
    return body.with_linear_head(small, linear.weight, linear.bias, normalise=teacher.normalises)
