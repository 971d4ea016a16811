"""align: train a model into its teacher's vector space, so that the teacher's index stays valid (LEAF).

It needs no labels and no negatives: the loss is the distance ‖y − ŷ‖₂ between the two models' vectors of a
text. The student is any model: one that an earlier method cut out of the teacher, or one with another
backbone, tokenizer and width. It gets a linear layer into the teacher's width, initialised in closed form
by ridge regression, and normalisation if and only if the teacher normalises. Then all weights are trained.
With `steps: 0` only the closed form is computed: it takes seconds, and the model is already usable.

    - align: {minutes: 30}
    - align: {teacher: path/to/large-model, steps: 20000, augment: "sentences,spans"}

Paper: LEAF: Knowledge Distillation of Text Embedding Models with Teacher-Aligned Representations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PlainSerializer

from trundle.errors import BadInput
from trundle.methods.contract import (
    ACCUMULATE_HELP,
    COMPILE_HELP,
    KEEP_ZEROS_HELP,
    MINUTES_HELP,
    PRECISION_HELP,
    Method,
    Options,
    Plan,
)
from trundle.teacher import teacher_kind, without_secrets

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

TeacherName = Annotated[str, PlainSerializer(without_secrets)]
"""A teacher as the user names it; no record holds the password of a database."""
_RATE, _STATIC_RATE = 1e-4, 1e-3


class AlignOptions(Options):
    """The teacher, the texts and the training."""

    teacher: TeacherName | None = Field(
        None,
        description="Model folder, hub name, endpoint URL, .parquet of (text, vector), a folder of "
        "`targets build`, or an index such as postgresql://user@host/db. Default: the model that the recipe "
        "starts with; `trundle align` needs one.",
    )
    teacher_model: str | None = Field(None, description="The model's name, if the teacher is an endpoint.")
    steps: int | None = Field(
        None, ge=0, description="Optimizer steps; 0: only the closed-form start. Default: 30 epochs."
    )
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description=MINUTES_HELP)
    texts: int | None = Field(None, ge=10, description="Use at most this many of the training texts.")
    augment: str = Field(
        "", description="More texts, made from yours: sentences, spans, prefixes, words, joins."
    )
    loss: Literal["leaf", "distilbert", "minilm", "tinybert"] = Field(
        "leaf",
        description="The distance alone, or with a loss on the inner states of both models, to compare.",
    )
    query_weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="How often queries are sampled, relative to others."
    )
    batch_size: int = Field(32, ge=1, description="Texts per step; small batches work best.")
    accumulate: int = Field(1, ge=1, description=ACCUMULATE_HELP)
    learning_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=f"Peak rate. Default: {_RATE:g}, for static models {_STATIC_RATE:g}, and less if the "
        "model starts close to its teacher.",
    )
    warmup: int = Field(0, ge=0, description="Warm-up steps of the learning rate.")
    schedule: Literal["auto", "leaf", "linear", "cosine", "constant"] = Field(
        "auto",
        description="Learning rate: LEAF's cycles, one decrease, or none. auto: cosine with --minutes.",
    )
    last_rate: float | None = Field(
        None, ge=0, le=1, description="The last rate as a share of the peak. Default: 0.1, for cosine 0.02."
    )
    max_length: int | None = Field(
        None, ge=2, description="Maximum tokens per text. Default: as many as the teacher, if the model can."
    )
    start: Literal["ridge", "random", "keep"] = Field(
        "ridge", description="Linear layer: ridge regression, random, or none."
    )
    start_texts: int | None = Field(
        None, ge=10, description="Maximum texts for the ridge start. Default: 8192."
    )
    pooling: Literal["keep", "mean", "cls", "max", "last"] = Field(
        "keep", description="The student's pooling; last adds an end token to every text."
    )
    dropout: bool = Field(False, description="Train with the model's dropout.")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description=PRECISION_HELP)
    compile: bool | None = Field(None, description=COMPILE_HELP + " Default: in long runs on a GPU.")
    rounding: Literal["none", "int4"] = Field(
        "none", description="Quantisation-aware training: with int4, export --int4 loses nothing."
    )
    round_after: float = Field(
        0.0, ge=0, lt=1, description="With --rounding: the share of the training before rounding begins."
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="Muon, for matrices, learns more per step on a GPU; it is slow on a CPU."
    )
    keep_zeros: bool | None = Field(None, description=KEEP_ZEROS_HELP)
    patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without improvement."
    )
    by_rank: bool = Field(False, description="With several processes, each loads its share of the vectors.")
    margin: bool = Field(False, description="Also validate how far retrieval agrees with the teacher's.")


CYCLES, EPOCHS = 3, 10


class _AlignPlan(Plan):
    """The teacher, the sizes of the linear layer, and the options."""

    options: AlignOptions
    teacher: str
    inputs: int
    outputs: int
    normalise: bool
    max_length: int | None = None
    """Tokens per text, if that changes."""

    def __str__(self) -> str:
        options = self.options
        if options.steps == 0:
            how = "in closed form"
        elif options.minutes is not None:
            most = "" if options.steps is None else f", at most {options.steps} steps"
            how = f"training for {round(options.minutes, 2):g} minutes{most}"
        else:
            how = (
                f"training for {f'{options.steps} steps' if options.steps else f'{CYCLES} × {EPOCHS} epochs'}"
            )
        return f"{self.inputs} → {self.outputs} into the space of {self.teacher}, {how}"


def _augmentations(augment: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in augment.split(",") if name.strip())


def _check(options: AlignOptions, corpus: Corpus | None) -> None:
    from trundle.data.sampling import check_augmentations

    check_augmentations(_augmentations(options.augment))
    kind = "model" if options.teacher is None else teacher_kind(options.teacher)
    if kind == "endpoint" and options.teacher_model is None:
        raise BadInput("an endpoint serves several models; name the teacher with --teacher-model")
    if kind in ("model", "endpoint") and corpus is None:
        raise BadInput("align trains on texts; pass them with --data")


ALIGN = Method(
    name="align",
    help="Train the model into its teacher's vector space, without labels.",
    options=AlignOptions,
    plans=_AlignPlan,
    needs_texts=True,
    check=_check,
    enters_space=lambda _: True,
    reads=lambda options: () if options.teacher is None else (without_secrets(options.teacher),),
)
