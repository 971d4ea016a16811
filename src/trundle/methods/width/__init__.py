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
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from trundle.methods.contract import LONGEST, ExactFraction, Method, Options, Plan, listed

_FULL: Literal["full"] = "full"
_Objective = Literal["align", "contrast"]
_Select = Literal["consecutive", "uniform", "rotary", "importance"]
_HALF = Fraction(1, 2)
_Widths = Annotated[tuple[ExactFraction, ...], BeforeValidator(listed)]


class WidthOptions(Options):
    """Which sizes, how they are taken, and how they learn."""

    widths: _Widths = Field("1/2,1/4", validate_default=True, description="Shares of the width.")
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
        _FULL, description="The size that is the result: full, or one of the widths."
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
    select: _Select
    mlp: bool
    objective: _Objective | None
    """None where a size is only taken out."""
    trained: bool = True
    """Whether the size that is taken out was trained in these weights."""
    mapped: bool
    """Whether sizes have a linear map of their own into the model's space."""

    @property
    def result(self) -> Fraction:
        """The share of the width that the result has."""
        wanted = self.options.extract or self.options.result
        return Fraction(1) if wanted == _FULL else Fraction(wanted)

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


def _additional_models(plan: WidthPlan) -> tuple[str, ...]:
    """The sizes that are not the result."""
    if plan.objective is None:
        return ()
    return tuple(_folder_name(width) for width in (Fraction(1), *plan.widths) if width != plan.result)


WIDTH = Method(
    name="width",
    help="Train a model and the narrow ones inside it in one run, or take a size out.",
    options=WidthOptions,
    plans=WidthPlan,
    additional=_additional_models,
    needs_texts=True,
    enters_space=lambda options: options.extract is None and options.objective != "contrast",
)


def _folder_name(width: Fraction) -> str:
    """What a size is called in a folder's name: 1-2 for 1/2."""
    return "full" if width == 1 else f"{width.numerator}-{width.denominator}"
