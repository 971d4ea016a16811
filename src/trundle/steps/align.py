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

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import trundle.data as data
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.processes import is_first, own_rank, process_count
from trundle.steps.besides import calibration, watch_margin
from trundle.steps.contract import Applied, Context, Options, Plan, Step
from trundle.steps.teacher import Teacher, find_teacher

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Targets, Text
    from trundle.measure import Cost

RIDGE_TEXTS = 8192
VALIDATION_TEXTS = 128 * 32
FEWEST_VALIDATED, VALIDATED_SHARE = 512, 8
CYCLES, EPOCHS = 3, 10
LAST_RATE = 0.1
LOOKS = 20
"""How often a run of known length is validated."""


class AlignOptions(Options):
    """Whose space, from which texts, and for how long."""

    teacher: str | None = Field(
        None,
        description="Folder, hub name, endpoint URL, .parquet of (text, vector), or what `targets build` wrote; default: the model that came in.",
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
    learning_rate: float = Field(
        1e-4, gt=0, allow_inf_nan=False, description="The highest learning rate; it falls to a tenth."
    )
    warmup: int = Field(0, ge=0, description="Steps in which the learning rate rises.")
    start: Literal["ridge", "random", "keep"] = Field(
        "ridge", description="How the linear layer into the space begins."
    )
    pooling: Literal["keep", "mean"] = Field("keep", description="The student's pooling: its own, or mean.")
    dropout: bool = Field(False, description="Train with the model's own dropout.")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 on a GPU, fp32 elsewhere."
    )
    rounding: Literal["none", "int4"] = Field(
        "none", description="Learn with weights an int4 file can hold, so that export --int4 loses nothing."
    )
    keep_zeros: bool = Field(True, description="Leave pruned weights, which are exactly zero, as they are.")
    patience: int | None = Field(
        None, ge=1, description="Stop after so many validations without a better one."
    )
    by_rank: bool = Field(
        False, description="In several processes, each opens an nth of the vectors instead of all of them."
    )
    margin: bool = Field(
        False, description="At each validation also measure how far searches agree with the teacher's."
    )


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
            how = f"training for {asked.minutes:g} minutes"
        else:
            how = f"training for {asked.steps or f'{CYCLES} × {EPOCHS} epochs'}{' steps' if asked.steps else ''}"
        return f"{self.inputs} → {self.outputs} into the space of {self.teacher}, {how}"


def plan(model: SentenceTransformer, options: AlignOptions, context: Context) -> AlignPlan:
    """Look at both ends of the way."""
    data.check_augmentations(_names(options.augment))
    teacher = find_teacher(model, options.teacher, options.teacher_model, context)
    if context.corpus is None and not teacher.brings_texts:
        raise BadInput("align learns from texts; say where they are with --data")
    if context.corpus is not None and teacher.brings_texts:
        raise BadInput("a table or store of vectors brings its own texts; leave --data out")
    if context.pair and teacher.model is None:
        raise BadInput(
            f"--pair puts both models into one folder, and {teacher.name} is none; name a model folder as teacher"
        )
    if options.steps != 0:
        body.check_prompts_are_pooled(model, teacher.prompts)
    if options.loss != "leaf":
        if teacher.model is None:
            raise BadInput(
                f"the loss {options.loss} looks inside the teacher, so it needs a model; use loss: leaf"
            )
        train.check_imitation(options.loss, model, teacher.model)
    inputs = body.without_head(model).get_embedding_dimension() or 0
    if options.start == "keep" and model.get_embedding_dimension() != teacher.width:
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
    if options.pooling == "mean":
        student = body.with_mean_pooling(student)
    facts: dict[str, Any] = _counts(targets, validation)
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
    settings = settings_for(options, task.batches.order.per_epoch, looks, context.seed)
    learned_from = [part.folder.name for part in (targets, validation) if part is not None]
    run = context.training_folder(
        plan.model_dump(mode="json"),
        body.model_digest(model),
        teacher.identity(),
        learned_from,
        str(settings),
    )
    with train.zeros_kept(student) if options.keep_zeros else nullcontext():
        result = train.train(
            student,
            task.objective,
            task.batches,
            settings,
            shape=train.leaf_cycles(
                task.batches.order.per_epoch, epochs=EPOCHS, cycles=CYCLES, end=LAST_RATE
            ),
            validation=task.validation,
            folder=run,
            resume=True,
            on_validation=watch_margin(student, validation, context) if options.margin else None,
            computing=partial(body.computing_on_grid, student) if options.rounding == "int4" else nullcontext,
            progress=context.progress,
            label="align",
        )
    if imitator is not None:
        imitator.close()
    _settle(student, options)
    facts |= {
        "steps": result.steps,
        "loss": result.loss,
        "validation": result.validation,
        "best_step": result.best_step,
    }
    metrics = run / train.METRICS_FILE
    return Applied(
        model=student.to(dtype),
        space=teacher.embedder,
        teacher=teacher.model,
        facts=facts,
        done=lambda: shutil.rmtree(run, ignore_errors=True),
        files=files | ({"align.jsonl": metrics.read_text(encoding="utf-8")} if is_first() else {}),
    )


def reopen(applied: Applied, plan: AlignPlan, context: Context) -> Applied:
    """With the teacher opened again."""
    teacher = find_teacher(applied.model, plan.options.teacher, plan.options.teacher_model, context)
    return replace(applied, space=teacher.embedder, teacher=teacher.model)


