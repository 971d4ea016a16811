"""width: train a model and the narrow ones inside it in one run (NML), or take a size out.

Each size keeps all layers and heads and a share of the width of everything between them; `mlp` narrows the MLPs, too. All
sizes are parts of one set of weights, so one run trains them all: λ·Σ sizes + (1 − λ)·the whole model. With `objective:
align` every size learns the vectors the model gave before, through a linear map of its own, and the whole model learns to
keep them: no labels, and every size searches the index there is. With `contrast` all learn from labelled tuples.

    - width: {widths: "1/2,1/4", minutes: 30}
    - width: {widths: "1/2,1/4", mlp: true, result: 1/4}
    - width: {extract: 1/2}

`result` says which size goes on to the next step; the others leave in folders beside the output.

Paper: Multi-Scale Model Compression via Nested Matrix Learning (NML).
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

import trundle.measure as measure
import trundle.model as body
from trundle.errors import BadInput, ImpossibleCut
from trundle.model.limits import LONGEST
from trundle.processes import process_count
from trundle.steps.contract import Applied, Context, ExactFraction, Options, Plan, Step
from trundle.steps.depth import listed
from trundle.steps.width_sizes import folder_name, taken_out
from trundle.steps.width_training import nest_together

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost
    from trundle.model import Cut, Layout

FULL: Literal["full"] = "full"
Objective = Literal["align", "contrast"]
Select = Literal["consecutive", "uniform", "rotary", "importance"]
HALF = Fraction(1, 2)
Widths = Annotated[tuple[ExactFraction, ...], BeforeValidator(listed)]


class WidthOptions(Options):
    """Which sizes, how they are taken, and how they learn."""

    widths: Widths = Field("1/2,1/4", validate_default=True, description="Shares of the width.")
    mlp: bool | None = Field(None, description="Narrow the MLPs by the same share, too.")
    select: Literal["auto", "consecutive", "uniform", "rotary", "importance"] = Field(
        "auto",
        description="Which dimensions a size keeps; auto: those that carry most on your texts, or the first.",
    )
    objective: Literal["auto", "align", "contrast"] = Field(
        "auto",
        description="Imitate the model as it came, or learn from tuples; auto: align if it embeds already.",
    )
    result: Literal["full"] | ExactFraction = Field(
        FULL, description="The size that is the result: full, or one of the widths."
    )
    extract: ExactFraction | None = Field(
        None, description="Only take this size out of the model; nothing is trained."
    )
    start: Literal["weights", "random"] = Field(
        "weights", description="With extract: keep the weights, or start from none, to compare."
    )
    student_weight: float = Field(
        0.9, ge=0, le=1, description="How much the sizes count beside the whole model (λ)."
    )
    per_step: int | None = Field(
        None,
        ge=2,
        description="Train so many of the sizes in a step: the narrowest and some others. Default: all.",
    )
    steps: int | None = Field(
        None,
        ge=0,
        description="Optimizer steps; 0 with align: only the closed-form start. Default: as align or contrast.",
    )
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Train for this long; with steps, whichever is reached first.",
    )
    texts: int | None = Field(None, ge=10, description="Use at most this many texts, or tuples.")
    augment: str = Field(
        "", description="With align: more texts made from yours: sentences, spans, prefixes, words, joins."
    )
    batch_size: int | None = Field(
        None, ge=2, description="Texts or tuples per step. Default: 32, or 64 tuples."
    )
    mini_batch: int | None = Field(
        None, ge=1, description="With contrast: texts in memory at once, for large batches."
    )
    max_length: int | None = Field(
        None,
        ge=2,
        description=f"With contrast: tokens after which a text is cut in training. Default: up to {LONGEST}.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="The highest learning rate. Default: 1e-4, or 2e-5 with contrast.",
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the machine multiplies it (GPUs, AMX), fp32 elsewhere."
    )


class WidthPlan(Plan):
    """The sizes, and how they come about."""

    options: WidthOptions
    widths: tuple[ExactFraction, ...]
    """From wide to narrow."""
    hidden: int
    select: Select
    mlp: bool
    objective: Objective | None
    """None where a size is only taken out."""
    trained: bool = True
    """Whether the size that is taken out was trained in these weights."""
    mapped: bool
    """Whether sizes have a linear map of their own into the model's space."""

    @property
    def result(self) -> Fraction:
        """The share of the width that the result has."""
        wanted = self.options.extract or self.options.result
        return Fraction(1) if wanted == FULL else Fraction(wanted)

    def __str__(self) -> str:
        shares = ", ".join(f"{width} ({int(self.hidden * width)})" for width in self.widths)
        narrow = "heads, hidden width and MLPs" if self.mlp else "heads and hidden width"
        if self.objective is None:
            if self.result == 1:
                return f"take out the whole width of {self.hidden}: nothing to cut"
            how = ", trained" if self.trained else f", untrained, {self.select} selection"
            how += (
                ", mapped into the model's space in closed form" if self.mapped and not self.trained else ""
            )
            return f"take out {shares} of {self.hidden}{how}"
        asked, ends = self.options, []
        if asked.steps is not None:
            ends.append(f"{asked.steps} steps")
        if asked.minutes is not None:
            ends.append(f"{round(asked.minutes, 2):g} minutes")
        length = (
            "in closed form"
            if asked.steps == 0
            else f"training for {' or '.join(ends) or 'the default time'}"
        )
        result = "the whole model" if self.result == 1 else str(self.result)
        return (
            f"nest {shares} in {self.hidden} ({narrow}, {self.select} selection), {self.objective}, {length}; "
            f"result: {result}"
        )


