"""Plans and applies `align`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.embedder import Similarity
from trundle.errors import BadInput
from trundle.methods.align import _RATE, _STATIC_RATE, CYCLES, EPOCHS, AlignOptions, _AlignPlan
from trundle.methods.align.imitation import _check_imitation, _Imitator
from trundle.methods.align.leaf import fit_ridge, make_align_task
from trundle.methods.align.teacher_vectors import (
    RIDGE_TEXTS,
    _calibration,
    _counts,
    _joined,
    _sampled,
    _watch_margin,
    targets_for,
)
from trundle.methods.contract import Applied, Context
from trundle.methods.training import Trained, run_training
from trundle.model import heads
from trundle.model.cost import Cost, cost, predict
from trundle.model.encode import embedder
from trundle.model.layout import token_limit
from trundle.model.matrices import computing_on_grid, grid_scales, grid_weights, put_on_grid
from trundle.model.rounding import round_to_int4
from trundle.model.save import model_digest
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of
from trundle.progress import process_count
from trundle.teacher import teacher_kind
from trundle.teacher.labelling import encode_by_role
from trundle.teacher.targets import Targets
from trundle.teacher.teacher import Teacher, find_teacher, opened_key
from trundle.train.blocks import can_compile, changed_blocks, check_compiler, compiling_ahead, keeps_zeros
from trundle.train.loop import TrainSettings
from trundle.train.trainer import Computing, Schedule, cosine, leaf_cycles, linear, precision_for

_SIMILARITY_NAMES: dict[Similarity, Literal["cosine", "dot", "euclidean"]] = {
    "cosine": "cosine",
    "inner product": "dot",
    "l2": "euclidean",
}
"""What sentence-transformers calls the metric of an index."""
_LAST_RATES = {"leaf": 0.1, "linear": 0.1, "cosine": 0.02}
_COMPILED_MINUTES = 3.0
"""A run on a GPU of at least this many minutes compiles the layers unless told otherwise."""
_VALIDATIONS = 20
"""Validations in a run of known length."""
_ROUNDED_RATE = 0.05
"""The share of the peak rate at which late rounding begins; higher ones lead away from the fitted values."""
_ROUNDED_WITH = 2000
"""Texts that int4 weights are fitted to before training."""
_FAR_LOSS = 0.15
"""A student that starts closer than this learns at a lower rate: steps of the full one would lead away."""
_SUFFICIENT_LOSS = 0.02
"""A mean distance of vectors of length 1 (a cosine of 0.9998) that every tried training made larger."""


def plan(model: SentenceTransformer, options: AlignOptions, context: Context) -> _AlignPlan:
    """Checks the options, the teacher and the student against each other."""
    teacher = find_teacher(model, options.teacher, options.teacher_model, context)
    if context.corpus is not None and teacher.brings_texts:
        raise BadInput("a table or store of vectors contains its texts; leave --data out")
    if options.augment and teacher.brings_texts:
        raise BadInput(
            "a table or store has no vectors for new texts; leave augment out, or pass a model as teacher"
        )
    if context.pair and teacher.model is None:
        raise BadInput(f"--pair needs a model as teacher, not {teacher.name}; pass a model folder")
    if options.round_after and options.rounding == "none":
        raise BadInput(
            "round_after is a share of a training that rounds; add rounding: int4, or leave it out"
        )
    if options.compile:
        check_compiler()
        if static_table(model) is not None:
            raise BadInput("a static model has no layers to compile; leave compile out")
    if options.steps != 0:
        heads.check_prompts_are_pooled(model, teacher.prompts)
    if options.loss != "leaf":
        if teacher.model is None:
            raise BadInput(f"the loss {options.loss} needs a teacher that is a model; use loss: leaf")
        _check_imitation(options.loss, model, teacher.model)
    if options.start == "keep":
        heads.check_untruncated(model, "use start: ridge")
    student = _pooled(model, options)
    if options.start == "keep" and student.get_embedding_dimension() != teacher.width:
        raise BadInput(f"the vectors are not {teacher.width} wide like the teacher's; use start: ridge")
    return _AlignPlan(
        options=options,
        teacher=teacher.name,
        inputs=heads.without_head(student).get_embedding_dimension() or 0,
        outputs=teacher.width,
        normalise=teacher.normalises,
        max_length=_length_for(student, options.max_length, teacher),
    )


def forecast(model: SentenceTransformer, plan: _AlignPlan) -> Cost:
    """Returns the cost of the model with its linear head."""
    keep = plan.options.start == "keep"
    return cost(model) if keep else predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: _AlignPlan, context: Context) -> Applied:
    """Gets the teacher's vectors, computes the closed-form start, and trains."""
    with _compiling_ahead(model, plan.options) as compiled:
        return _apply(model, plan, compiled, context)


