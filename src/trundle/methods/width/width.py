"""How `width` plans and changes a model."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import LONGEST, Applied, Context
from trundle.methods.width import _FULL, _HALF, WidthOptions, WidthPlan, _Objective, _Select
from trundle.methods.width.sizes import _taken_out
from trundle.methods.width.training import _nest_together
from trundle.model.cost import cost, predict
from trundle.model.heads import check_prompts_are_pooled, check_untruncated, without_head
from trundle.model.layout import layout_of
from trundle.model.load import is_embedder, nested_in
from trundle.model.nested import Selection, default_select, is_trained, narrow_cut, pooled_width, untrained
from trundle.model.surgery import transformer_of
from trundle.progress import process_count

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.model.cost import Cost
    from trundle.model.layout import Layout
    from trundle.model.surgery import Cut


def plan(model: SentenceTransformer, options: WidthOptions, context: Context) -> WidthPlan:
    """Look at the sizes, and at what there is to learn from."""
    backbone = transformer_of(model).model
    layout = layout_of(backbone)
    if options.extract is not None:
        return _plan_extract(model, layout, options, context)
    if options.start == "random":
        raise BadInput("start: random belongs to extract; leave it out where sizes are trained together")
    widths = tuple(sorted(set(options.widths), reverse=True))
    if not widths or widths[0] >= 1:
        raise ImpossibleCut("widths are shares under 1 of the model's width; give some such as 1/2,1/4")
    if options.result != _FULL and options.result not in widths:
        raise BadInput(
            f"the result {options.result} is none of the widths {', '.join(map(str, widths))}; add it to them"
        )
    if process_count() > 1:
        raise BadInput("width runs in one process as yet; start it without torchrun or accelerate launch")
    objective = _objective(options, context)
    select = _by_default(layout, widths[-1]) if options.select == "auto" else options.select
    found = WidthPlan(
        options=options,
        widths=widths,
        hidden=layout.sizes["hidden"],
        select=select,
        mlp=bool(options.mlp),
        objective=objective,
        mapped=objective == "align",
    )
    cuts = [_counts(model, found, width) for width in widths]
    _check_learning(model, objective, options, cuts, context)
    return found


def _by_default(layout: Layout, narrowest: Fraction) -> _Select:
    """What carries most; but in a decoder that is outliers first, and a size much under half is little else."""
    return "consecutive" if layout.family.causal and narrowest < _HALF else "importance"


def _objective(options: WidthOptions, context: Context) -> _Objective:
    if options.objective != "auto":
        return options.objective
    return "align" if context.source is None or is_embedder(context.source) else "contrast"


def _check_learning(
    model: SentenceTransformer,
    objective: _Objective,
    options: WidthOptions,
    cuts: list[Cut],
    context: Context,
) -> None:
    """Refuse what can't be learned, before anything heavy."""
    if context.corpus is None:
        raise BadInput("width learns from texts; say where they are with --data")
    takes = model.max_seq_length or LONGEST
    if options.max_length is not None and (objective == "align" or options.max_length > takes):
        raise BadInput(
            "only contrast cuts texts by max_length; leave it out, or use objective: contrast"
            if objective == "align"
            else f"the model takes at most {takes} tokens; give a max_length up to that"
        )
    if objective == "align":
        if options.steps != 0:
            check_untruncated(model, "take it out of config_sentence_transformers.json, or give steps: 0")
        ours, theirs = model.get_embedding_dimension(), context.original.get_embedding_dimension()
        if ours != theirs:
            raise BadInput(
                f"the model's vectors are {ours} wide and the original's {theirs}; bring it back with the step align first"
            )
        check_prompts_are_pooled(model, context.original.prompts)
        return
    if options.steps == 0:
        raise BadInput("there is no closed form for contrast; give steps, or use objective: align")
    if context.pair:
        raise BadInput("--pair needs sizes in their teacher's space; use objective: align")
    if next(context.corpus.examples(), None) is None:
        raise BadInput(
            "there are no labelled tuples to train on; give a file with a query and a positive column, or use "
            "objective: align"
        )
    for width in (model.get_embedding_dimension() or 0, *(pooled_width(model, cut) for cut in cuts)):
        if width % 2:
            raise BadInput(
                f"the angle loss halves vectors, and {width} is odd; give widths that leave an even number, or use "
                "objective: align"
            )


def _plan_extract(
    model: SentenceTransformer, layout: Layout, options: WidthOptions, context: Context
) -> WidthPlan:
    """A size as the folder has it, or one by selection alone."""
    assert options.extract is not None
    width = options.extract
    nested = None if context.source is None else nested_in(context.source)
    select, mlp, ordered = options.select, options.mlp, False
    if nested is not None:
        select = nested.selection.select if select == "auto" else select
        mlp = nested.selection.mlp if mlp is None else mlp
        ordered = select == nested.selection.select
    if select == "auto":
        select = _by_default(layout, width) if _can_fit(options, context) else default_select(layout)
    same = ordered and nested is not None and mlp == nested.selection.mlp
    known = width == 1 or (options.start == "weights" and same and is_trained(nested, model, width))
    if select == "importance" and not (known or ordered) and context.corpus is None:
        raise BadInput("importance is measured on texts; give some with --data, or choose another select")
    found = WidthPlan(
        options=options,
        widths=(width,),
        hidden=layout.sizes["hidden"],
        select=select,
        mlp=bool(mlp),
        objective=None,
        trained=known,
        mapped=nested is not None and width in nested.maps if known else _can_fit(options, context),
    )
    _counts(model, found, width)
    if not known and options.start == "weights":
        context.progress.say(f"warning: {untrained('the model', width, nested if same else None)}")
    return found


def _can_fit(options: WidthOptions, context: Context) -> bool:
    return options.start == "weights" and context.corpus is not None


def _counts(model: SentenceTransformer, plan: WidthPlan, width: Fraction) -> Cut:
    """A cut of the right counts; which positions it keeps is another matter."""
    backbone = transformer_of(model).model
    how = Selection(select="rotary" if plan.select == "rotary" else "consecutive", mlp=plan.mlp)
    return narrow_cut(layout_of(backbone), backbone.config, width, how)


def forecast(model: SentenceTransformer, plan: WidthPlan) -> Cost:
    """What the result will cost."""
    if plan.result == 1:
        return cost(model)
    kept = _counts(model, plan, plan.result)
    inputs = pooled_width(without_head(model), kept)
    return predict(
        model,
        hidden=len(kept.hidden or ()),
        head=len(kept.head or ()),
        mlp=None if kept.mlp is None else len(kept.mlp[0]),
        dense=(inputs, model.get_embedding_dimension() or 0) if plan.mapped else None,
    )


def apply(model: SentenceTransformer, plan: WidthPlan, context: Context) -> Applied:
    """Take the size out, or train all of them."""
    if plan.objective is not None:
        return _nest_together(model, plan, context)
    return Applied(model=_taken_out(model, plan, context))
