"""How `contrast` plans and changes a model."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trundle.data.sampling import distinct, fingerprint, sample
from trundle.errors import BadInput
from trundle.methods.align.imitation import check_same_tokens
from trundle.methods.contract import LONGEST, Applied, Context
from trundle.methods.contrast import _FULL_RATE, _LORA_RATE, ContrastOptions, ContrastPlan, _steps
from trundle.methods.contrast.adapters import _add_adapters, _Lora
from trundle.methods.training import NOT_VALIDATED, check_prompted, learn, prompts_by_file
from trundle.model.cost import cost
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.pooling import with_both_ways, with_pooling
from trundle.model.save import model_digest
from trundle.model.surgery import transformer_of
from trundle.progress import process_count
from trundle.teacher.teacher import find_teacher
from trundle.train.blocks import check_compiler, compiled_blocks, recomputed_blocks
from trundle.train.contrastive import make_contrast
from trundle.train.learner import linear, precision_for
from trundle.train.loop import TrainSettings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.examples import Example
    from trundle.model.cost import Cost

_VALIDATION_TUPLES = 2048
_VALIDATION_SHARE = 4
"""One look costs at most this part of the training before it, counted in tuples; it has no backward pass."""
_LOOKS = 10
"""How often a run of known length is validated."""


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
        check_compiler()
    _teacher(model, options, context)
    _prepared(model, options)
    layout = layout_of(transformer_of(model).model)
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


def forecast(model: SentenceTransformer, plan: ContrastPlan) -> Cost:
    """Training changes no size, and LoRA is merged."""
    return cost(model)


def _prepared(model: SentenceTransformer, options: ContrastOptions) -> SentenceTransformer:
    """The model as it will be trained: pooled and attending as asked. The given one is not changed."""
    if options.attention == "bidirectional":
        model = with_both_ways(model)
    if options.pooling == "keep" and options.pool_prompts is None:
        return model
    mode = None if options.pooling == "keep" else options.pooling
    return with_pooling(model, mode, include_prompt=options.pool_prompts)


def apply(model: SentenceTransformer, plan: ContrastPlan, context: Context) -> Applied:
    """Read the tuples, train, merge."""
    options = plan.options
    assert context.corpus is not None
    check_prompted(options.prompts, context.corpus)
    student = copy_of(_prepared(model, options)).float()
    _set_prompts(student, options)
    examples, validation = examples_for(options, context)
    prompts = prompts_by_file(student, options.prompts, [*examples, *validation])
    takes, student.max_seq_length = student.max_seq_length, plan.max_length
    adapted = (
        _add_adapters(student, _lora(options), seed=context.seed, keep_zeros=options.keep_zeros)
        if options.train == "lora"
        else None
    )
    teacher = _teacher(model, options, context)
    task = make_contrast(
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
    learned_from = fingerprint([*examples, "validation", *validation])
    backbone = transformer_of(student).model
    with (
        recomputed_blocks(backbone) if options.gradient_checkpointing else nullcontext(),
        compiled_blocks(backbone) if options.compile else nullcontext(),
    ):
        learned = learn(
            student,
            task.objective,
            task,
            settings_for(options, context.seed),
            label="contrast",
            key=[
                plan.model_dump(mode="json"),
                model_digest(model),
                None if teacher is None else model_digest(teacher),
                learned_from,
            ],
            shape=linear(),
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
    chosen = distinct(context.corpus.examples(), key=lambda example: json.dumps(_texts(example)))
    examples = sample(chosen, min(limits), seed=context.seed) if limits else list(chosen)
    kept = sample(context.corpus.validation_examples(), _validation_tuples(options), seed=context.seed)
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
    check_same_tokens(model, found, "distil", "use the step align")
    return found


def _texts(example: Example) -> list[str]:
    return [example.query, example.positive, *example.negatives]


def _set_prompts(student: SentenceTransformer, options: ContrastOptions) -> None:
    given = {"query": options.query_prompt, "document": options.document_prompt}
    student.prompts = {**student.prompts, **{role: text for role, text in given.items() if text is not None}}


def _lora(options: ContrastOptions) -> Any:
    return _Lora(rank=options.rank, alpha=2 * options.rank, dropout=options.lora_dropout)


def _every(options: ContrastOptions) -> int:
    """Steps between two looks."""
    steps = _steps(options)
    return 100 if steps is None else max(1, steps // _LOOKS)


def _validation_tuples(options: ContrastOptions) -> int:
    affordable = _every(options) * options.batch_size // _VALIDATION_SHARE
    return min(_VALIDATION_TUPLES, max(affordable, 2 * options.batch_size))


def settings_for(options: ContrastOptions, seed: int) -> Any:
    """How the run goes."""
    return TrainSettings(
        steps=_steps(options),
        minutes=options.minutes,
        learning_rate=options.learning_rate or (_LORA_RATE if options.train == "lora" else _FULL_RATE),
        warmup=options.warmup,
        precision=precision_for(options.precision),
        validate_every=_every(options),
        checkpoint_every=_every(options),
        seed=seed,
    )
