"""The options of `align`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.steps.contract import Options

RATE, STATIC_RATE = 1e-4, 1e-3


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
        description=f"The highest learning rate; it falls to a tenth. Default: {RATE:g}, for a static model {STATIC_RATE:g}.",
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
