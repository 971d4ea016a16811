"""finetune: train a model and a head on labelled texts or pairs, so that it names a class or gives a number.

The head is one linear layer on the pooled vectors, kept in the folder as a Dense module. What the model then gives
for a text is no vector to search with but a score for each class, whose names are in the backbone's config
(`id2label`), or one number. Two texts are read together, as one input. Everything is trained.

    - vocabulary: {parameters: 80%, oov: cluster}
    - finetune: {epochs: 3}

Paper: Words That Matter: Vocabulary Pruning in ModernBERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

import trundle.data as data
import trundle.evaluate as judging
import trundle.measure as measure
import trundle.model as body
import trundle.train as train
from trundle.errors import BadInput
from trundle.model.limits import LONGEST
from trundle.processes import process_count
from trundle.steps.contract import Applied, Context, Options, Plan, Step
from trundle.steps.label_reading import answers_of, classes_of
from trundle.steps.learning import NOT_VALIDATED, Learned, learn

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import LabelledRow
    from trundle.data.corpus import Part
    from trundle.measure import Cost

PARTS: tuple[Part, ...] = ("train", "validation", "held_out")
EPOCHS = 3
LOOKS = 10
"""How often a run of known length is validated."""
VALIDATION_ROWS, VALIDATION_SHARE = 2048, 4
"""At most so many rows are looked at, and in a short run no more than this part of the training before a look."""
WARMUP_SHARE, WARMUP_STEPS = 10, 100
"""The learning rate rises for a tenth of a run, or for so many steps where its length is not known."""


class FinetuneOptions(Options):
    """From which rows, to which answers, and how."""

    kind: Literal["auto", "classes", "number"] = Field(
        "auto", description="What a label is; auto: a number where some label is a fraction, else a class."
    )
    epochs: int | None = Field(
        None, ge=1, description=f"How often each row is seen. Default: {EPOCHS}, or what minutes allow."
    )
    steps: int | None = Field(None, ge=1, description="Optimizer steps, instead of epochs.")
    minutes: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Train for this long; with epochs or steps, whichever is reached first.",
    )
    rows: int | None = Field(None, ge=2, description="Use at most this many of the training rows.")
    batch_size: int = Field(32, ge=1, description="Rows per step.")
    learning_rate: float = Field(
        5e-5, gt=0, allow_inf_nan=False, description="The highest learning rate; it falls to zero."
    )
    warmup: int | None = Field(
        None, ge=0, description="Steps in which the learning rate rises. Default: a tenth of the run."
    )
    max_length: int | None = Field(
        None, ge=2, description=f"Tokens after which a text is cut in training. Default: up to {LONGEST}."
    )
    dropout: bool = Field(True, description="Train with the model's own dropout.")
    keep_zeros: bool | None = Field(
        None,
        description="Leave weights that are exactly zero as they are. Default: where many are, as after pruning.",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto: bf16 where the machine multiplies it (GPUs, AMX), fp32 elsewhere."
    )


class FinetunePlan(Plan):
    """What will be answered, and how it is learned."""

    options: FinetuneOptions
    labels: tuple[str, ...]
    """The names of the classes; none where the answer is a number."""
    pairs: bool
    inputs: int
    max_length: int

    @property
    def outputs(self) -> int:
        """How many scores there are."""
        return len(self.labels) or 1

    def __str__(self) -> str:
        asked = self.options
        what = f"one of {len(self.labels)} classes" if self.labels else "a number"
        times = [f"{asked.minutes:g} minutes"] if asked.minutes is not None else []
        if asked.steps is not None:
            times.insert(0, f"{asked.steps} steps")
        elif asked.epochs is not None or not times:
            times.insert(0, f"{asked.epochs or EPOCHS} epochs")
        return (
            f"{what} for each {'pair of texts' if self.pairs else 'text'}, training for {' or '.join(times)}"
        )


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
    body.transformer_of(model)
    rows = {part: list(context.corpus.labelled(part)) for part in PARTS}
    if len(rows["train"]) < 2:
        raise BadInput("there are not two labelled rows to train on; give a file with a text and a label")
    everything = [row for part in PARTS for row in rows[part]]
    widths = {len(row.texts) for row in everything}
    if len(widths) > 1:
        raise BadInput("some rows are single texts and some are pairs; train on one kind at a time")
    return FinetunePlan(
        options=options,
        labels=classes_of(everything, options.kind),
        pairs=widths == {2},
        inputs=body.without_head(model).get_embedding_dimension() or 0,
        max_length=options.max_length or min(takes, LONGEST),
    )


def forecast(model: SentenceTransformer, plan: FinetunePlan) -> Cost:
    """The model with its head in place."""
    return measure.predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: FinetunePlan, context: Context) -> Applied:
    """Train, and measure on the rows that are held out."""
    assert context.corpus is not None
    options = plan.options
    rows = list(context.corpus.labelled("train"))
    rows = data.sample(rows, options.rows, seed=context.seed) if options.rows else rows
    affordable = looked_at(options, len(rows))
    validation = data.sample(context.corpus.labelled("validation"), affordable, seed=context.seed)
    if not validation:
        context.progress.say(NOT_VALIDATED.format("rows"))
    student, learned = trained(model, plan, rows, validation, context)
    student = student.to(next(model.parameters()).dtype)
    facts: dict[str, Any] = {
        "rows": len(rows),
        "validation_rows": len(validation),
        **learned.facts,
    }
    held_out = list(context.corpus.labelled("held_out"))
    scores = {}
    if held_out:
        found = measures_of(student, plan, held_out)
        facts |= {"held_out_rows": len(held_out)} | found
        scores = {f"{name} on {len(held_out):,} held-out rows": value for name, value in found.items()}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        context.progress.say(f"finetune: on {len(held_out):,} held-out rows {shown}")
    return Applied(
        model=student,
        facts=facts,
        scores=scores,
        use=how_to_ask(plan),
        done=learned.done,
        files=learned.files,
    )


def how_to_ask(plan: FinetunePlan) -> str:
    """The lines that get an answer, for the card."""
    given = '[("a text", "another text")]' if plan.pairs else '["a text", "another text"]'
    if not plan.labels:
        return f"answers = model.encode({given})[:, 0]"
    return (
        f"scores = model.encode({given})\n"
        "answers = [model[0].auto_model.config.id2label[best] for best in scores.argmax(axis=1)]"
    )


def trained(
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
    student = body.with_new_head(
        body.copy_of(model).float(), plan.outputs, normalise=False, seed=context.seed
    )
    student.prompts, student.default_prompt_name = {}, None
    takes, student.max_seq_length = student.max_seq_length, plan.max_length
    answers = answers_of(rows, plan.labels)
    mean, spread = (0.0, 1.0) if plan.labels else (fmean(answers), pstdev(answers) or 1.0)

    def scaled(of: Sequence[LabelledRow]) -> list[float]:
        right = answers_of(of, plan.labels)
        return right if plan.labels else [(number - mean) / spread for number in right]

    task = train.make_head_task(
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
        settings_for(options, task.batches.order.per_epoch, context.seed),
        label="finetune",
        key=[
            plan.model_dump(mode="json"),
            body.model_digest(model),
            data.fingerprint([*rows, "validation", *validation]),
        ],
        shape=train.linear(),
        context=context,
        keep_zeros=options.keep_zeros,
    )
    if not plan.labels:
        body.rescale_head(student, mean=mean, spread=spread)
    body.name_labels(student, plan.labels)
    student.max_seq_length = takes
    return student, learned


def measures_of(
    model: SentenceTransformer, plan: FinetunePlan, rows: Sequence[LabelledRow]
) -> dict[str, float]:
    """How good the model's answers are."""
    inputs: list[Any] = [row.as_input() for row in rows]
    scores = model.encode(inputs, show_progress_bar=False, convert_to_numpy=True)
    right = answers_of(rows, plan.labels)
    if not plan.labels:
        return judging.number_measures(scores[:, 0], right)
    return judging.class_measures(scores.argmax(axis=1).tolist(), right, len(plan.labels))


