"""contrast: train a model on labelled tuples, so that a query is near its answer and far from everything else.

How a cut decoder becomes a good embedder (L³Prune's healing), or any model a better one on a domain. Each batch is drawn
from one data file; all its documents and hard negatives are rivals of a query's own (InfoNCE), or pairs are put in
order (`angle`, `cosine`). Trained are thin LoRA matrices beside every linear map of attention and MLP, merged at
the end, or with `train: full` all weights.

    - contrast: {steps: 1000}
    - contrast: {train: full, batch_size: 512, mini_batch: 32}
    - contrast: {pooling: last, attention: bidirectional, prompts: {quora: "Find a question with the same meaning: "}}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trundle.methods.contract import LONGEST, FilePrompts, Method, Options, Plan

_STEPS = 1000
_LORA_RATE, _FULL_RATE = 2e-4, 2e-5


class ContrastOptions(Options):
    """From which tuples, towards what, and how."""

    steps: int | None = Field(
        None, ge=1, description=f"Optimizer steps. Default: {_STEPS}, or what minutes allow."
    )
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Train for this long; with steps, whichever is reached first.",
    )
    objective: Literal["infonce", "angle", "cosine", "infonce+angle", "distil"] = Field(
        "infonce",
        description="What is learned: ranking in the batch, the order of pairs, both, or a teacher's similarities.",
    )
    teacher: str | None = Field(
        None,
        description="With distil: the model to learn similarities from. Default: the model that came in.",
    )
    temperature: float = Field(
        0.05, gt=0, allow_inf_nan=False, description="What similarities are divided by; lower is stricter."
    )
    negatives: int | None = Field(
        None, ge=0, description="Use at most this many hard negatives of a query. Default: all."
    )
    batch_size: int = Field(64, ge=2, description="Tuples per step; more of them are more rivals.")
    mini_batch: int | None = Field(
        None,
        ge=1,
        description="Texts in memory at once: the same gradients in less memory, but slower.",
    )
    gradient_checkpointing: bool = Field(
        False, description="Keep only what is between layers in memory, and compute the rest again."
    )
    compile: bool = Field(
        False,
        description="Compile the layers first: a minute, then a GPU does the steps of a small model faster.",
    )
    train: Literal["lora", "full"] = Field(
        "lora", description="Train thin matrices that are merged at the end, or all weights."
    )
    rank: int = Field(16, ge=1, description="Width of the LoRA matrices; their strength is twice that.")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="Dropout before the LoRA matrices.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=f"The highest learning rate. Default: {_LORA_RATE:g} for lora, {_FULL_RATE:g} for full.",
    )
    warmup: int = Field(300, ge=0, description="Steps in which the learning rate rises; half of a short run.")
    max_length: int | None = Field(
        None, ge=2, description=f"Tokens after which a text is cut in training. Default: up to {LONGEST}."
    )
    pooling: Literal["keep", "mean", "weightedmean", "last", "cls"] = Field(
        "keep", description="How token states become a vector; last adds an end token to every text."
    )
    pool_prompts: bool | None = Field(
        None, description="Whether a prompt's tokens count in pooling. Default: as in the model."
    )
    attention: Literal["keep", "bidirectional"] = Field(
        "keep", description="Whether a decoder's tokens see the whole text."
    )
    query_prompt: str | None = Field(
        None, description="Put before queries, and kept in the model. Default: the model's own."
    )
    document_prompt: str | None = Field(
        None, description="Put before documents, and kept in the model. Default: the model's own."
    )
    prompts: FilePrompts = Field(
        {},
        description="Prompts by data file, as in '{quora: \"Same question: \"}'; for queries, or by query and document.",
    )
    keep_zeros: bool | None = Field(
        None,
        description="Leave weights that are exactly zero as they are. Default: where many are, as after pruning.",
    )
    tuples: int | None = Field(None, ge=2, description="Use at most this many of the training tuples.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the machine multiplies it (GPUs, AMX), fp32 elsewhere."
    )


class ContrastPlan(Plan):
    """What will be trained, and how."""

    options: ContrastOptions
    max_length: int
    trained: int
    of: int

    def __str__(self) -> str:
        asked = self.options
        steps = _steps(asked)
        times = [f"{asked.minutes:g} minutes"] if asked.minutes is not None else []
        length = " or ".join(([f"{steps} steps"] if steps else []) + times)
        what = f"LoRA of rank {asked.rank}" if asked.train == "lora" else "all weights"
        changes = [f"pooling {asked.pooling}"] if asked.pooling != "keep" else []
        changes += ["attention both ways"] if asked.attention != "keep" else []
        extra = f", {', '.join(changes)}" if changes else ""
        return (
            f"{asked.objective} in batches of {asked.batch_size} for {length}; "
            f"trained: {what} ({self.trained:,} of {self.of:,} weights){extra}"
        )


def _steps(options: ContrastOptions) -> int | None:
    return _STEPS if options.steps is None and options.minutes is None else options.steps


CONTRAST = Method(
    name="contrast",
    help="Train on labelled tuples: queries near their answers, far from the rest.",
    options=ContrastOptions,
    plans=ContrastPlan,
    needs_texts=True,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
