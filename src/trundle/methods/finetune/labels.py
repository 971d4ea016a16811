"""Labelled rows as batches and an objective for the one loop: learn a class, or a number, for each text or pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.nn import functional

from trundle.errors import BadInput
from trundle.model.encode import Features, check_fast_tokenizer, make_tokeniser
from trundle.train.batches import Batches, ByLength, Indices

if TYPE_CHECKING:
    from trundle.data.examples import LabelledRow

_Input = str | tuple[str, str]
_Batch = tuple[Features, Tensor]


@dataclass(frozen=True, kw_only=True)
class _HeadTask:
    """A student whose vectors are scores, and how it is fed and judged."""

    student: nn.Module
    batches: Batches[_Batch]
    validation: Batches[_Batch] | None

    def objective(self, batch: _Batch) -> Tensor:
        """Cross-entropy where answers are classes, squared error where they are numbers."""
        features, right = batch
        scores: Tensor = self.student(dict(features))["sentence_embedding"].float()
        if right.is_floating_point():
            return functional.mse_loss(scores[:, 0], right)
        return functional.cross_entropy(scores, right)


def _make_head_task(
    student: SentenceTransformer,
    inputs: Sequence[_Input],
    answers: Sequence[float],
    validation: tuple[Sequence[_Input], Sequence[float]] | None,
    *,
    classes: bool,
    batch_size: int,
    seed: int = 0,
) -> _HeadTask:
    """Put rows into batches of similar length; an answer is the number of a class, or a number to be met."""
    check_fast_tokenizer(student)
    paired = isinstance(inputs[0], tuple)
    # The short cut knows of no second segment, so pairs go the library's way.
    tokenise: Callable[[list[Any]], Features] = student.preprocess if paired else make_tokeniser(student)

    def batches(of: Sequence[_Input], right: Sequence[float]) -> Batches[_Batch]:
        lengths = [len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in of]
        targets = torch.tensor(right, dtype=torch.int64 if classes else torch.float32)

        def load(rows: Indices) -> _Batch:
            return tokenise([of[row] for row in rows]), targets[rows]

        return Batches(order=ByLength(lengths, batch_size=min(batch_size, len(of)), seed=seed), load=load)

    return _HeadTask(
        student=student,
        batches=batches(inputs, answers),
        validation=None if validation is None else batches(*validation),
    )


def _classes_of(rows: Sequence[LabelledRow], kind: str) -> tuple[str, ...]:
    """The names of the classes in order, numbers by their value; none where labels are numbers to be met."""
    if kind == "number" or (kind == "auto" and any(map(_is_fraction, rows))):
        for row in rows:
            _number_of(row)
        return ()
    names = {_name_of(row) for row in rows}
    if len(names) < 2:
        raise BadInput(f"every row has the label {min(names)!r}; give rows of at least two classes")
    if len(names) > len(rows) // 2:
        raise BadInput(
            f"{len(rows):,} rows have {len(names):,} different labels; with kind: number they are numbers to be met, "
            "as classes they are too many"
        )
    try:
        return tuple(sorted(sorted(names), key=float))
    except ValueError:
        return tuple(sorted(names))


def _is_fraction(row: LabelledRow) -> bool:
    """Whether a label is a number that is not whole, which no class is called; a .csv has it as a string."""
    try:
        number = float(row.label)
    except ValueError:
        return False
    return math.isfinite(number) and not number.is_integer()


def _name_of(row: LabelledRow) -> str:
    """A label as the name of a class; 1.0 is 1."""
    whole = isinstance(row.label, float) and row.label.is_integer()
    return str(int(row.label) if whole else row.label)


def _number_of(row: LabelledRow) -> float:
    """A label as a number; what is not finite can't be met."""
    try:
        number = float(row.label)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{row.source} has the label {row.label!r}, which is no number; use kind: classes")
    return number


def _answers_of(rows: Sequence[LabelledRow], labels: Sequence[str]) -> list[float]:
    """What is to be answered for each row: the number of its class, or its number."""
    if not labels:
        return [_number_of(row) for row in rows]
    numbers = {name: number for number, name in enumerate(labels)}
    return [numbers[_name_of(row)] for row in rows]
