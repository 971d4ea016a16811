"""How `finetune` plans and changes a model."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from trundle.data.sampling import fingerprint, sample
from trundle.errors import BadInput
from trundle.evaluate.metrics import class_measures, number_measures
from trundle.methods.contract import LONGEST, Applied, Context
from trundle.methods.finetune import _EPOCHS, FinetuneOptions, FinetunePlan
from trundle.methods.finetune.labels import _answers_of, _classes_of, _make_head_task
from trundle.methods.training import NOT_VALIDATED, Learned, learn
from trundle.model.cost import predict
from trundle.model.heads import copy_of, name_labels, rescale_head, with_new_head, without_head
from trundle.model.save import model_digest
from trundle.model.surgery import transformer_of
from trundle.progress import process_count
from trundle.train.learner import linear, precision_for
from trundle.train.loop import TrainSettings

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.corpus import Part
    from trundle.data.examples import LabelledRow
    from trundle.model.cost import Cost

_PARTS: tuple[Part, ...] = ("train", "validation", "held_out")
_LOOKS = 10
"""How often a run of known length is validated."""
_VALIDATION_ROWS, _VALIDATION_SHARE = 2048, 4
"""At most so many rows are looked at, and in a short run no more than this part of the training before a look."""
_WARMUP_SHARE, _WARMUP_STEPS = 10, 100
"""The learning rate rises for a tenth of a run, or for so many steps where its length is not known."""


def plan(model: SentenceTransformer, options: FinetuneOptions, context: Context) -> FinetunePlan:
    """Look at the model and at all labels."""
    if process_count() > 1:
        raise BadInput("finetune runs in one process as yet; start it without torchrun or accelerate launch")
    if options.steps is not None and options.epochs is not None:
        raise BadInput("steps and epochs say the same thing; give one of them")
    if context.corpus is None:
        raise BadInput("finetune learns from labelled texts; say where they are with --data")
    takes = model.max_seq_length or LONGEST
    if options.max_length is not None and options.max_length > takes:
        raise BadInput(f"the model takes at most {takes} tokens; give a max_length up to that")
    transformer_of(model)
    rows = {part: list(context.corpus.labelled(part)) for part in _PARTS}
    if len(rows["train"]) < 2:
        raise BadInput("there are not two labelled rows to train on; give a file with a text and a label")
    everything = [row for part in _PARTS for row in rows[part]]
    widths = {len(row.texts) for row in everything}
    if len(widths) > 1:
        raise BadInput("some rows are single texts and some are pairs; train on one kind at a time")
    return FinetunePlan(
        options=options,
        labels=_classes_of(everything, options.kind),
        pairs=widths == {2},
        inputs=without_head(model).get_embedding_dimension() or 0,
        max_length=options.max_length or min(takes, LONGEST),
    )


def forecast(model: SentenceTransformer, plan: FinetunePlan) -> Cost:
    """The model with its head in place."""
    return predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: FinetunePlan, context: Context) -> Applied:
    """Train, and measure on the rows that are held out."""
    assert context.corpus is not None
    options = plan.options
    rows = list(context.corpus.labelled("train"))
    rows = sample(rows, options.rows, seed=context.seed) if options.rows else rows
    affordable = _looked_at(options, len(rows))
    validation = sample(context.corpus.labelled("validation"), affordable, seed=context.seed)
    if not validation:
        context.progress.say(NOT_VALIDATED.format("rows"))
    student, learned = _trained(model, plan, rows, validation, context)
    student = student.to(next(model.parameters()).dtype)
    facts: dict[str, Any] = {
        "rows": len(rows),
        "validation_rows": len(validation),
        **learned.facts,
    }
    held_out = list(context.corpus.labelled("held_out"))
    scores = {}
    if held_out:
        found = _measures_of(student, plan, held_out)
        facts |= {"held_out_rows": len(held_out)} | found
        scores = {f"{name} on {len(held_out):,} held-out rows": value for name, value in found.items()}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        context.progress.say(f"finetune: on {len(held_out):,} held-out rows {shown}")
    return Applied(
        model=student,
        facts=facts,
        scores=scores,
        use=_how_to_ask(plan),
        done=learned.done,
        files=learned.files,
    )


def _how_to_ask(plan: FinetunePlan) -> str:
    """The lines that get an answer, for the card."""
    given = '[("a text", "another text")]' if plan.pairs else '["a text", "another text"]'
    if not plan.labels:
        return f"answers = model.encode({given})[:, 0]"
    return (
        f"scores = model.encode({given})\n"
        "answers = [model[0].auto_model.config.id2label[best] for best in scores.argmax(axis=1)]"
    )


def _trained(
    model: SentenceTransformer,
    plan: FinetunePlan,
    rows: Sequence[LabelledRow],
    validation: Sequence[LabelledRow],
    context: Context,
) -> tuple[SentenceTransformer, Learned]:
    """The model with its head, trained.

    Numbers are learned in units of their own spread, which then goes into the head.
    """
    options = plan.options
    student = with_new_head(copy_of(model).float(), plan.outputs, normalise=False, seed=context.seed)
    student.prompts, student.default_prompt_name = {}, None
    takes, student.max_seq_length = student.max_seq_length, plan.max_length
    answers = _answers_of(rows, plan.labels)
    mean, spread = (0.0, 1.0) if plan.labels else (fmean(answers), pstdev(answers) or 1.0)

    def scaled(of: Sequence[LabelledRow]) -> list[float]:
        right = _answers_of(of, plan.labels)
        return right if plan.labels else [(number - mean) / spread for number in right]

    task = _make_head_task(
        student,
        [row.as_input() for row in rows],
        scaled(rows),
        ([row.as_input() for row in validation], scaled(validation)) if validation else None,
        classes=bool(plan.labels),
        batch_size=options.batch_size,
        seed=context.seed,
    )
    learned = learn(
        student,
        task.objective,
        task,
        _settings_for(options, task.batches.order.per_epoch, context.seed),
        label="finetune",
        key=[
            plan.model_dump(mode="json"),
            model_digest(model),
            fingerprint([*rows, "validation", *validation]),
        ],
        shape=linear(),
        context=context,
        keep_zeros=options.keep_zeros,
    )
    if not plan.labels:
        rescale_head(student, mean=mean, spread=spread)
    name_labels(student, plan.labels)
    student.max_seq_length = takes
    return student, learned


def _measures_of(
    model: SentenceTransformer, plan: FinetunePlan, rows: Sequence[LabelledRow]
) -> dict[str, float]:
    """How good the model's answers are."""
    inputs: list[Any] = [row.as_input() for row in rows]
    scores = model.encode(inputs, show_progress_bar=False, convert_to_numpy=True)
    right = _answers_of(rows, plan.labels)
    if not plan.labels:
        return number_measures(scores[:, 0], right)
    return class_measures(scores.argmax(axis=1).tolist(), right, len(plan.labels))


def _looked_at(options: FinetuneOptions, rows: int) -> int:
    """How many rows a validation can afford."""
    _, every = _steps_and_looks(options, -(-rows // options.batch_size))
    return min(_VALIDATION_ROWS, max(every * options.batch_size // _VALIDATION_SHARE, 2 * options.batch_size))


def _steps_and_looks(options: FinetuneOptions, epoch_steps: int) -> tuple[int | None, int]:
    """The length of the run, where it is known, and the steps between two looks."""
    steps = options.steps
    if steps is None and (options.epochs is not None or options.minutes is None):
        steps = (options.epochs or _EPOCHS) * epoch_steps
    return steps, max(1, epoch_steps if steps is None else steps // _LOOKS)


def _settings_for(options: FinetuneOptions, epoch_steps: int, seed: int) -> Any:
    """How the run goes."""
    steps, every = _steps_and_looks(options, epoch_steps)
    rises = _WARMUP_STEPS if steps is None else steps // _WARMUP_SHARE
    return TrainSettings(
        steps=steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        warmup=rises if options.warmup is None else options.warmup,
        dropout=options.dropout,
        precision=precision_for(options.precision),
        validate_every=every,
        checkpoint_every=every,
        seed=seed,
    )
