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

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.steps.align_extras import calibration, watch_margin
from trundle.steps.align_options import RATE, STATIC_RATE, AlignOptions
from trundle.steps.align_texts import RIDGE_TEXTS, augmentations, counts, joined, sampled, targets_for
from trundle.steps.contract import Applied, Context, Plan, Step
from trundle.steps.learning import learn
from trundle.steps.teacher import find_teacher

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Targets
    from trundle.measure import Cost

CYCLES, EPOCHS = 3, 10
LAST_RATE = 0.1
LOOKS = 20
"""How often a run of known length is validated."""
ENOUGH = 0.02
"""A mean distance of vectors of length 1 (a cosine of 0.9998) from which the trainings that were tried only led away."""


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


def plan(model: SentenceTransformer, options: AlignOptions, context: Context) -> AlignPlan:
    """Look at both ends of the way."""
    data.check_augmentations(augmentations(options.augment))
    teacher = find_teacher(model, options.teacher, options.teacher_model, context)
    if context.corpus is None and not teacher.brings_texts:
        raise BadInput("align learns from texts; say where they are with --data")
    if context.corpus is not None and teacher.brings_texts:
        raise BadInput("a table or store of vectors brings its own texts; leave --data out")
    if context.pair and teacher.model is None:
        raise BadInput(
            f"--pair puts both models into one folder, and {teacher.name} is none; name a model folder as teacher"
        )
    if options.compile:
        train.check_compiler()
        if body.static_table(model) is not None:
            raise BadInput("a static model has no layers to compile; leave compile out")
    if options.steps != 0:
        body.check_prompts_are_pooled(model, teacher.prompts)
    if options.loss != "leaf":
        if teacher.model is None:
            raise BadInput(
                f"the loss {options.loss} looks inside the teacher, so it needs a model; use loss: leaf"
            )
        train.check_imitation(options.loss, model, teacher.model)
    if options.start == "keep":
        body.check_untruncated(model, "use start: ridge")
    student = _pooled(model, options)
    inputs = body.without_head(student).get_embedding_dimension() or 0
    if options.start == "keep" and student.get_embedding_dimension() != teacher.width:
        raise BadInput(
            f"the model's vectors are not {teacher.width} wide like its teacher's; use start: ridge"
        )
    return AlignPlan(
        options=options,
        teacher=teacher.name,
        inputs=inputs,
        outputs=teacher.width,
        normalise=teacher.normalises,
    )


def forecast(model: SentenceTransformer, plan: AlignPlan) -> Cost:
    """The model with its linear head in place."""
    if plan.options.start == "keep":
        return measure.cost(model)
    return measure.predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: AlignPlan, context: Context) -> Applied:
    """Ask the teacher once, start in closed form, train."""
    options = plan.options
    teacher = find_teacher(model, options.teacher, options.teacher_model, context)
    targets, validation = targets_for(teacher, options, context)
    student = body.with_prompts(body.copy_of(model).float(), teacher.prompts, teacher.default_prompt_name)
    student = _pooled(student, options)
    facts: dict[str, Any] = counts(targets, validation)
    files = calibration(targets, plan.teacher, context.seed)
    student, started = _started(student, plan, targets, context)
    facts |= started
    dtype = next(model.parameters()).dtype
    if options.steps == 0:
        _settle(student, options)
        return Applied(
            model=student.to(dtype),
            space=teacher.embedder,
            teacher=teacher.model,
            facts=facts,
            files=files,
        )
    imitator = (
        None
        if options.loss == "leaf" or teacher.model is None
        else train.Imitator(options.loss, student, teacher.model)
    )
    task = train.make_alignment(
        student,
        targets,
        validation,
        batch_size=options.batch_size,
        query_weight=options.query_weight,
        seed=context.seed,
        imitate=imitator,
        progress=context.progress,
    )
    looks = 0 if task.validation is None else task.validation.order.per_epoch
    rate = RATE if body.static_table(student) is None else STATIC_RATE
    settings = settings_for(
        options,
        task.batches.order.per_epoch,
        looks,
        context.seed,
        normalised=targets.normalised,
        usual_rate=rate,
    )
    learned_from = [part.folder.name for part in (targets, validation) if part is not None]
    with train.compiled_blocks(body.transformer_of(student).model) if options.compile else nullcontext():
        learned = learn(
            student,
            task.objective,
            task,
            settings,
            label="align",
            key=[plan.model_dump(mode="json"), body.model_digest(model), teacher.identity(), learned_from],
            shape=train.leaf_cycles(
                task.batches.order.per_epoch, epochs=EPOCHS, cycles=CYCLES, end=LAST_RATE
            ),
            context=context,
            keep_zeros=options.keep_zeros,
            on_validation=watch_margin(student, validation, context) if options.margin else None,
            computing=partial(body.computing_on_grid, student) if options.rounding == "int4" else nullcontext,
        )
    if imitator is not None:
        imitator.close()
    _settle(student, options)
    return Applied(
        model=student.to(dtype),
        space=teacher.embedder,
        teacher=teacher.model,
        facts=facts | learned.facts,
        done=learned.done,
        files={**files, **learned.files},
    )


