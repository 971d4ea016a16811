"""width: train a model and the narrow ones inside it in one run (NML), or extract one size.

Each size keeps all layers and heads and a share of the width of everything between them; `mlp` narrows the
MLPs as well. All sizes are slices of one set of weights, so one run trains them all: λ·Σ sizes + (1 − λ)·the
full model. With `objective: align` every size learns the vectors of the original model through its own linear
map, and the full model learns to keep them: this needs no labels, and every size can query the existing
index. With `contrast` all sizes train on labelled tuples.

    - width: {widths: "1/2,1/4", minutes: 30}
    - width: {widths: "1/2,1/4", mlp: true, result: 1/4}
    - width: {extract: 1/2}

`result` chooses the size that the next method gets; the others are written to folders next to the output.

Paper: Multi-Scale Model Compression via Nested Matrix Learning (NML).
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods import contract
from trundle.methods.contract import HEAL_HELP, ExactFraction, Heal, Healing, Method, Options, Plan, listed
from trundle.progress import process_count

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_FULL: Literal["full"] = "full"
_Objective = Literal["align", "contrast"]
_Select = Literal["consecutive", "uniform", "rotary", "importance"]
_HALF = Fraction(1, 2)
_Widths = Annotated[tuple[ExactFraction, ...], BeforeValidator(listed)]


class _WidthOptions(Options):
    """Which sizes, how they are selected, and how they are trained."""

    widths: _Widths = Field(
        "1/2,1/4", validate_default=True, description="Comma-separated shares of the width."
    )
    mlp: bool | None = Field(None, description="Narrow the MLPs by the same share. Default: no.")
    select: Literal["auto", "consecutive", "uniform", "rotary", "importance"] = Field(
        "auto", description="Dimensions a size keeps; auto: the most important on your texts, or the first."
    )
    objective: Literal["auto", "align", "contrast"] = Field(
        "auto", description="Imitate the input model, or train on tuples; auto: align if it is an embedder."
    )
    result: Literal["full"] | ExactFraction = Field(
        _FULL, description="The size that is the result: full, or one of the widths."
    )
    extract: ExactFraction | None = Field(None, description="Only extract this size, without training.")
    start: Literal["weights", "random"] = Field(
        "weights", description="With extract: keep the weights, or reinitialise them, for comparison."
    )
    heal: Heal | None = Field(None, description=f"With extract: {HEAL_HELP[0].lower()}{HEAL_HELP[1:]}")
    student_weight: float = Field(
        0.9, ge=0, le=1, description="Weight of the sizes in the loss (λ); the full model has 1 − λ."
    )
    per_step: int | None = Field(
        None, ge=2, description="Sizes trained per step: the narrowest and some others. Default: all."
    )
    steps: int | None = Field(
        None,
        ge=0,
        description="Optimizer steps; 0: only the closed-form start. Default: as in align or contrast.",
    )
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description=contract.MINUTES_HELP)
    texts: int | None = Field(None, ge=10, description="Use at most this many texts or tuples.")
    augment: str = Field(
        "", description="With align: more texts, made from yours: sentences, spans, prefixes, words, joins."
    )
    batch_size: int | None = Field(
        None, ge=2, description="Texts or tuples per step. Default: 32 texts, or 64 tuples."
    )
    accumulate: int = Field(1, ge=1, description=contract.ACCUMULATE_HELP)
    mini_batch: int | None = Field(
        None, ge=1, description="With contrast: texts in memory at once; fewer save memory."
    )
    max_length: int | None = Field(
        None, ge=2, description=f"With contrast: {contract.LENGTH_HELP[0].lower()}{contract.LENGTH_HELP[1:]}"
    )
    learning_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="Peak learning rate. Default: 1e-4 (contrast: 2e-5)."
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description=contract.PRECISION_HELP)
    compile: bool = Field(False, description=contract.COMPILE_HELP)


class _WidthPlan(Plan):
    """The sizes, and how they are made."""

    options: _WidthOptions
    widths: tuple[ExactFraction, ...]
    """Widest first."""
    hidden: int
    select: _Select
    mlp: bool
    objective: _Objective | None
    """None if a size is only extracted."""
    trained: bool = True
    """Whether the extracted size was trained in these weights."""
    mapped: bool
    """Whether each size has its own linear map into the model's space."""
    heal: Healing = "none"

    @property
    def result(self) -> Fraction:
        """The result's share of the width."""
        wanted = self.options.extract or self.options.result
        return Fraction(1) if wanted == _FULL else Fraction(wanted)

    def __str__(self) -> str:
        shares = ", ".join(f"{width} ({int(self.hidden * width)})" for width in self.widths)
        narrow = "heads, hidden width and MLPs" if self.mlp else "heads and hidden width"
        if self.objective is None:
            if self.result == 1:
                return f"extract the full width of {self.hidden}: nothing to cut"
            how = ", trained" if self.trained else f", untrained, {self.select} selection"
            if self.mapped and not self.trained:
                how += ", mapped into the model's space in closed form"
            return f"extract {shares} of {self.hidden}{how}"
        steps, minutes = self.options.steps, self.options.minutes
        ends = [] if steps is None else [f"{steps} steps"]
        ends += [] if minutes is None else [f"{round(minutes, 2):g} minutes"]
        length = "in closed form" if steps == 0 else f"training for {' or '.join(ends) or 'the default time'}"
        result = "the full model" if self.result == 1 else str(self.result)
        return (
            f"nest {shares} in {self.hidden} ({narrow}, {self.select} selection), {self.objective}, "
            f"{length}; result: {result}"
        )


def _folder_name(width: Fraction) -> str:
    return "full" if width == 1 else f"{width.numerator}-{width.denominator}"


def _additional_models(plan: _WidthPlan) -> tuple[str, ...]:
    if plan.objective is None:
        return ()
    return tuple(_folder_name(width) for width in (Fraction(1), *plan.widths) if width != plan.result)


def _check(options: _WidthOptions, corpus: Corpus | None) -> None:
    if options.extract is not None:
        return
    if options.start == "random":
        raise BadInput("start: random belongs to extract; leave it out when sizes are trained together")
    if options.heal == "closed-form":
        raise BadInput("heal belongs to extract; leave it out when sizes are trained together")
    if not options.widths or max(options.widths) >= 1:
        raise ImpossibleCut("widths are shares under 1 of the model's width; pass some such as 1/2,1/4")
    if options.result != _FULL and options.result not in options.widths:
        raise BadInput(f"the result {options.result} is not one of the widths; add it to widths")
    if process_count() > 1:
        raise BadInput("width runs in one process only; start it without torchrun or accelerate launch")
    if corpus is None:
        raise BadInput("width trains on texts; pass them with --data")


WIDTH = Method(
    name="width",
    help="Train a model and narrow ones inside it, or extract one size.",
    options=_WidthOptions,
    plans=_WidthPlan,
    additional=_additional_models,
    needs_texts=True,
    check=_check,
    enters_space=lambda options: options.extract is None and options.objective != "contrast",
)
