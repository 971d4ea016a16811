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

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.model.limits import LONGEST
from trundle.processes import process_count
from trundle.steps.contract import Applied, Context, Options, Plan, Step
from trundle.steps.file_prompts import FilePrompts, check_prompted, prompts_by_file
from trundle.steps.learning import NOT_VALIDATED, learn
from trundle.steps.teacher import find_teacher

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Example
    from trundle.measure import Cost

VALIDATION_TUPLES = 2048
VALIDATION_SHARE = 4
"""One look costs at most this part of the training before it, counted in tuples; it has no backward pass."""
LOOKS = 10
"""How often a run of known length is validated."""
STEPS = 1000
LORA_RATE, FULL_RATE = 2e-4, 2e-5


class ContrastOptions(Options):
    """From which tuples, towards what, and how."""

    steps: int | None = Field(
        None, ge=1, description=f"Optimizer steps. Default: {STEPS}, or what minutes allow."
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
        description=f"The highest learning rate. Default: {LORA_RATE:g} for lora, {FULL_RATE:g} for full.",
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


def plan(model: SentenceTransformer, options: ContrastOptions, context: Context) -> ContrastPlan:
    """Look at the model and the first tuples; the rest is read when training begins."""
    if process_count() > 1:
        raise BadInput("contrast runs in one process as yet; start it without torchrun or accelerate launch")
    if context.corpus is None:
        raise BadInput("contrast learns from labelled tuples; say where they are with --data")
    if next(context.corpus.examples(), None) is None:
        raise BadInput(
            "there are no labelled tuples to train on; give a file with a query and a positive column"
        )
    takes = model.max_seq_length or LONGEST
    if options.max_length is not None and options.max_length > takes:
        raise BadInput(f"the model takes at most {takes} tokens; give a max_length up to that")
    if "angle" in options.objective and (width := model.get_embedding_dimension() or 0) % 2:
        raise BadInput(f"the angle objective halves vectors, and {width} is odd; use infonce or cosine")
    if options.compile:
        train.check_compiler()
    _teacher(model, options, context)
    prepared(model, options)
    layout = body.layout_of(body.transformer_of(model).model)
    of = sum(weight.numel() for weight in model.parameters())
    adapters = sum(
        options.rank * sum(layout.shape(parameter))
        for parameter in layout.parameters
        if parameter.block is not None and parameter.multiplies
    )
    return ContrastPlan(
        options=options,
        max_length=options.max_length or min(takes, LONGEST),
        trained=adapters if options.train == "lora" else of,
        of=of,
    )


def forecast(model: SentenceTransformer, plan: ContrastPlan) -> Cost:  # noqa: ARG001
    """Training changes no size, and LoRA is merged."""
    return measure.cost(model)


def prepared(model: SentenceTransformer, options: ContrastOptions) -> SentenceTransformer:
    """The model as it will be trained: pooled and attending as asked. The given one is not changed."""
    if options.attention == "bidirectional":
        model = body.with_both_ways(model)
    if options.pooling == "keep" and options.pool_prompts is None:
        return model
    mode = None if options.pooling == "keep" else options.pooling
    return body.with_pooling(model, mode, include_prompt=options.pool_prompts)


def apply(model: SentenceTransformer, plan: ContrastPlan, context: Context) -> Applied:
    """Read the tuples, train, merge."""
    options = plan.options
    assert context.corpus is not None
    check_prompted(options.prompts, context.corpus)
    student = body.copy_of(prepared(model, options)).float()
    _set_prompts(student, options)
    examples, validation = examples_for(options, context)
    prompts = prompts_by_file(student, options.prompts, [*examples, *validation])
    takes, student.max_seq_length = student.max_seq_length, plan.max_length
    adapted = (
        train.add_adapters(student, _lora(options), seed=context.seed, keep_zeros=options.keep_zeros)
        if options.train == "lora"
        else None
    )
    teacher = _teacher(model, options, context)
    task = train.make_contrast(
        student,
        examples,
        validation,
        prompts=prompts,
        objective=options.objective,
        batch_size=options.batch_size,
        mini_batch=options.mini_batch,
        negatives=options.negatives,
        temperature=options.temperature,
        teacher=teacher,
        seed=context.seed,
    )
    learned_from = data.fingerprint([*examples, "validation", *validation])
    backbone = body.transformer_of(student).model
    with (
        train.recomputed_blocks(backbone) if options.gradient_checkpointing else nullcontext(),
        train.compiled_blocks(backbone) if options.compile else nullcontext(),
    ):
        learned = learn(
            student,
            task.objective,
            task,
            settings_for(options, context.seed),
            label="contrast",
            key=[
                plan.model_dump(mode="json"),
                body.model_digest(model),
                None if teacher is None else body.model_digest(teacher),
                learned_from,
            ],
            shape=train.linear(),
            context=context,
            keep_zeros=options.keep_zeros
            if adapted is None
            else False,  # adapters leave them alone themselves
        )
    if adapted is not None:
        student = adapted.merge()
    student.max_seq_length = takes
    facts = {
        "tuples": len(examples),
        "validation_tuples": len(validation),
        "sources": sorted({Path(example.source).name for example in examples}),
        "hard_negatives": sum(len(example.negatives[: options.negatives]) for example in examples),
    }
    return Applied(
        model=student.to(next(model.parameters()).dtype),
        facts=facts | learned.facts,
        done=learned.done,
        files=learned.files,
    )


def examples_for(options: ContrastOptions, context: Context) -> tuple[list[Example], list[Example]]:
    """The tuples to train on, no more than the run can see, and those to choose by."""
    assert context.corpus is not None
    steps = _steps(options)
    limits = [limit for limit in (options.tuples, steps and steps * options.batch_size) if limit]
    chosen = data.distinct(context.corpus.examples(), key=lambda example: json.dumps(_texts(example)))
    examples = data.sample(chosen, min(limits), seed=context.seed) if limits else list(chosen)
    kept = data.sample(context.corpus.validation_examples(), _validation_tuples(options), seed=context.seed)
    if not kept:
        context.progress.say(NOT_VALIDATED.format("tuples"))
    return examples, kept


def _teacher(
    model: SentenceTransformer, options: ContrastOptions, context: Context
) -> SentenceTransformer | None:
    """Whose similarities are learned, where they are."""
    if options.objective != "distil":
        if options.teacher is not None:
            raise BadInput(
                "only the objective distil learns from a teacher; leave teacher out, or use distil"
            )
        return None
    found = find_teacher(model, options.teacher, None, context).model
    if found is None:
        raise BadInput(
            f"distil needs a teacher that is a model, and {options.teacher} is none; give a folder"
        )
    train.check_same_tokens(model, found, "distil", "use the step align")
    return found


def _texts(example: Example) -> list[str]:
    return [example.query, example.positive, *example.negatives]


def _set_prompts(student: SentenceTransformer, options: ContrastOptions) -> None:
    given = {"query": options.query_prompt, "document": options.document_prompt}
    student.prompts = {**student.prompts, **{role: text for role, text in given.items() if text is not None}}


def _lora(options: ContrastOptions) -> Any:
    return train.Lora(rank=options.rank, alpha=2 * options.rank, dropout=options.lora_dropout)


def _steps(options: ContrastOptions) -> int | None:
    return STEPS if options.steps is None and options.minutes is None else options.steps


def _every(options: ContrastOptions) -> int:
    """Steps between two looks."""
    steps = _steps(options)
    return 100 if steps is None else max(1, steps // LOOKS)


def _validation_tuples(options: ContrastOptions) -> int:
    affordable = _every(options) * options.batch_size // VALIDATION_SHARE
    return min(VALIDATION_TUPLES, max(affordable, 2 * options.batch_size))


def settings_for(options: ContrastOptions, seed: int) -> Any:
    """How the run goes."""
    return train.TrainSettings(
        steps=_steps(options),
        minutes=options.minutes,
        learning_rate=options.learning_rate or (LORA_RATE if options.train == "lora" else FULL_RATE),
        warmup=options.warmup,
        precision=train.precision_for(options.precision),
        validate_every=_every(options),
        checkpoint_every=_every(options),
        seed=seed,
    )


STEP = Step(
    name="contrast",
    help="Train on labelled tuples: queries near their answers, far from the rest.",
    options=ContrastOptions,
    plans=ContrastPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    needs_texts=True,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