def _pooled(model: SentenceTransformer, options: AlignOptions) -> SentenceTransformer:
    """The model with the pooling that was asked for; of several kinds at once, one is narrower."""
    return body.with_mean_pooling(model) if options.pooling == "mean" else model


def reopen(applied: Applied, plan: AlignPlan, context: Context) -> Applied:
    """With the teacher opened again."""
    teacher = find_teacher(applied.model, plan.options.teacher, plan.options.teacher_model, context)
    return replace(applied, space=teacher.embedder, teacher=teacher.model)


def _settle(student: SentenceTransformer, options: AlignOptions) -> None:
    """Leave the model with the weights it was measured with."""
    if options.rounding == "int4":
        body.put_on_grid(body.grid_weights(student))


def _started(
    student: SentenceTransformer, plan: AlignPlan, targets: Targets, context: Context
) -> tuple[SentenceTransformer, dict[str, Any]]:
    """The student with its linear layer in place."""
    if plan.options.start == "keep":
        return student, {}
    if plan.options.start == "random":
        return body.with_new_head(student, plan.outputs, normalise=plan.normalise, seed=context.seed), {}
    positions = sampled(targets, plan.options.start_texts or RIDGE_TEXTS, context.seed)
    pooled = body.embedder(body.without_head(student), name="student", progress=context.progress)
    inputs = joined(targets, data.encode_by_role(pooled, targets.chosen(positions)))
    found = train.fit_ridge(inputs, joined(targets, targets.vectors(positions)), seed=context.seed)
    student = body.with_linear_head(student, found.weight, found.bias, normalise=plan.normalise)
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
    usual_rate: float = RATE,
) -> Any:
    """Validation comes a few times in a run, but never so often that it takes a large part of it.

    `normalised` tells that all targets have length 1: only among these is it known which distance is near enough.
    """
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = CYCLES * EPOCHS * epoch_steps
    looks = 500 if steps is None or options.minutes is not None else steps // LOOKS
    every = max(1, 2 * validation_steps, looks)
    return train.TrainSettings(
        steps=steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate or usual_rate,
        warmup=options.warmup,
        dropout=options.dropout,
        precision=train.precision_for(options.precision),
        validate_every=every,
        checkpoint_every=every,
        patience=options.patience,
        enough=ENOUGH if options.loss == "leaf" and normalised else None,
        seed=seed,
    )


STEP = Step(
    name="align",
    help="Train the model into its teacher's vector space, without labels.",
    options=AlignOptions,
    plans=AlignPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    reopen=reopen,
    needs_texts=True,
    enters_space=lambda _: True,
    reads=lambda options: () if options.teacher is None else (options.teacher,),
)