def plan(model: SentenceTransformer, options: WidthOptions, context: Context) -> WidthPlan:
    """Look at the sizes, and at what there is to learn from."""
    backbone = body.transformer_of(model).model
    layout = body.layout_of(backbone)
    if options.extract is not None:
        return _plan_extract(model, layout, options, context)
    if options.start == "random":
        raise BadInput("start: random belongs to extract; leave it out where sizes are trained together")
    widths = tuple(sorted(set(options.widths), reverse=True))
    if not widths or widths[0] >= 1:
        raise ImpossibleCut("widths are shares under 1 of the model's width; give some such as 1/2,1/4")
    if options.result != FULL and options.result not in widths:
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


def _by_default(layout: Layout, narrowest: Fraction) -> Select:
    """What carries most; but in a decoder that is outliers first, and a size much under half is little else."""
    return "consecutive" if layout.family.causal and narrowest < HALF else "importance"


def _objective(options: WidthOptions, context: Context) -> Objective:
    if options.objective != "auto":
        return options.objective
    return "align" if context.source is None or body.is_embedder(context.source) else "contrast"


def _check_learning(
    model: SentenceTransformer, objective: Objective, options: WidthOptions, cuts: list[Cut], context: Context
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
            body.check_untruncated(
                model, "take it out of config_sentence_transformers.json, or give steps: 0"
            )
        ours, theirs = model.get_embedding_dimension(), context.original.get_embedding_dimension()
        if ours != theirs:
            raise BadInput(
                f"the model's vectors are {ours} wide and the original's {theirs}; bring it back with the step align first"
            )
        body.check_prompts_are_pooled(model, context.original.prompts)
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
    for width in (model.get_embedding_dimension() or 0, *(body.pooled_width(model, cut) for cut in cuts)):
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
    nested = None if context.source is None else body.nested_in(context.source)
    select, mlp, ordered = options.select, options.mlp, False
    if nested is not None:
        select = nested.selection.select if select == "auto" else select
        mlp = nested.selection.mlp if mlp is None else mlp
        ordered = select == nested.selection.select
    if select == "auto":
        select = _by_default(layout, width) if _can_fit(options, context) else body.default_select(layout)
    same = ordered and nested is not None and mlp == nested.selection.mlp
    known = width == 1 or (options.start == "weights" and same and body.is_trained(nested, model, width))
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
        context.progress.say(f"warning: {body.untrained('the model', width, nested if same else None)}")
    return found


def _can_fit(options: WidthOptions, context: Context) -> bool:
    return options.start == "weights" and context.corpus is not None


def _counts(model: SentenceTransformer, plan: WidthPlan, width: Fraction) -> Cut:
    """A cut of the right counts; which positions it keeps is another matter."""
    backbone = body.transformer_of(model).model
    how = body.Selection(select="rotary" if plan.select == "rotary" else "consecutive", mlp=plan.mlp)
    return body.narrow_cut(body.layout_of(backbone), backbone.config, width, how)


def forecast(model: SentenceTransformer, plan: WidthPlan) -> Cost:
    """What the result will cost."""
    if plan.result == 1:
        return measure.cost(model)
    kept = _counts(model, plan, plan.result)
    inputs = body.pooled_width(body.without_head(model), kept)
    return measure.predict(
        model,
        hidden=len(kept.hidden or ()),
        head=len(kept.head or ()),
        mlp=None if kept.mlp is None else len(kept.mlp[0]),
        dense=(inputs, model.get_embedding_dimension() or 0) if plan.mapped else None,
    )


def apply(model: SentenceTransformer, plan: WidthPlan, context: Context) -> Applied:
    """Take the size out, or train all of them."""
    if plan.objective is not None:
        return nest_together(model, plan, context)
    return Applied(model=taken_out(model, plan, context))


def besides(plan: WidthPlan) -> tuple[str, ...]:
    """The sizes that are not the result."""
    if plan.objective is None:
        return ()
    return tuple(folder_name(width) for width in (Fraction(1), *plan.widths) if width != plan.result)


STEP = Step(
    name="width",
    help="Train a model and the narrow ones inside it in one run, or take a size out.",
    options=WidthOptions,
    plans=WidthPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    besides=besides,
    needs_texts=True,
    enters_space=lambda options: options.extract is None and options.objective != "contrast",
)
