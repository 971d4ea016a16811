"""How `width` plans and changes a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.cache import model_folder
from trundle.embedder import LONGEST
from trundle.errors import BadInput
from trundle.methods.align import AlignOptions
from trundle.methods.align.teacher_vectors import targets_for
from trundle.methods.contract import Applied, Context
from trundle.methods.training import healed, plan_healing
from trundle.methods.width import _HALF, _Select, _WidthOptions, _WidthPlan
from trundle.methods.width.importance import _cut_for, _prepare
from trundle.methods.width.nesting import _fitted_map, _nest_together
from trundle.model import heads
from trundle.model.cost import Cost, cost, predict
from trundle.model.layout import Layout, layout_of
from trundle.model.load import nested_in
from trundle.model.nested import Selection, at_width, default_select, is_trained, untrained
from trundle.model.surgery import Cut, narrow_modules, transformer_of
from trundle.teacher.teacher import original_teacher
from trundle.train.blocks import check_compiler


def plan(model: SentenceTransformer, options: _WidthOptions, context: Context) -> _WidthPlan:
    """Check the sizes and the data to train on."""
    layout = layout_of(transformer_of(model).model)
    if options.extract is not None:
        return _plan_extract(model, layout, options, context)
    widths = tuple(sorted(set(options.widths), reverse=True))
    objective = options.objective
    if objective == "auto":
        # A bare backbone has no modules.json.
        embeds = context.source is None or (model_folder(str(context.source)) / "modules.json").is_file()
        objective = "align" if embeds else "contrast"
    found = _WidthPlan(
        options=options,
        widths=widths,
        hidden=layout.sizes["hidden"],
        select=_default_select(layout, widths[-1]) if options.select == "auto" else options.select,
        mlp=bool(options.mlp),
        objective=objective,
        mapped=objective == "align",
    )
    _check_training(model, found, [_cut_of_size(model, found, width) for width in widths], context)
    return found


def _default_select(layout: Layout, narrowest: Fraction) -> _Select:
    # The most important dimensions of a decoder are outliers, and a narrow size would keep little else.
    return "consecutive" if layout.family.causal and narrowest < _HALF else "importance"


def _check_training(model: SentenceTransformer, plan: _WidthPlan, cuts: list[Cut], context: Context) -> None:
    options, aligns = plan.options, plan.objective == "align"
    assert context.corpus is not None
    if options.compile:
        check_compiler()
    longest = model.max_seq_length or LONGEST
    if options.max_length is not None and aligns:
        raise BadInput("only contrast truncates texts to max_length; leave it out")
    if options.max_length is not None and options.max_length > longest:
        raise BadInput(f"the model takes at most {longest} tokens; pass a max_length up to that")
    if aligns:
        if options.steps != 0:
            heads.check_untruncated(
                model, "remove it from config_sentence_transformers.json, or pass steps: 0"
            )
        ours, theirs = model.get_embedding_dimension(), context.original.get_embedding_dimension()
        if ours != theirs:
            raise BadInput(f"the model has {ours} dimensions, the original {theirs}; put align before width")
        heads.check_prompts_are_pooled(model, context.original.prompts)
        return
    if options.steps == 0:
        raise BadInput("there is no closed form for contrast; pass steps, or use objective: align")
    if context.pair:
        raise BadInput("--pair needs sizes in their teacher's space; use objective: align")
    if next(context.corpus.examples(), None) is None:
        raise BadInput("there are no labelled tuples to train on; pass some, or use objective: align")
    for width in (model.get_embedding_dimension() or 0, *(_pooled_width(model, cut) for cut in cuts)):
        if width % 2:
            raise BadInput(
                f"the angle loss halves vectors, and {width} is odd; pass other widths, or use align"
            )


def _plan_extract(
    model: SentenceTransformer, layout: Layout, options: _WidthOptions, context: Context
) -> _WidthPlan:
    assert options.extract is not None
    width = options.extract
    nested = None if context.source is None else nested_in(context.source)
    can_fit = options.start == "weights" and context.corpus is not None
    select, mlp, ordered = options.select, options.mlp, False
    if nested is not None:
        select = nested.selection.select if select == "auto" else select
        mlp = nested.selection.mlp if mlp is None else mlp
        ordered = select == nested.selection.select
    if select == "auto":
        select = _default_select(layout, width) if can_fit else default_select(layout)
    same = ordered and nested is not None and mlp == nested.selection.mlp
    known = width == 1 or (options.start == "weights" and same and is_trained(nested, model, width))
    if select == "importance" and not (known or ordered) and context.corpus is None:
        raise BadInput("importance is measured on texts; pass some with --data, or choose another select")
    found = _WidthPlan(
        options=options,
        widths=(width,),
        hidden=layout.sizes["hidden"],
        select=select,
        mlp=bool(mlp),
        objective=None,
        trained=known,
        mapped=nested is not None and width in nested.maps if known else can_fit,
        heal="none" if known or options.start == "random" else plan_healing(options.heal, context),
    )
    _cut_of_size(model, found, width)
    if not known and options.start == "weights":
        context.progress.say(f"warning: {untrained('the model', width, nested if same else None)}")
    return found


def _cut_of_size(model: SentenceTransformer, plan: _WidthPlan, width: Fraction) -> Cut:
    """A cut that keeps the right number of positions, but not necessarily the right ones."""
    how = Selection(select="rotary" if plan.select == "rotary" else "consecutive", mlp=plan.mlp)
    return _cut_for(model, width, how)


def forecast(model: SentenceTransformer, plan: _WidthPlan) -> Cost:
    """Return the cost of the result."""
    if plan.result == 1:
        return cost(model)
    kept = _cut_of_size(model, plan, plan.result)
    inputs = _pooled_width(heads.without_head(model), kept)
    return predict(
        model,
        hidden=len(kept.hidden or ()),
        head=len(kept.head or ()),
        mlp=None if kept.mlp is None else len(kept.mlp[0]),
        dense=(inputs, model.get_embedding_dimension() or 0) if plan.mapped else None,
    )


def apply(model: SentenceTransformer, plan: _WidthPlan, context: Context) -> Applied:
    """Extract one size, or train all of them."""
    if plan.objective is not None:
        return _nest_together(model, plan, context)
    small, facts = _extracted(model, plan, context)
    return Applied(model=small, facts=facts)


def _extracted(
    model: SentenceTransformer, plan: _WidthPlan, context: Context
) -> tuple[SentenceTransformer, dict[str, Any]]:
    width = plan.result
    nested = None if context.source is None else nested_in(context.source)
    if width == 1:
        return model, {}
    if plan.trained:
        assert nested is not None
        return at_width(model, width, nested.selection, nested), {}
    if nested is not None and nested.selection.select == plan.select:
        wide, how = model, replace(nested.selection, mlp=plan.mlp)
    else:
        wide, how = _prepare(model, plan.select, plan.widths, context, mlp=plan.mlp)
    small = at_width(wide, width, how)
    if plan.options.start == "random":
        return heads.reinitialised(small, seed=context.seed), {}
    small, facts = healed(wide, small, _cut_for(wide, width, how), plan.heal, context)
    if not plan.mapped:
        return small, facts
    teacher = original_teacher(context)
    options = AlignOptions(steps=0, texts=plan.options.texts, augment=plan.options.augment)
    targets, _ = targets_for(teacher, options, context)
    linear, _ = _fitted_map(heads.without_head(small), targets, context)
    return heads.with_linear_head(small, linear.weight, linear.bias, normalise=teacher.normalises), facts


def _pooled_width(model: SentenceTransformer, what: Cut) -> int:
    """Returns the width of the vectors of the model after a cut."""
    hidden = what.hidden or tuple(range(layout_of(transformer_of(model).model).sizes["hidden"]))
    rest = [copy.deepcopy(module) for module in list(model)[1:]]
    narrow_modules(rest, hidden)
    widths = [getattr(module, "get_embedding_dimension", lambda: None)() for module in rest]
    return next((width for width in reversed(widths) if width), len(hidden))
