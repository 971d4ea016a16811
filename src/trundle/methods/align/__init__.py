"""align: train a model into its teacher's vector space, so that the index the teacher built stays valid (LEAF).

No labels and no negatives: the loss is the distance ‖y − ŷ‖₂ between the two models' vectors of a text. The student is
any model: what an earlier step cut out of the teacher, or another backbone, tokenizer and width. It gets a linear layer
into the teacher's width, started in closed form by ridge regression, and normalisation if and only if the teacher
normalises; then everything is trained. With `steps: 0` the closed form is all that is done: seconds, and already usable.

    - align: {minutes: 30}
    - align: {teacher: path/to/large-model, steps: 20000, augment: "sentences,spans"}

Paper: LEAF: Knowledge Distillation of Text Embedding Models with Teacher-Aligned Representations.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.methods.contract import Method, Options, Plan

_RATE, _STATIC_RATE = 1e-4, 1e-3


class AlignOptions(Options):
    """Whose space, from which texts, and for how long."""

    teacher: str | None = Field(
        None,
        description="Folder, hub name, endpoint URL, .parquet of (text, vector), or what `targets build` wrote. Default: the model a recipe began with; align by itself needs one.",
    )
    teacher_model: str | None = Field(None, description="Which model of an endpoint to learn from.")
    steps: int | None = Field(
        None, ge=0, description="Optimizer steps; 0: only the closed-form start. Default: 30 epochs."
    )
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Train for this long; with steps, whichever is reached first.",
    )
    texts: int | None = Field(None, ge=10, description="Use at most this many of the training texts.")
    augment: str = Field(
        "", description="More texts made from yours: sentences, spans, prefixes, words, joins."
    )
    loss: Literal["leaf", "distilbert", "minilm", "tinybert"] = Field(
        "leaf", description="The distance alone, or with a loss that looks inside both models, to compare."
    )
    query_weight: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="How often a query comes, compared with another text."
    )
    batch_size: int = Field(32, ge=1, description="Texts per step; small batches win.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=f"The highest learning rate; it falls to a tenth. Default: {_RATE:g}, for a static model {_STATIC_RATE:g}.",
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    start: Literal["ridge", "random", "keep"] = Field(
        "ridge", description="How the linear layer into the space begins."
    )
    start_texts: int | None = Field(
        None, ge=10, description="Fit a ridge start on at most this many texts. Default: 8192."
    )
    pooling: Literal["keep", "mean"] = Field("keep", description="The student's pooling: its own, or mean.")
    dropout: bool = Field(False, description="Train with the model's own dropout.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the machine multiplies it (GPUs, AMX), fp32 elsewhere."
    )
    compile: bool = Field(
        False,
        description="Compile the layers first: a minute, then a GPU does the steps of a small model faster.",
    )
    rounding: Literal["none", "int4"] = Field(
        "none", description="Learn with weights an int4 file can hold, so that export --int4 loses nothing."
    )
    keep_zeros: bool | None = Field(
        None,
        description="Leave weights that are exactly zero as they are. Default: where many are, as after pruning.",
    )
    patience: int | None = Field(
        None, ge=1, description="Stop after so many validations without a better one."
    )
    by_rank: bool = Field(
        False, description="In several processes, each opens an nth of the vectors instead of all of them."
    )
    margin: bool = Field(
        False, description="At each validation also measure how far searches agree with the teacher's."
    )


CYCLES, EPOCHS = 3, 10


class AlignPlan(Plan):
    """The space to enter and the way there."""

    options: AlignOptions
    teacher: str
    inputs: int
    outputs: int
    normalise: bool

    def __str__(self) -> str:
        asked = self.options
        if asked.steps == 0:
            how = "in closed form"
        elif asked.minutes is not None:
            most = "" if asked.steps is None else f", at most {asked.steps} steps"
            how = f"training for {round(asked.minutes, 2):g} minutes{most}"
        else:
            how = f"training for {asked.steps or f'{CYCLES} × {EPOCHS} epochs'}{' steps' if asked.steps else ''}"
        return f"{self.inputs} → {self.outputs} into the space of {self.teacher}, {how}"


ALIGN = Method(
    name="align",
    help="Train the model into its teacher's vector space, without labels.",
    options=AlignOptions,
    plans=AlignPlan,
    needs_texts=True,
    enters_space=lambda _: True,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
