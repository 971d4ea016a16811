"""Pairs out of texts without labels: what stands side by side in a text belongs together.

title and body           a short first line, and what follows it
neighbouring passages    the two halves of a text of several sentences
dropout views            a short text twice: a model that drops weights at random sees it in two ways
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from trundle.data.augment import SENTENCE_END
from trundle.data.texts import Text
from trundle.data.tuples import Example

TITLE_BODY, NEIGHBOURS, DROPOUT = "title and body", "neighbouring passages", "dropout views"
TITLE_WORDS = 20
FEWEST_WORDS = 4
"""Words a passage must have to say something."""
FIRST_LINE = re.compile(r"\s*(?P<title>[^\n]+)\n+(?P<body>.+)", re.DOTALL)


def pairs_from_texts(
    texts: Iterable[Text], *, allowed: Callable[[str], bool] = lambda _text: True
) -> Iterator[Example]:
    """One pair a text; its source says how it was made. A pair with a piece that is not allowed is left out."""
    for text in texts:
        pair = pair_from_text(text.text)
        if allowed(pair.query) and allowed(pair.positive):
            yield pair


def pair_from_text(text: str) -> Example:
    """The first way that the text allows."""
    lines = FIRST_LINE.fullmatch(text)
    if lines and len(lines["title"].split()) <= TITLE_WORDS and len(lines["body"].split()) >= FEWEST_WORDS:
        return Example(query=lines["title"].strip(), positive=lines["body"].strip(), source=TITLE_BODY)
    halves = _halves(text)
    if halves is not None:
        return Example(query=halves[0], positive=halves[1], source=NEIGHBOURS)
    return Example(query=text, positive=text, source=DROPOUT)


def _halves(text: str) -> tuple[str, str] | None:
    """A text cut at the sentence end nearest its middle; None where a half would be too short."""
    ends = [match.span() for match in SENTENCE_END.finditer(text)]
    if not ends:
        return None
    end, start = min(ends, key=lambda span: abs(span[0] - len(text) / 2))
    halves = text[:end].strip(), text[start:].strip()
    return halves if all(len(half.split()) >= FEWEST_WORDS for half in halves) else None
