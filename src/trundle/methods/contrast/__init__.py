"""contrast: train a model on labelled tuples, so that a query is close to its answer and not to other texts.

It turns a cut decoder into a good embedder (the recovery training of L³Prune), or improves any model on a
domain. Each batch is sampled from one data file. All its other documents and hard negatives are negatives
of a query (InfoNCE), or pairs are ordered by similarity (`angle`, `cosine`). It trains LoRA adapters on
every linear layer of attention and MLP, which are merged at the end, or all weights with `train: full`.

    - contrast: {steps: 1000}
    - contrast: {train: full, batch_size: 512, mini_batch: 32}
    - contrast: {pooling: last, attention: bidirectional, prompts: {quora: "Same question: "}}

Paper: Large Language Models Are Overparameterized Text Encoders (L³Prune).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trundle.errors import BadInput
from trundle.methods import contract
from trundle.methods.contract import FilePrompts, Method, Options, Plan
from trundle.progress import process_count

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus

_STEPS = 1000
_LORA_RATE, _FULL_RATE = 2e-4, 2e-5


class ContrastOptions(Options):
    """The tuples, the objective and the training."""

    steps: int | None = Field(
        None, ge=1, description=f"Optimizer steps. Default: {_STEPS}, or what minutes allow."
    )
    minutes: float | None = Field(None, gt=0, allow_inf_nan=False, description=contract.MINUTES_HELP)
    objective: Literal["infonce", "angle", "cosine", "infonce+angle", "distil"] = Field(
        "infonce",
        description="Rank answers in a batch, order pairs (angle, cosine), both, or imitate a teacher.",
    )
    teacher: str | None = Field(None, description="Model that distil imitates. Default: the input model.")
    temperature: float = Field(
        0.05, gt=0, allow_inf_nan=False, description="Divisor of similarities; lower is stricter."
    )
    negatives: int | None = Field(None, ge=0, description="Maximum hard negatives per query. Default: all.")
    batch_size: int = Field(64, ge=2, description="Tuples per step; more tuples are more negatives.")
    accumulate: int = Field(1, ge=1, description=contract.ACCUMULATE_HELP)
    mini_batch: int | None = Field(
        None, ge=1, description="Texts in memory at once: less memory, but slower. Default: all, if they fit."
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations, to save memory.")
    compile: bool = Field(False, description=contract.COMPILE_HELP)
    train: Literal["lora", "full"] = Field("lora", description="Train LoRA adapters, or all weights.")
    rank: int = Field(16, ge=1, description="Rank of the LoRA adapters; alpha is twice the rank.")
    lora_dropout: float = Field(0.05, ge=0, lt=1, description="Dropout before the LoRA adapters.")
    learning_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=f"Peak rate. Default: {_LORA_RATE:g} for lora, {_FULL_RATE:g} for full.",
    )
    warmup: int = Field(300, ge=0, description="Warm-up steps of the learning rate; at most half of the run.")
    max_length: int | None = Field(None, ge=2, description=contract.LENGTH_HELP)
    pooling: Literal["keep", "mean", "weightedmean", "last", "cls"] = Field(
        "keep", description="Pooling of token states into a vector; last adds an end token to every text."
    )
    pool_prompts: bool | None = Field(
        None, description="Include prompts in pooling. Default: as in the model."
    )
    attention: Literal["keep", "bidirectional"] = Field(
        "keep", description="Attention of a decoder: as it is, or over the whole text."
    )
    chat: bool = Field(
        False, description="Begin prompts with the start of the tokenizer's chat template, if it has one."
    )
    query_prompt: str | None = Field(
        None, description="Prompt of queries, saved in the model. Default: its own."
    )
    document_prompt: str | None = Field(
        None, description="Prompt of documents, saved in the model. Default: its own."
    )
    prompts: FilePrompts = Field(
        {},
        description="Prompts by data file, as in '{quora: \"Same question: \"}', or by query and document "
        "in a file.",
    )
    keep_zeros: bool | None = Field(None, description=contract.KEEP_ZEROS_HELP)
    tuples: int | None = Field(None, ge=2, description="Use at most this many of the training tuples.")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description=contract.PRECISION_HELP)


class _ContrastPlan(Plan):
    """The number of trained weights, and the options."""

    options: ContrastOptions
    max_length: int
    trained: int
    of: int

    def __str__(self) -> str:
        options = self.options
        steps = _steps(options)
        limit = [f"{options.minutes:g} minutes"] if options.minutes is not None else []
        length = " or ".join(([f"{steps} steps"] if steps else []) + limit)
        times = f"{options.accumulate} × " if options.accumulate > 1 else ""
        what = f"LoRA of rank {options.rank}" if options.train == "lora" else "all weights"
        extra = f", pooling {options.pooling}" if options.pooling != "keep" else ""
        extra += ", bidirectional attention" if options.attention != "keep" else ""
        return (
            f"{options.objective} in batches of {times}{options.batch_size} for {length}; "
            f"trained: {what} ({self.trained:,} of {self.of:,} weights){extra}"
        )


def _steps(options: ContrastOptions) -> int | None:
    return _STEPS if options.steps is None and options.minutes is None else options.steps


def _check(options: ContrastOptions, corpus: Corpus | None) -> None:
    if process_count() > 1:
        raise BadInput("contrast runs in one process only; start it without torchrun or accelerate launch")
    if options.objective != "distil" and options.teacher is not None:
        raise BadInput("only the objective distil uses a teacher; leave teacher out, or use distil")
    if corpus is None:
        raise BadInput("contrast trains on labelled tuples; pass them with --data")
    if next(corpus.examples(), None) is None:
        raise BadInput("there are no labelled tuples; pass a file with a query and a positive column")


CONTRAST = Method(
    name="contrast",
    help="Train on labelled tuples of queries and their answers.",
    options=ContrastOptions,
    plans=_ContrastPlan,
    needs_texts=True,
    check=_check,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
