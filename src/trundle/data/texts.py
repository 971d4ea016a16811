"""Texts without labels: what a model is measured on and trained to imitate.

In a .txt file every line is a text. In a table the columns are found by name:

    query, question, anchor                              queries
    positive, passage, document, context, answer,        documents
      response, negative, negatives, negative_1, ...
    definition                                           definitions
    sentence1, sentence2                                 texts of no special kind
    text, sentence, content, body, abstract,             the first one found, if the table has none of the
      description, title                                   above except a query; a document if it has a query

A column `kind` (query, document, definition, or null) overrides what the names imply. Choose other columns
with `docs.parquet::text=summary` or `faq.csv::query=asked,document=reply`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, get_args

from trundle.data.files import _DataRow, _parse_sources, _read_rows
from trundle.errors import BadInput

Kind = Literal["query", "document", "definition"]

KINDS: tuple[Kind, ...] = get_args(Kind)

_IMPLIED: dict[str, Kind | None] = {
    **dict.fromkeys(("query", "question", "anchor"), "query"),
    **dict.fromkeys(("positive", "passage", "document", "context", "answer", "response"), "document"),
    "definition": "definition",
    "sentence1": None,
    "sentence2": None,
}
_PLAIN = ("text", "sentence", "content", "body", "abstract", "description", "title")

_NEGATIVE = re.compile(r"negative(s|_(?P<number>[0-9]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One text and the role whose prompt it gets; no kind means no prompt."""

    text: str
    kind: Kind | None = None


def _make_texts(texts: Sequence[str], kinds: Iterable[Kind | None]) -> list[Text]:
    """Construct many texts; calling the class, whose fields are frozen, takes several times as long."""
    fields: Any = Text
    made: list[Text] = list(map(object.__new__, repeat(fields, len(texts))))
    deque(map(fields.text.__set__, made, texts), maxlen=0)
    deque(map(fields.kind.__set__, made, kinds), maxlen=0)
    return made


def read_texts(sources: str | Sequence[str]) -> Iterator[Text]:
    """Stream all texts of one or several sources in order; a missing source is rejected at once."""
    parsed = _parse_sources(sources)
    return texts_of(row for source in parsed for row in _read_rows(source, may_hold_texts))


def checked_text(value: Any, column: str, place: str) -> str:
    """Return the value if it is a text that a tokenizer accepts; otherwise raise an error with its place."""
    if not isinstance(value, str) or not value.strip():
        empty = value is None or isinstance(value, str)
        what = "has no text" if empty else f"holds {type(value).__name__} instead of text"
        raise BadInput(f"{place} {what} in column {column!r}; fill it in or delete the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{place} holds an unpaired surrogate, \\u{ord(value[error.start]):04x}, in column {column!r}"
        fix = "clean it with text.encode('utf-8', 'replace').decode('utf-8')"
        raise BadInput(f"{what}; {fix}") from error
    return value


def _negative_columns(columns: Sequence[str]) -> list[str]:
    matches = [match for match in map(_NEGATIVE.fullmatch, columns) if match]
    return [match.string for match in sorted(matches, key=lambda match: int(match["number"] or -1))]


def _checked_negatives(value: Any, column: str, place: str) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    items = value if isinstance(value, list) else [value]
    return tuple(checked_text(item, column, place) for item in items)


def texts_of(rows: Iterable[_DataRow]) -> Iterator[Text]:
    """Yield the texts of rows that may come from several tables."""
    kinds_of: dict[tuple[str, ...], dict[str, Kind | None]] = {}
    for row in rows:
        if row.columns not in kinds_of:
            kinds_of[row.columns] = _text_columns(row)
        yield from _row_texts(row, kinds_of[row.columns])


def may_hold_texts(column: str) -> bool:
    """Return whether a column of this name is read."""
    return column in (*_IMPLIED, *_PLAIN, "kind") or _NEGATIVE.fullmatch(column) is not None


def _text_columns(row: _DataRow) -> dict[str, Kind | None]:
    found = {column: kind for column, kind in _IMPLIED.items() if column in row.columns}
    found.update(dict.fromkeys(_negative_columns(row.columns), "document"))
    if all(kind == "query" for kind in found.values()):
        plain = next((column for column in _PLAIN if column in row.columns), None)
        found.update({plain: "document" if found else None} if plain else {})
    if not found:
        what = f"has no column known to hold texts (columns: {', '.join(row.columns) or 'none'})"
        raise BadInput(f"{row.place} {what}; name the column, as in FILE::text=COLUMN")
    return found


def _row_texts(row: _DataRow, kinds: dict[str, Kind | None]) -> Iterator[Text]:
    stated = row.values.get("kind") or None
    if stated is not None and stated not in KINDS:
        fix = f"write one of {', '.join(KINDS)}, or name only the text column, as in FILE::text=COLUMN"
        raise BadInput(f"{row.place} has the kind {stated!r}; {fix}")
    for column, implied in kinds.items():
        value = row.values[column]
        if _NEGATIVE.fullmatch(column):
            texts = _checked_negatives(value, column, row.place)
        else:
            texts = (checked_text(value, column, row.place),)
        yield from (Text(text=text, kind=stated or implied) for text in texts)
