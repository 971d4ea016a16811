"""contrast: train a model on labelled tuples, so that a query is close to its answer and not to other texts.

It turns a cut decoder into a good embedder (the recovery training of L³Prune), or improves any model on a
domain. Each batch is sampled from one data file. All its other documents and hard negatives are negatives
of a query (InfoNCE), or pairs are ordered by similarity (`angle`, `cosine`). It trains LoRA adapters on
every linear layer of attention and MLP, which are merged at the end, or all weights with `train: full`.

    - contrast: {steps: 1000}
    - contrast: {train: full, batch_size: 512, mini_batch: 32}
    - contrast: {pooling: last, attention: bidirectional, prompts: {quora: "Find a question with the same
      meaning: "}}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.embedder import LONGEST
from trundle.methods.contract import FilePrompts, Method, Options, Plan

_STEPS = 1000
_LORA_RATE, _FULL_RATE = 2e-4, 2e-5


class ContrastOptions(Options):
    """The tuples, the objective and the training."""

    steps: int | None = Field(None, ge=1, description=f"Steps. Default: {_STEPS}, or what minutes allow.")
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description="Train for at most this long.")
    objective: Literal["infonce", "angle", "cosine", "infonce+angle", "distil"] = Field(
        "infonce", description="Ranking in the batch, the order of pairs, both, or a teacher's similarities."
    )
    teacher: str | None = Field(None, description="Teacher for distil. Default: the input model.")
    temperature: float = Field(0.05, gt=0, allow_inf_nan=False, description="Divisor of similarities.")
    negatives: int | None = Field(None, ge=0, description="Hard negatives per query, at most. Default: all.")
    batch_size: int = Field(64, ge=2, description="Tuples per step; more tuples are more negatives.")
    mini_batch: int | None = Field(None, ge=1, description="Texts in memory at once; same result, slower.")
    gradient_checkpointing: bool = Field(False, description="Recompute activations, to save memory.")
    compile: bool = Field(False, description="Compile the layers first: slow to start, then faster on a GPU.")
    train: Literal["lora", "full"] = Field("lora", description="Train LoRA adapters, or all weights.")
    rank: int = Field(16, ge=1, description="Rank of the LoRA adapters; alpha is twice the rank.")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="Dropout before the LoRA adapters.")
    learning_rate: float | None = Field(
        None, gt=0, allow_inf_nan=False, description=f"Peak. Default: {_LORA_RATE:g}, full {_FULL_RATE:g}."
    )
    warmup: int = Field(300, ge=0, description="Warm-up steps of the learning rate; at most half of the run.")
    max_length: int | None = Field(None, ge=2, description=f"Tokens per text, at most. Default: {LONGEST}.")
    pooling: Literal["keep", "mean", "weightedmean", "last", "cls"] = Field(
        "keep", description="Pooling of token states into a vector; last adds an end token to every text."
    )
    pool_prompts: bool | None = Field(None, description="Include prompts in pooling. Default: as the model.")
    attention: Literal["keep", "bidirectional"] = Field("keep", description="Attention of a decoder.")
    query_prompt: str | None = Field(None, description="Prompt of queries. Default: the model's own.")
    document_prompt: str | None = Field(None, description="Prompt of documents. Default: the model's own.")
    prompts: FilePrompts = Field(
        {}, description="Prompts by data file, such as '{quora: \"Same question: \"}', or by role in a file."
    )
    keep_zeros: bool | None = Field(None, description="Keep zero weights zero. Default: if many are zero.")
    tuples: int | None = Field(None, ge=2, description="Use at most this many of the training tuples.")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where it is fast.")


class ContrastPlan(Plan):
    """The number of trained weights, and the options."""

    options: ContrastOptions
    max_length: int
    trained: int
    of: int

    def __str__(self) -> str:
        options = self.options
        steps = _steps(options)
        times = [f"{options.minutes:g} minutes"] if options.minutes is not None else []
        length = " or ".join(([f"{steps} steps"] if steps else []) + times)
        what = f"LoRA of rank {options.rank}" if options.train == "lora" else "all weights"
        extra = f", pooling {options.pooling}" if options.pooling != "keep" else ""
        extra += ", bidirectional attention" if options.attention != "keep" else ""
        return (
            f"{options.objective} in batches of {options.batch_size} for {length}; "
            f"trained: {what} ({self.trained:,} of {self.of:,} weights){extra}"
        )


def _steps(options: ContrastOptions) -> int | None:
    return _STEPS if options.steps is None and options.minutes is None else options.steps


CONTRAST = Method(
    name="contrast",
    help="Train on labelled tuples: queries close to their answers, not to other texts.",
    options=ContrastOptions,
    plans=ContrastPlan,
    needs_texts=True,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
