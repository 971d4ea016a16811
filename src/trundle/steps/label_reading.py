"""What the labels of some rows mean: classes with names, or numbers to be met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trundle.errors import BadInput

if TYPE_CHECKING:
    from trundle.data import LabelledRow


def classes_of(rows: Sequence[LabelledRow], kind: str) -> tuple[str, ...]:
    """The names of the classes in order, numbers by their value; none where labels are numbers to be met."""
    if kind == "number" or (kind == "auto" and any(map(_is_fraction, rows))):
        for row in rows:
            number_of(row)
        return ()
    names = {name_of(row) for row in rows}
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


def name_of(row: LabelledRow) -> str:
    """A label as the name of a class; 1.0 is 1."""
    whole = isinstance(row.label, float) and row.label.is_integer()
    return str(int(row.label) if whole else row.label)


def number_of(row: LabelledRow) -> float:
    """A label as a number; what is not finite can't be met."""
    try:
        number = float(row.label)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise BadInput(f"{row.source} has the label {row.label!r}, which is no number; use kind: classes")
    return number


def answers_of(rows: Sequence[LabelledRow], labels: Sequence[str]) -> list[float]:
    """What is to be answered for each row: the number of its class, or its number."""
    if not labels:
        return [number_of(row) for row in rows]
    numbers = {name: number for number, name in enumerate(labels)}
    return [numbers[name_of(row)] for row in rows]
