"""Examples with labels: a query, a text that answers it, and texts that do not.

The columns are found by name, the first of each list that the table has:

    the query      query, question, anchor, sentence1, title
    the positive   positive, answer, passage, document, context, response, sentence2, body, text, content,
                   abstract
    the negatives  negative, negatives, negative_1, negative_2, ...: each one text, a list of texts, or null
    the label      label: 1 keeps the pair, 0 leaves it out

or said: `faq.csv::query=asked,positive=reply`. A column that is not named then is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trundle.data.augment import _SENTENCE_END
from trundle.data.files import _parse_sources, _read_rows, _Row, _Source
from trundle.data.texts import _PLAIN, Text, _checked_negatives, _negative_columns, checked_text
from trundle.errors import BadInput

_QUERY = ("query", "question", "anchor", "sentence1", "title")
_POSITIVE = (
    "positive",
    "answer",
    "passage",
    "document",
    "context",
    "response",
    "sentence2",
    "body",
    "text",
    "content",
    "abstract",
)
_LABELS: dict[Any, bool] = {0: False, 1: True, "0": False, "1": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A query, the text it should find, and texts it should not."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    """The file it was read from: what a batch of one source is drawn by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Which columns of a table play which part."""

    query: str
    positive: str
    negatives: tuple[str, ...]
    labelled: bool


def _read_examples(sources: str | Sequence[str]) -> Iterator[Example]:
    """Stream all examples of some sources, in order; a source that is not there is refused at once."""
    return _examples(_parse_sources(sources))


def _examples(sources: Sequence[_Source]) -> Iterator[Example]:
    plans: dict[tuple[str, ...], _Plan] = {}
    for source in sources:
        example = None
        for file in source.files:
            for row in _read_rows(replace(source, files=(file,)), _usable_example):
                if row.columns not in plans:
                    plans[row.columns] = _example_columns(row)
                plan = plans[row.columns]
                if not plan.labelled or _label(row):
                    example = _example(row, plan, str(file))
                    yield example
        if example is None:
            raise BadInput(f"{source.files[0]} has no row with label 1; give a file that has positive pairs")


def _usable_example(column: str) -> bool:
    return column in _QUERY or column in _POSITIVE or column == "label" or bool(_negative_columns([column]))


def _example_columns(row: _Row) -> _Plan:
    query = next((column for column in _QUERY if column in row.columns), None)
    positive = next((column for column in _POSITIVE if column in row.columns), None)
    if query is None or positive is None:
        missing = " or ".join(
            part for part, column in (("query", query), ("positive", positive)) if column is None
        )
        there = ", ".join(row.columns) or "none"
        mend = "say which column is which, as in FILE::query=COLUMN,positive=COLUMN"
        raise BadInput(f"{row.place} has no column known as the {missing} (columns: {there}); {mend}")
    return _Plan(
        query=query,
        positive=positive,
        negatives=tuple(_negative_columns(row.columns)),
        labelled="label" in row.columns,
    )


def _label(row: _Row) -> bool:
    label = row.values["label"]
    if not isinstance(label, (int, float, str)) or label not in _LABELS:
        mend = "or name the columns to use without it, as in FILE::query=COLUMN,positive=COLUMN"
        raise BadInput(f"{row.place} has the label {label!r}; a label must be 0 or 1, {mend}")
    return _LABELS[label]


def _example(row: _Row, plan: _Plan, source: str) -> Example:
    return Example(
        query=checked_text(row.values[plan.query], plan.query, row.place),
        positive=checked_text(row.values[plan.positive], plan.positive, row.place),
        negatives=tuple(
            text
            for column in plan.negatives
            for text in _checked_negatives(row.values[column], column, row.place)
        ),
        source=source,
    )


_PAIR = ("sentence1", "sentence2")
_LABEL = ("label", "score")

_Label = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRow:
    """One text, or two that are read together, and the right answer."""

    texts: tuple[str, ...]
    label: _Label
    source: str = field(default="", compare=False)

    def as_input(self) -> str | tuple[str, str]:
        """What a model is given: a text, or a pair."""
        return self.texts[0] if len(self.texts) == 1 else (self.texts[0], self.texts[1])


def _read_labelled(sources: str | Sequence[str]) -> Iterator[LabelledRow]:
    """Stream all labelled rows of some sources, in order; a source that is not there is refused at once."""
    return _labelled(_parse_sources(sources))


def _labelled(sources: Sequence[_Source]) -> Iterator[LabelledRow]:
    plans: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    for source in sources:
        for row in _read_rows(source, _usable_row):
            if row.columns not in plans:
                plans[row.columns] = _label_columns(row)
            texts, label = plans[row.columns]
            yield LabelledRow(
                texts=tuple(checked_text(row.values[column], column, row.place) for column in texts),
                label=_checked_label(row.values[label], label, row.place),
                source=row.place,
            )


def _usable_row(column: str) -> bool:
    return column in _PLAIN or column in _PAIR or column in _LABEL


def _label_columns(row: _Row) -> tuple[tuple[str, ...], str]:
    """Which columns hold the texts, and which the label."""
    label = next((column for column in _LABEL if column in row.columns), None)
    plain = next(((column,) for column in _PLAIN if column in row.columns), None)
    texts = _PAIR if set(_PAIR) <= set(row.columns) else plain
    if label is None or texts is None:
        missing = " or ".join(part for part, found in (("text", texts), ("label", label)) if found is None)
        there = ", ".join(row.columns) or "none"
        raise BadInput(
            f"{row.place} has no column known as the {missing} (columns: {there}); say which column is which, as in "
            "FILE::text=COLUMN,label=COLUMN or FILE::sentence1=COLUMN,sentence2=COLUMN,label=COLUMN"
        )
    return texts, label


def _checked_label(value: Any, column: str, place: str) -> _Label:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = "no label" if value is None or value == "" else f"{value!r} as its label"
    raise BadInput(f"{place} has {what} in column {column!r}; give a word or a number, or delete the row")


_TITLE_BODY, _NEIGHBOURS, DROPOUT = "title and body", "neighbouring passages", "dropout views"
_TITLE_WORDS = 20
_FEWEST_WORDS = 4
"""Words a passage must have to say something."""
_FIRST_LINE = re.compile(r"\s*(?P<title>[^\n]+)\n+(?P<body>.+)", re.DOTALL)


def pairs_from_texts(
    texts: Iterable[Text], *, allowed: Callable[[str], bool] = lambda _text: True
) -> Iterator[Example]:
    """One pair a text; its source says how it was made. A pair with a piece that is not allowed is left out."""
    for text in texts:
        pair = _pair_from_text(text.text)
        if allowed(pair.query) and allowed(pair.positive):
            yield pair


def _pair_from_text(text: str) -> Example:
    """The first way that the text allows."""
    lines = _FIRST_LINE.fullmatch(text)
    if lines and len(lines["title"].split()) <= _TITLE_WORDS and len(lines["body"].split()) >= _FEWEST_WORDS:
        return Example(query=lines["title"].strip(), positive=lines["body"].strip(), source=_TITLE_BODY)
    halves = _halves(text)
    if halves is not None:
        return Example(query=halves[0], positive=halves[1], source=_NEIGHBOURS)
    return Example(query=text, positive=text, source=DROPOUT)


def _halves(text: str) -> tuple[str, str] | None:
    """A text cut at the sentence end nearest its middle; None where a half would be too short."""
    ends = [match.span() for match in _SENTENCE_END.finditer(text)]
    if not ends:
        return None
    end, start = min(ends, key=lambda span: abs(span[0] - len(text) / 2))
    halves = text[:end].strip(), text[start:].strip()
    return halves if all(len(half.split()) >= _FEWEST_WORDS for half in halves) else None
