"""Labelled data: tuples of a query, a positive and negatives, and texts with a class or a score.

The columns of a tuple are found by name, the first of each list that the table has:

    the query      query, question, anchor, sentence1, title
    the positive   positive, answer, passage, document, context, response, sentence2, body, text, content,
                   abstract
    the negatives  negative, negatives, negative_1, negative_2, ...: each one text, a list of texts, or null
    the label      label: 1 keeps the pair, 0 drops it

Choose other columns with `faq.csv::query=asked,positive=reply`; a column that is not named then is not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from trundle.data.sampling import _SENTENCE_END
from trundle.data.texts import (
    _PLAIN,
    Text,
    _checked_negatives,
    _DataRow,
    _negative_columns,
    _read_rows,
    checked_text,
    parse_source,
)
from trundle.errors import BadInput

_QUERY = ("query", "question", "anchor", "sentence1", "title")
_POSITIVE = (
    *("positive", "answer", "passage", "document", "context", "response", "sentence2"),
    *("body", "text", "content", "abstract"),
)
_KEEPS_PAIR: dict[Any, bool] = {0: False, 1: True, "0": False, "1": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """A query, the text it should retrieve, and texts it should not."""

    query: str
    positive: str
    negatives: tuple[str, ...] = ()
    source: str = field(default="", compare=False)
    """The file it was read from, for batches of a single source."""


def _read_examples(source: str) -> Iterator[Example]:
    columns_of: dict[tuple[str, ...], tuple[str, str, list[str]]] = {}
    parsed, example = parse_source(source), None
    for file in parsed.files:
        for row in _read_rows(replace(parsed, files=(file,)), _is_example_column):
            if row.columns not in columns_of:
                columns_of[row.columns] = _example_columns(row)
            if "label" in row.columns and not _keeps_pair(row):
                continue
            query, positive, negatives = columns_of[row.columns]
            lists = [_checked_negatives(row.values[column], column, row.place) for column in negatives]
            example = Example(
                query=checked_text(row.values[query], query, row.place),
                positive=checked_text(row.values[positive], positive, row.place),
                negatives=tuple(chain.from_iterable(lists)),
                source=str(file),
            )
            yield example
    if example is None:
        raise BadInput(f"{parsed.files[0]} has no row with label 1; pass a file that has positive pairs")


def _is_example_column(column: str) -> bool:
    return column in (*_QUERY, *_POSITIVE, "label") or bool(_negative_columns([column]))


def _example_columns(row: _DataRow) -> tuple[str, str, list[str]]:
    query, positive = _first_column(_QUERY, row), _first_column(_POSITIVE, row)
    if query is None or positive is None:
        found = {"query": query, "positive": positive}
        raise _missing_columns(row, found, "FILE::query=COLUMN,positive=COLUMN")
    return query, positive, _negative_columns(row.columns)


def _first_column(names: Sequence[str], row: _DataRow) -> str | None:
    return next((column for column in names if column in row.columns), None)


def _missing_columns(row: _DataRow, found: Mapping[str, object], example: str) -> BadInput:
    missing = " or ".join(role for role, column in found.items() if column is None)
    what = f"has no column known as the {missing} (columns: {', '.join(row.columns) or 'none'})"
    return BadInput(f"{row.place} {what}; name the columns, as in {example}")


def _keeps_pair(row: _DataRow) -> bool:
    label = row.values["label"]
    if not isinstance(label, (int, float, str)) or label not in _KEEPS_PAIR:
        fix = "write 0 or 1, or name the other columns, as in FILE::query=COLUMN,positive=COLUMN"
        raise BadInput(f"{row.place} has the label {label!r}; {fix}")
    return _KEEPS_PAIR[label]


_PAIR = ("sentence1", "sentence2")
_LABEL = ("label", "score")

_Label = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledRow:
    """One text, or a pair of texts, and its label."""

    texts: tuple[str, ...]
    label: _Label
    source: str = field(default="", compare=False)

    def as_input(self) -> str | tuple[str, str]:
        """Return what a model encodes: a text, or a pair."""
        return self.texts[0] if len(self.texts) == 1 else (self.texts[0], self.texts[1])


def _read_labelled(source: str) -> Iterator[LabelledRow]:
    columns_of: dict[tuple[str, ...], tuple[tuple[str, ...], str]] = {}
    for row in _read_rows(parse_source(source), lambda column: column in (*_PLAIN, *_PAIR, *_LABEL)):
        if row.columns not in columns_of:
            columns_of[row.columns] = _label_columns(row)
        texts, label = columns_of[row.columns]
        yield LabelledRow(
            texts=tuple(checked_text(row.values[column], column, row.place) for column in texts),
            label=_checked_label(row.values[label], label, row.place),
            source=row.place,
        )


def _label_columns(row: _DataRow) -> tuple[tuple[str, ...], str]:
    label, plain = _first_column(_LABEL, row), _first_column(_PLAIN, row)
    texts = _PAIR if set(_PAIR) <= set(row.columns) else (plain,) if plain else None
    if label is None or texts is None:
        example = "FILE::text=COLUMN,label=COLUMN or FILE::sentence1=COLUMN,sentence2=COLUMN,label=COLUMN"
        raise _missing_columns(row, {"text": texts, "label": label}, example)
    return texts, label


def _checked_label(value: Any, column: str, place: str) -> _Label:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and value.strip():
        return value.strip()
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    what = "no label" if value is None or value == "" else f"{value!r} as its label"
    raise BadInput(f"{place} has {what} in column {column!r}; write a word or a number, or delete the row")


_TITLE_BODY, _NEIGHBOURS, DROPOUT = "title and body", "neighbouring passages", "dropout views"
_TITLE_WORDS = 20
_FEWEST_WORDS = 4
"""A passage with fewer words is not used."""
_FIRST_LINE = re.compile(r"\s*(?P<title>[^\n]+)\n+(?P<body>.+)", re.DOTALL)


def pairs_from_texts(
    texts: Iterable[Text], *, allowed: Callable[[str], bool] = lambda _text: True
) -> Iterator[Example]:
    """Yield one pair per text if its pieces are `allowed`; its source says how it was made."""
    for text in texts:
        pair = _pair_from_text(text.text)
        if allowed(pair.query) and allowed(pair.positive):
            yield pair


def _pair_from_text(text: str) -> Example:
    lines = _FIRST_LINE.fullmatch(text)
    if lines and len(lines["title"].split()) <= _TITLE_WORDS and len(lines["body"].split()) >= _FEWEST_WORDS:
        return Example(query=lines["title"].strip(), positive=lines["body"].strip(), source=_TITLE_BODY)
    if ends := [match.span() for match in _SENTENCE_END.finditer(text)]:
        end, start = min(ends, key=lambda span: abs(span[0] - len(text) / 2))
        halves = text[:end].strip(), text[start:].strip()
        if all(len(half.split()) >= _FEWEST_WORDS for half in halves):
            return Example(query=halves[0], positive=halves[1], source=_NEIGHBOURS)
    return Example(query=text, positive=text, source=DROPOUT)
