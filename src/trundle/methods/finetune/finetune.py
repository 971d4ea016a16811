"""Plans and applies `finetune`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense
from torch import Tensor, nn
from torch.nn import functional

from trundle.data.corpus import Part
from trundle.data.examples import LabelledRow
from trundle.data.sampling import fingerprint, sample
from trundle.embedder import LONGEST
from trundle.errors import BadInput
from trundle.evaluate.metrics import answer_measures
from trundle.methods.contract import Applied, Context
from trundle.methods.finetune import _EPOCHS, _FinetuneOptions, _FinetunePlan
from trundle.methods.training import NOT_VALIDATED, VALIDATIONS, Trained, run_training, validation_size
from trundle.model.cost import Cost, predict
from trundle.model.heads import copy_of, with_new_head, without_head
from trundle.model.save import model_digest
from trundle.model.surgery import transformer_of
from trundle.model.tokens import Features, check_fast_tokenizer, make_tokeniser
from trundle.train.batches import Batches, ByLength, Indices
from trundle.train.loop import TrainingTask, TrainSettings
from trundle.train.trainer import linear, precision_for

_PARTS: tuple[Part, ...] = ("train", "validation", "held_out")
_WARMUP_SHARE, _WARMUP_STEPS = 10, 100
"""The warm-up takes a tenth of a run, or this many steps if its length is not known."""

_Input = str | tuple[str, str]
_Batch = tuple[Features, Tensor]


def plan(model: SentenceTransformer, options: _FinetuneOptions, context: Context) -> _FinetunePlan:
    """Checks the model, the options and all labels."""
    assert context.corpus is not None
    limit = model.max_seq_length or LONGEST
    if options.max_length is not None and options.max_length > limit:
        raise BadInput(f"the model takes at most {limit} tokens; pass a max_length up to that")
    transformer_of(model)
    rows = {part: list(context.corpus.labelled(part)) for part in _PARTS}
    if len(rows["train"]) < 2:
        raise BadInput("there are fewer than two labelled rows; pass a file with a text and a label")
    everything = [row for part in _PARTS for row in rows[part]]
    widths = {len(row.texts) for row in everything}
    if len(widths) > 1:
        raise BadInput("some rows are single texts and some are pairs; train on one kind at a time")
    return _FinetunePlan(
        options=options,
        labels=_classes_of(everything, options.kind),
        pairs=widths == {2},
        inputs=without_head(model).get_embedding_dimension() or 0,
        max_length=options.max_length or min(limit, LONGEST),
    )


def forecast(model: SentenceTransformer, plan: _FinetunePlan) -> Cost:
    """Returns the cost of the model with its head."""
    return predict(model, dense=(plan.inputs, plan.outputs))


def apply(model: SentenceTransformer, plan: _FinetunePlan, context: Context) -> Applied:
    """Trains, and measures on the held-out rows."""
    assert context.corpus is not None
    options = plan.options
    rows = list(context.corpus.labelled("train"))
    rows = sample(rows, options.rows, seed=context.seed) if options.rows else rows
    _, every = _steps_and_interval(options, -(-len(rows) // options.batch_size))
    most = validation_size(every, options.batch_size)
    validation = sample(context.corpus.labelled("validation"), most, seed=context.seed)
    if not validation:
        context.progress.say(NOT_VALIDATED.format("rows"))
    student, trained = _trained(model, plan, rows, validation, context)
    student = student.to(next(model.parameters()).dtype)
    facts: dict[str, Any] = {"rows": len(rows), "validation_rows": len(validation), **trained.facts}
    held_out = list(context.corpus.labelled("held_out"))
    scores = {}
    if held_out:
        found = _measures_of(student, plan, held_out)
        facts |= {"held_out_rows": len(held_out)} | found
        scores = {f"{name} on {len(held_out):,} held-out rows": value for name, value in found.items()}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        context.progress.say(f"finetune: on {len(held_out):,} held-out rows {shown}")
    return Applied(
        model=student, facts=facts, scores=scores, use=_usage(plan), done=trained.done, files=trained.files
    )


def _usage(plan: _FinetunePlan) -> str:
    given = '[("a text", "another text")]' if plan.pairs else '["a text", "another text"]'
    if not plan.labels:
        return f"answers = model.encode({given})[:, 0]"
    return (
        f"scores = model.encode({given})\n"
        "answers = [model[0].auto_model.config.id2label[best] for best in scores.argmax(axis=1)]"
    )


def _trained(
    model: SentenceTransformer,
    plan: _FinetunePlan,
    rows: Sequence[LabelledRow],
    validation: Sequence[LabelledRow],
    context: Context,
) -> tuple[SentenceTransformer, Trained]:
    """Adds the head and trains; numbers are standardised in training, and the head is rescaled afterwards.

    The names of the classes are written into the config.
    """
    options = plan.options
    student = with_new_head(copy_of(model).float(), plan.outputs, normalise=False, seed=context.seed)
    student.prompts, student.default_prompt_name = {}, None
    original_length, student.max_seq_length = student.max_seq_length, plan.max_length
    answers = _answers_of(rows, plan.labels)
    mean, spread = (0.0, 1.0) if plan.labels else (fmean(answers), pstdev(answers) or 1.0)

    def labelled(of: Sequence[LabelledRow]) -> tuple[list[_Input], list[float]]:
        right = _answers_of(of, plan.labels)
        scaled = right if plan.labels else [(number - mean) / spread for number in right]
        return [row.as_input() for row in of], scaled

    task = _make_head_task(
        student,
        labelled(rows),
        labelled(validation) if validation else None,
        classes=bool(plan.labels),
        batch_size=options.batch_size,
        seed=context.seed,
    )
    trained = run_training(
        student,
        task,
        _settings_for(options, task.batches.order.per_epoch, context.seed),
        key=[
            plan.model_dump(mode="json"),
            model_digest(model),
            fingerprint([*rows, "validation", *validation]),
        ],
        schedule=linear(),
        context=context,
        keep_zeros=options.keep_zeros,
    )
    if not plan.labels:
        dense = student[-1]
        assert isinstance(dense, Dense)
        with torch.no_grad():
            dense.linear.weight.mul_(spread)
            dense.linear.bias.mul_(spread).add_(mean)
    config = transformer_of(student).model.config
    config.id2label = dict(enumerate(plan.labels)) or {0: "LABEL_0"}
    config.label2id = {name: number for number, name in config.id2label.items()}
    config.problem_type = "single_label_classification" if plan.labels else "regression"
    student.max_seq_length = original_length
    return student, trained


def _make_head_task(
    student: SentenceTransformer,
    rows: tuple[Sequence[_Input], Sequence[float]],
    validation: tuple[Sequence[_Input], Sequence[float]] | None,
    *,
    classes: bool,
    batch_size: int,
    seed: int = 0,
) -> TrainingTask[_Batch]:
    """Makes batches of inputs of similar length with their answers: class numbers, or numbers to predict."""
    check_fast_tokenizer(student)
    paired = isinstance(rows[0][0], tuple)
    # The fast tokenisation has no second segment, so the library tokenises pairs.
    tokenise: Callable[[list[Any]], Features] = student.preprocess if paired else make_tokeniser(student)

    def batches(inputs: Sequence[_Input], answers: Sequence[float]) -> Batches[_Batch]:
        lengths = [len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in inputs]
        targets = torch.tensor(answers, dtype=torch.int64 if classes else torch.float32)

        def load(indices: Indices) -> _Batch:
            return tokenise([inputs[index] for index in indices]), targets[indices]

        return Batches(order=ByLength(lengths, batch_size=min(batch_size, len(inputs)), seed=seed), load=load)

    return TrainingTask(
        name="finetune",
        losses=(_head_loss,),
        batches=batches(*rows),
        validation=None if validation is None else batches(*validation),
    )


def _head_loss(model: nn.Module, batch: _Batch) -> Tensor:
    """Cross-entropy for classes, squared error for numbers."""
    features, answers = batch
    scores: Tensor = model(dict(features))["sentence_embedding"].float()
    if answers.is_floating_point():
        return functional.mse_loss(scores[:, 0], answers)
    return functional.cross_entropy(scores, answers)


def _measures_of(
    model: SentenceTransformer, plan: _FinetunePlan, rows: Sequence[LabelledRow]
) -> dict[str, float]:
    inputs: list[Any] = [row.as_input() for row in rows]
    scores = model.encode(inputs, show_progress_bar=False, convert_to_numpy=True)
    right = _answers_of(rows, plan.labels)
    return answer_measures(scores, right, len(plan.labels))


def _steps_and_interval(options: _FinetuneOptions, epoch_steps: int) -> tuple[int | None, int]:
    """The length of the run, if it is known, and the steps between two validations."""
    steps = options.steps
    if steps is None and (options.epochs is not None or options.minutes is None):
        steps = (options.epochs or _EPOCHS) * epoch_steps
    return steps, max(1, epoch_steps if steps is None else steps // VALIDATIONS)


def _settings_for(options: _FinetuneOptions, epoch_steps: int, seed: int) -> TrainSettings:
    steps, every = _steps_and_interval(options, epoch_steps)
    warmup = _WARMUP_STEPS if steps is None else steps // _WARMUP_SHARE
    return TrainSettings(
        steps=steps,
        minutes=options.minutes,
        learning_rate=options.learning_rate,
        warmup=warmup if options.warmup is None else options.warmup,
        dropout=options.dropout,
        precision=precision_for(options.precision),
        validate_every=every,
        seed=seed,
    )


def _classes_of(rows: Sequence[LabelledRow], kind: str) -> tuple[str, ...]:
    """The sorted names of the classes, by value if they are numbers; empty if labels are to be predicted."""
    numbers = [_as_number(row) for row in rows]
    # A number with decimals is not the name of a class.
    has_decimals = any(math.isfinite(number) and not number.is_integer() for number in numbers)
    if kind == "number" or (kind == "auto" and has_decimals):
        for row, number in zip(rows, numbers, strict=True):
            if not math.isfinite(number):
                raise BadInput(f"{row.source} has the label {row.label!r}, not a number; use kind: classes")
        return ()
    names = {_name_of(row) for row in rows}
    if len(names) < 2:
        raise BadInput(f"every row has the label {min(names)!r}; pass rows of at least two classes")
    if len(names) > len(rows) // 2:
        count = f"{len(names):,} different labels of {len(rows):,} rows"
        raise BadInput(f"{count} are too many for classes; use kind: number if they are numbers")
    try:
        return tuple(sorted(sorted(names), key=float))
    except ValueError:
        return tuple(sorted(names))


def _as_number(row: LabelledRow) -> float:
    try:
        return float(row.label)  # a .csv has it as a string
    except ValueError:
        return math.nan


def _name_of(row: LabelledRow) -> str:
    """The label as the name of a class; 1.0 is 1."""
    is_integer = isinstance(row.label, float) and row.label.is_integer()
    return str(int(row.label) if is_integer else row.label)


def _answers_of(rows: Sequence[LabelledRow], labels: Sequence[str]) -> list[float]:
    """The correct answer for each row: the number of its class, or its number."""
    if not labels:
        return [_as_number(row) for row in rows]
    numbers = {name: number for number, name in enumerate(labels)}
    return [numbers[_name_of(row)] for row in rows]
