"""Texts without labels: what a model is measured on and what it learns to imitate.

In a .txt file every line is a text. In a table the columns are found by name:

    query, question, anchor                              queries
    positive, passage, document, context, answer,        documents
      response, negative, negatives, negative_1, ...
    definition                                           definitions
    sentence1, sentence2                                 texts of no special kind
    text, sentence, content, body, abstract,             the first there is, if the table has none of the above
      description, title                                   but a query; a document where it has one

A column `kind` (query, document, definition, or null) overrides what the names imply. When the names say
something else, say which is which: `docs.parquet::text=summary`, `faq.csv::query=asked,document=reply`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trundle.data.files import _parse_sources, _read_rows, _Row, _Source
from trundle.errors import BadInput

Kind = Literal["query", "document", "definition"]

KINDS: tuple[Kind, ...] = get_args(Kind)

_IMPLIED: dict[str, Kind | None] = {
    "query": "query",
    "question": "query",
    "anchor": "query",
    "positive": "document",
    "passage": "document",
    "document": "document",
    "context": "document",
    "answer": "document",
    "response": "document",
    "definition": "definition",
    "sentence1": None,
    "sentence2": None,
}
_PLAIN = ("text", "sentence", "content", "body", "abstract", "description", "title")

_NEGATIVE = re.compile(r"negative(s|_(?P<number>[0-9]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One text, and the role its model should prompt it for; no kind means no prompt."""

    text: str
    kind: Kind | None = None


def read_texts(sources: str | Sequence[str]) -> Iterator[Text]:
    """Stream all texts of some sources, in order; a source that is not there is refused at once."""
    return _texts(_parse_sources(sources))


def checked_text(value: Any, column: str, place: str) -> str:
    """A value as a text a tokenizer can take, or an error that says where it stands."""
    if not isinstance(value, str) or not value.strip():
        empty = value is None or isinstance(value, str)
        what = "has no text" if empty else f"holds {type(value).__name__} instead of text"
        raise BadInput(f"{place} {what} in column {column!r}; fill it in or delete the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        broken = f"half a character, \\u{ord(value[error.start]):04x}, in column {column!r}"
        mend = "clean it with text.encode('utf-8', 'replace').decode('utf-8')"
        raise BadInput(f"{place} holds {broken}; {mend}") from error
    return value


def _negative_columns(columns: Sequence[str]) -> list[str]:
    """The columns of negatives: negative, negatives, then the numbered ones by number."""
    matches = [match for match in map(_NEGATIVE.fullmatch, columns) if match]
    return [match.string for match in sorted(matches, key=lambda match: int(match["number"] or -1))]


def _checked_negatives(value: Any, column: str, place: str) -> tuple[str, ...]:
    """The negatives in one value: none (null, or an empty field), one, or a list of them."""
    if value is None or value == "":
        return ()
    return tuple(
        checked_text(item, column, place) for item in (value if isinstance(value, list) else [value])
    )


def _texts(sources: Sequence[_Source]) -> Iterator[Text]:
    return texts_of(row for source in sources for row in _read_rows(source, may_hold_texts))


def texts_of(rows: Iterable[_Row]) -> Iterator[Text]:
    """The texts of rows that may come from several tables."""
    plans: dict[tuple[str, ...], dict[str, Kind | None]] = {}
    for row in rows:
        if row.columns not in plans:
            plans[row.columns] = _plan(row)
        yield from _row_texts(row, plans[row.columns])


def may_hold_texts(column: str) -> bool:
    """Whether a column is worth reading."""
    return (
        column in _IMPLIED or column in _PLAIN or column == "kind" or _NEGATIVE.fullmatch(column) is not None
    )


def _plan(row: _Row) -> dict[str, Kind | None]:
    """Which columns of a table hold texts, and of what kind."""
    plan = {column: kind for column, kind in _IMPLIED.items() if column in row.columns}
    plan.update(dict.fromkeys(_negative_columns(row.columns), "document"))
    if all(kind == "query" for kind in plan.values()):
        plain = next((column for column in _PLAIN if column in row.columns), None)
        plan.update({plain: "document" if plan else None} if plain else {})
    if not plan:
        there = ", ".join(row.columns) or "none"
        raise BadInput(
            f"{row.place} has no column known to hold texts (columns: {there}); "
            "say which one does, as in FILE::text=COLUMN"
        )
    return plan


def _row_texts(row: _Row, plan: dict[str, Kind | None]) -> Iterator[Text]:
    stated = row.values.get("kind") or None
    if stated is not None and stated not in KINDS:
        raise BadInput(
            f"{row.place} has the kind {stated!r}; write one of {', '.join(KINDS)}, "
            "or name the text column alone, as in FILE::text=COLUMN"
        )
    for column, implied in plan.items():
        if _NEGATIVE.fullmatch(column):
            for text in _checked_negatives(row.values[column], column, row.place):
                yield Text(text=text, kind=stated or implied)
        else:
            yield Text(text=checked_text(row.values[column], column, row.place), kind=stated or implied)