def _compiling_ahead(
    model: SentenceTransformer, options: AlignOptions
) -> AbstractContextManager[Callable[[], None]]:
    """Compiles the layers beside the work before a training on a GPU; yields a function that waits."""
    on_gpu = torch.cuda.is_available() and process_count() == 1
    trains = options.steps != 0 and options.loss == "leaf" and static_table(model) is None
    if not on_gpu or not trains or not _compiles(options):
        return nullcontext(lambda: None)
    bf16 = precision_for(options.precision) == "bf16"
    return compiling_ahead(transformer_of(model).model, dropout=options.dropout, bf16=bf16)


def _apply(
    model: SentenceTransformer, plan: _AlignPlan, compiled: Callable[[], None], context: Context
) -> Applied:
    options = plan.options
    teacher = find_teacher(model, options.teacher, options.teacher_model, context)
    targets, validation = targets_for(teacher, options, context)
    student = heads.with_prompts(heads.copy_of(model).float(), teacher.prompts, teacher.default_prompt_name)
    if plan.max_length is not None:
        student.max_seq_length = plan.max_length
    files = _calibration(targets, plan.teacher, context.seed)
    student, start_facts = _started(_pooled(student, options), plan, targets, context)
    if teacher.similarity is not None:
        student.similarity_fn_name = _SIMILARITY_NAMES[teacher.similarity]
    computing, scales = None, None
    if options.rounding == "int4":
        texts = partial(_rounding_texts, targets, context)
        student, scales, computing = _on_grid(student, texts, options, context)
    applied = Applied(
        model=student,
        space=None if teacher.brings_texts else teacher,
        teacher=teacher.model,
        facts=_counts(targets, validation) | start_facts,
        files=files,
    )
    if options.steps != 0:
        key = [plan.model_dump(mode="json"), model_digest(model), teacher.identity()]
        trained = _train(student, plan, teacher, (targets, validation), key, context, computing, compiled)
        facts = {**applied.facts, **trained.facts}
        applied = replace(applied, facts=facts, done=trained.done, files={**files, **trained.files})
    if options.rounding == "int4":  # the weights that were validated
        put_on_grid(grid_weights(student), scales)
    return replace(applied, model=student.to(next(model.parameters()).dtype))


def _on_grid(
    student: SentenceTransformer, texts: Callable[[], list[str]], options: AlignOptions, context: Context
) -> tuple[SentenceTransformer, list[Tensor] | None, Computing]:
    """The student as it begins, its int4 scales if they are kept, and how it computes."""
    if options.round_after == 0 and options.steps != 0 and student.device.type != "cpu":
        # The start is distant, so scales are chosen anew in every step.
        return student, None, Computing(context=partial(computing_on_grid, student))
    if options.round_after == 0 or options.steps == 0:
        student = round_to_int4(student, texts(), progress=context.progress)
    scales = grid_scales(student)
    unpatched = heads.copy_of(student) if options.round_after else student  # training patches the student

    def begin() -> None:
        unpatched.load_state_dict(student.state_dict())
        rounded = round_to_int4(unpatched, texts(), progress=context.progress)
        with torch.no_grad():
            kept = [*student.parameters(), *scales]
            for tensor, fitted in zip(kept, [*rounded.parameters(), *grid_scales(rounded)], strict=True):
                tensor.copy_(fitted)

    context_of = partial(computing_on_grid, student, scales)
    return student, scales, Computing(context=context_of, begin=begin, kept=scales)