def looked_at(options: FinetuneOptions, rows: int) -> int:
    """How many rows a validation can afford."""
    _, every = steps_and_looks(options, -(-rows // options.batch_size))
    return min(VALIDATION_ROWS, max(every * options.batch_size // VALIDATION_SHARE, 2 * options.batch_size))


def steps_and_looks(options: FinetuneOptions, epoch_steps: int) -> tuple[int | None, int]:
    """The length of the run, where it is known, and the steps between two looks."""
    steps = options.steps
    if steps is None and (options.epochs is not None or options.minutes is None):
        steps = (options.epochs or EPOCHS) * epoch_steps
    return steps, max(1, epoch_steps if steps is None else steps // LOOKS)


def settings_for(options: FinetuneOptions, epoch_steps: int, seed: int) -> Any:
    """How the run goes."""
    steps, every = steps_and_looks(options, epoch_steps)
    rises = WARMUP_STEPS if steps is None else steps // WARMUP_SHARE
    return train.TrainSettings(
        steps=steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        warmup=rises if options.warmup is None else options.warmup,
        dropout=options.dropout,
        precision=train.precision_for(options.precision),
        validate_every=every,
        checkpoint_every=every,
        seed=seed,
    )


STEP = Step(
    name="finetune",
    help="Train the model and a head on labelled texts or pairs: classes, or a number.",
    options=FinetuneOptions,
    plans=FinetunePlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    needs_texts=True,
    gives_vectors=False,
)
