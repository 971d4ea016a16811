"""Texts with the answer a classifier should give: one text or a pair of them, and a label.

The columns are found by name:

    the text    text, sentence, content, body, abstract, description, title: the first there is
    a pair      sentence1 and sentence2, where the table has both
    the label   label, or else score

or said: `mnli.csv::sentence1=premise,sentence2=hypothesis,label=gold`. A label is a word, a number or a truth value;
what a number means is for the reader to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from trundle.data.source import Row, Source, parse_sources, read_rows
from trundle.data.texts import PLAIN, checked_text
from trundle.errors import BadInput

PAIR = ("sentence1", "sentence2")
LABEL = ("label", "score")

Label = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRow:
    """One text, or two that are read together, and the right answer."""

    texts: tuple[str, ...]
    label: Label
    source: str = field(default="", compare=False)

    def as_input(self) -> str | tuple[str, str]:
        """What a model is given: a text, or a pair."""
        return self.texts[0] if len(self.texts) == 1 else (self.texts[0], self.texts[1])


def read_labelled(sources: str | Sequence[str]) -> Iterator[LabelledRow]:
    """Stream all labelled rows of some sources, in order; a source that is not there is refused at once."""
    return _labelled(parse_sources(sources))


def _labelled(sources: Sequence[Source]) -> Iterator[LabelledRow]:
    plans: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    for source in sources:
        for row in read_rows(source, _usable):
            if row.columns not in plans:
                plans[row.columns] = _plan(row)
            texts, label = plans[row.columns]
            yield LabelledRow(
                texts=tuple(checked_text(row.values[column], column, row.place) for column in texts),
                label=_checked_label(row.values[label], label, row.place),
                source=row.place,
            )


def _usable(column: str) -> bool:
    return column in PLAIN or column in PAIR or column in LABEL


def _plan(row: Row) -> tuple[tuple[str, ...], str]:
    """Which columns hold the texts, and which the label."""
    label = next((column for column in LABEL if column in row.columns), None)
    plain = next(((column,) for column in PLAIN if column in row.columns), None)
    texts = PAIR if set(PAIR) <= set(row.columns) else plain
    if label is None or texts is None:
        missing = " or ".join(part for part, found in (("text", texts), ("label", label)) if found is None)
        there = ", ".join(row.columns) or "none"
        raise BadInput(
            f"{row.place} has no column known as the {missing} (columns: {there}); say which column is which, as in "
            "FILE::text=COLUMN,label=COLUMN or FILE::sentence1=COLUMN,sentence2=COLUMN,label=COLUMN"
        )
    return texts, label


def _checked_label(value: Any, column: str, place: str) -> Label:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = "no label" if value is None or value == "" else f"{value!r} as its label"
    raise BadInput(f"{place} has {what} in column {column!r}; give a word or a number, or delete the row")