def _rounding_texts(targets: Targets, context: Context) -> list[str]:
    """Texts that int4 weights are fitted to: of the corpus if there is one, because few may have vectors."""
    if context.corpus is not None:
        return [text.text for text in context.corpus.distinct_train(_ROUNDED_WITH, context.seed)]
    return list(targets.texts(_sampled(targets, _ROUNDED_WITH, context.seed)))


def _train(
    student: SentenceTransformer,
    plan: _AlignPlan,
    teacher: Teacher,
    vectors: tuple[Targets, Targets | None],
    key: list[Any],
    context: Context,
    computing: Computing | None,
    compiled: Callable[[], None],
) -> Trained:
    options, (targets, validation) = plan.options, vectors
    imitator = None
    if options.loss != "leaf" and teacher.model is not None:
        imitator = _Imitator(options.loss, student, teacher.model, seed=context.seed)
    with context.progress.task("preparing the training data", None):
        task = make_align_task(
            student,
            targets,
            validation,
            batch_size=options.batch_size,
            query_weight=options.query_weight,
            imitate=imitator,
            context=context,
        )
    task = replace(
        task,
        on_validation=_watch_margin(student, validation, context) if options.margin else None,
        computing=computing,
    )
    per_epoch = -(-task.batches.order.per_epoch // options.accumulate)
    settings = settings_for(
        options,
        per_epoch,
        0 if task.validation is None else task.validation.order.per_epoch,
        context.seed,
        normalised=targets.normalised,
        default_rate=_RATE if static_table(student) is None else _STATIC_RATE,
    )
    if settings.optimizer == "muon" and keeps_zeros(student, options.keep_zeros):
        context.progress.say("Muon would fill pruned weights; AdamW is used")
        settings = replace(settings, optimizer="adamw")
    compiles = options.compile or (task.batches.gather is not None and _compiles(options))
    if compiles:
        with context.progress.task("compiling the layers", None):
            compiled()
    with (
        nullcontext() if imitator is None else closing(imitator),
        changed_blocks(transformer_of(student).model, compiled=True) if compiles else nullcontext(),
    ):
        return run_training(
            student,
            task,
            settings,
            key=[*key, [part.folder.name for part in vectors if part is not None]],
            schedule=schedule_for(options, per_epoch),
            context=context,
            module=None if imitator is None else imitator.trained,
            keep_zeros=options.keep_zeros,
        )


def _compiles(options: AlignOptions) -> bool:
    """Whether steps that are captured as graphs compile the layers; others do only if told to."""
    if options.compile is not None:
        return options.compile
    return (options.minutes or 0.0) >= _COMPILED_MINUTES and can_compile()


def schedule_for(options: AlignOptions, per_epoch: int) -> Schedule:
    """Returns the schedule of the learning rate; where rounding begins late, it is nearly at its end then."""
    name = options.schedule
    if name == "auto":
        name = "leaf" if options.minutes is None else "cosine"
    if name == "constant":
        return linear(end=1.0)
    end = _LAST_RATES[name] if options.last_rate is None else options.last_rate
    if options.round_after:
        kept = {"round_after": 0.0, "last_rate": max(end, _ROUNDED_RATE)}
        exact = schedule_for(options.model_copy(update=kept), per_epoch)
        return _two_parts(exact, share=options.round_after, last=end)
    if name == "leaf":
        return leaf_cycles(per_epoch, epochs=EPOCHS, cycles=CYCLES, end=end)
    return cosine(end=end) if name == "cosine" else linear(end=end)


def _two_parts(first: Schedule, *, share: float, last: float) -> Schedule:
    """`first` for a share of the steps, and from where it ends a linear decrease to `last` of the peak."""

    def schedule(step: int, steps: int) -> float:
        boundary = max(1, round(share * steps))
        if step < boundary:
            return first(step, boundary)
        level = first(boundary - 1, boundary)
        return level + (last - level) * (step - boundary + 1) / max(1, steps - boundary)

    return schedule


def _length_for(student: SentenceTransformer, wanted: int | None, teacher: Teacher) -> int | None:
    """The student's new token limit: the wanted one, or the teacher's if that is longer and possible."""
    if static_table(student) is not None:
        return None
    own, positions = student.max_seq_length, token_limit(transformer_of(student).model)
    if wanted is not None:
        if wanted > (positions or wanted):
            raise BadInput(f"the model has positions for {positions} tokens; pass a max_length up to that")
        return wanted
    theirs = None if teacher.model is None else teacher.model.max_seq_length
    if own is None or theirs is None:
        return None
    longest = min(theirs, positions or theirs)
    return longest if longest > own else None


def _pooled(model: SentenceTransformer, options: AlignOptions) -> SentenceTransformer:
    return model if options.pooling == "keep" else heads.with_pooling(model, options.pooling)


def reopen(applied: Applied, plan: _AlignPlan, context: Context) -> Applied:
    """Adds the teacher to a stored result; one with vectors of its own texts adds nothing."""
    name = plan.options.teacher
    is_open = name is None or opened_key(name, plan.options.teacher_model) in context.opened
    if name is not None and not is_open and teacher_kind(name) in ("table", "store", "index"):
        return applied
    teacher = find_teacher(applied.model, plan.options.teacher, plan.options.teacher_model, context)
    return replace(applied, space=None if teacher.brings_texts else teacher, teacher=teacher.model)


def _started(
    student: SentenceTransformer, plan: _AlignPlan, targets: Targets, context: Context
) -> tuple[SentenceTransformer, dict[str, Any]]:
    """Adds the linear layer; returns also the facts about a ridge start."""
    if plan.options.start == "keep":
        return student, {}
    if plan.options.start == "random":
        return heads.with_new_head(student, plan.outputs, normalise=plan.normalise, seed=context.seed), {}
    positions = _sampled(targets, plan.options.start_texts or RIDGE_TEXTS, context.seed)
    pooled = embedder(heads.without_head(student), name="student", progress=context.progress)
    inputs = _joined(targets, encode_by_role(pooled, targets.chosen(positions)))
    with context.progress.task("fitting the linear map", None):
        found = fit_ridge(inputs, _joined(targets, targets.vectors(positions)), seed=context.seed)
    student = heads.with_linear_head(student, found.weight, found.bias, normalise=plan.normalise)
    return student, {
        "ridge_strength": found.strength if math.isfinite(found.strength) else None,
        "ridge_identity": round(found.identity, 4),
        "ridge_cosine": round(found.held_out_cosine, 4),
    }


def settings_for(
    options: AlignOptions,
    epoch_steps: int,
    validation_steps: int,
    seed: int,
    *,
    normalised: bool,
    default_rate: float = _RATE,
) -> TrainSettings:
    """Returns the training settings, with a few validations per run that take only a small part of its time.

    If all targets are `normalised`, a student that is already close enough is not trained, and one that is
    close learns at a lower rate, unless the rate is given.
    """
    measured = options.loss == "leaf" and normalised
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = CYCLES * EPOCHS * epoch_steps
    regular = 500 if steps is None or options.minutes is not None else steps // _VALIDATIONS
    every = max(1, 2 * validation_steps, regular)
    return TrainSettings(
        steps=steps,
        minutes=options.minutes,
        accumulate=options.accumulate,
        learning_rate=options.learning_rate or default_rate,
        warmup=options.warmup,
        dropout=options.dropout,
        precision=precision_for(options.precision),
        validate_every=every,
        patience=options.patience,
        sufficient_loss=_SUFFICIENT_LOSS if measured else None,
        far_loss=_FAR_LOSS if measured and options.learning_rate is None else None,
        exact_share=options.round_after if options.rounding == "int4" else 0.0,
        optimizer=options.optimizer,
        seed=seed,
    )