def _settle(student: SentenceTransformer, options: AlignOptions) -> None:
    """Leave the model with the weights it was measured with."""
    if options.rounding == "int4":
        body.put_on_grid(body.grid_weights(student))


def _names(augment: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in augment.split(",") if name.strip())


def targets_for(teacher: Teacher, options: AlignOptions, context: Context) -> tuple[Targets, Targets | None]:
    """The teacher's vectors for the training and the validation texts, computed at most once."""
    if teacher.store is not None:
        opened = _opened(teacher.store, options)
        held_out = VALIDATION_TEXTS
        if opened.is_share:  # as many in every process, however unlike their shares are
            smallest = opened.manifest.count // process_count()
            held_out = min(VALIDATION_TEXTS // process_count(), smallest // 10)
        return opened.split(held_out, seed=context.seed)
    if teacher.table is not None:
        folder = _store(context, "table", teacher)
        everything = (
            teacher.table.targets(folder, progress=context.progress)
            if is_first()
            else data.wait_for_targets(folder)
        )
        return everything.split(VALIDATION_TEXTS, seed=context.seed)
    assert context.corpus is not None
    assert teacher.embedder is not None
    names = _names(options.augment)
    prompts = {role: prompt for role, prompt in teacher.prompts.items() if prompt}

    def build(label: str, texts: Callable[[], Iterable[Text]]) -> Targets:
        """The texts are read only if their vectors are not all there: what the label says stands for them."""
        assert teacher.embedder is not None
        folder = _store(context, label, teacher)
        if not is_first():
            return data.wait_for_targets(folder)
        return data.find_targets(folder) or data.build_targets(
            texts(),
            teacher.embedder,
            teacher_id=teacher.identity(),
            folder=folder,
            prompts=prompts,
            progress=context.progress,
        )

    corpus = context.corpus

    def training_texts() -> Iterator[Text]:
        chosen = data.distinct(corpus.train(), key=lambda text: f"{text.kind}\0{text.text}")
        if options.texts is not None:
            chosen = iter(data.sample(chosen, options.texts, seed=context.seed))
        return data.augmented(chosen, names, seed=context.seed, allowed=corpus.may_train_on)

    content = _key(corpus.facts(), options.texts, names, context.seed)
    targets = build(f"train {content}", training_texts)
    if options.by_rank and process_count() > 1:
        targets = _opened(targets.folder, options)
    if options.steps == 0:
        return targets, None
    kept = data.sample(corpus.validation(), validation_count(options.texts), seed=context.seed)
    if not kept:
        context.progress.say(
            "no texts are kept back for validation; the last weights are taken, not the best"
        )
        return targets, None
    return targets, build(f"validation {content}", lambda: kept)


def _opened(folder: Path, options: AlignOptions) -> Targets:
    """All of a store, or what falls to this process."""
    if options.by_rank and process_count() > 1:
        return data.open_share(folder, rank=own_rank(), processes=process_count())
    return data.open_targets(folder)


def _counts(targets: Targets, validation: Targets | None) -> dict[str, int]:
    """How many texts all processes together learn from and validate by."""
    validated = 0 if validation is None else len(validation)
    if validation is not None and validation.is_share:
        validated *= process_count()
    learned = len(targets)
    if targets.is_share:
        beside = validated if validation is not None and validation.is_share else 0
        learned = targets.manifest.count - beside
    return {"texts": learned, "validation_texts": validated}


def validation_count(texts: int | None) -> int:
    """How many texts are validated on: LEAF's 128 batches, or fewer where few are learned from."""
    return (
        VALIDATION_TEXTS
        if texts is None
        else min(VALIDATION_TEXTS, max(FEWEST_VALIDATED, texts // VALIDATED_SHARE))
    )


def _store(context: Context, label: str, teacher: Teacher) -> Path:
    return context.cache / "targets" / _key(label, teacher.identity(), dict(teacher.prompts))


def _key(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return blake2b(text.encode(), digest_size=12).hexdigest()


def _started(
    student: SentenceTransformer, plan: AlignPlan, targets: Targets, context: Context
) -> tuple[SentenceTransformer, dict[str, Any]]:
    """The student with its linear layer in place."""
    if plan.options.start == "keep":
        return student, {}
    if plan.options.start == "random":
        return body.with_new_head(student, plan.outputs, normalise=plan.normalise, seed=context.seed), {}
    positions = data.sample(range(len(targets)), RIDGE_TEXTS, seed=context.seed)
    pooled = body.embedder(body.without_head(student), name="student", progress=context.progress)
    inputs = data.encode_by_role(pooled, targets.chosen(positions))
    found = train.fit_ridge(inputs, targets.vectors(positions), seed=context.seed)
    student = body.with_linear_head(student, found.weight, found.bias, normalise=plan.normalise)
    return student, {"ridge_strength": found.strength, "ridge_cosine": round(found.held_out_cosine, 4)}


def settings_for(options: AlignOptions, epoch_steps: int, validation_steps: int, seed: int) -> Any:
    """Validation comes a few times in a run, but never so often that it takes a large part of it."""
    steps = options.steps
    if steps is None and options.minutes is None:
        steps = CYCLES * EPOCHS * epoch_steps
    every = max(1, 2 * validation_steps, 500 if steps is None else steps // LOOKS)
    return train.TrainSettings(
        steps=steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        warmup=options.warmup,
        dropout=options.dropout,
        precision=train.best_precision() if options.precision == "auto" else options.precision,
        validate_every=every,
        checkpoint_every=every,
        patience=options.patience,
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
    enters_space=True,
)
