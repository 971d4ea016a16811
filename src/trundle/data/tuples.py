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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trundle.data.source import Row, Source, parse_sources, read_rows
from trundle.data.texts import checked_negatives, checked_text, negative_columns
from trundle.errors import BadInput

QUERY = ("query", "question", "anchor", "sentence1", "title")
POSITIVE = (
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
LABELS: dict[Any, bool] = {0: False, 1: True, "0": False, "1": True}


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


def read_examples(sources: str | Sequence[str]) -> Iterator[Example]:
    """Stream all examples of some sources, in order; a source that is not there is refused at once."""
    return _examples(parse_sources(sources))


def _examples(sources: Sequence[Source]) -> Iterator[Example]:
    plans: dict[tuple[str, ...], _Plan] = {}
    for source in sources:
        example = None
        for file in source.files:
            for row in read_rows(replace(source, files=(file,)), _usable):
                if row.columns not in plans:
                    plans[row.columns] = _plan(row)
                plan = plans[row.columns]
                if not plan.labelled or _label(row):
                    example = _example(row, plan, str(file))
                    yield example
        if example is None:
            raise BadInput(f"{source.files[0]} has no row with label 1; give a file that has positive pairs")


def _usable(column: str) -> bool:
    return column in QUERY or column in POSITIVE or column == "label" or bool(negative_columns([column]))


def _plan(row: Row) -> _Plan:
    query = next((column for column in QUERY if column in row.columns), None)
    positive = next((column for column in POSITIVE if column in row.columns), None)
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
        negatives=tuple(negative_columns(row.columns)),
        labelled="label" in row.columns,
    )


def _label(row: Row) -> bool:
    label = row.values["label"]
    if not isinstance(label, (int, float, str)) or label not in LABELS:
        mend = "or name the columns to use without it, as in FILE::query=COLUMN,positive=COLUMN"
        raise BadInput(f"{row.place} has the label {label!r}; a label must be 0 or 1, {mend}")
    return LABELS[label]


def _example(row: Row, plan: _Plan, source: str) -> Example:
    return Example(
        query=checked_text(row.values[plan.query], plan.query, row.place),
        positive=checked_text(row.values[plan.positive], plan.positive, row.place),
        negatives=tuple(
            text
            for column in plan.negatives
            for text in checked_negatives(row.values[column], column, row.place)
        ),
        source=source,
    )
