"""How well a student searches an index, from the index alone: neither labels nor the teacher are needed.

Rows that were not trained on are asked as queries. Their true neighbours are those of their stored vectors.
As a known item, a row is asked for by its title or first sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Similarity, Vectors, check_vectors
from trundle.evaluate.retrieval import _paired_cosines, nearest
from trundle.progress import SILENT, Progress

_AT = 10
_LONGEST_QUERY = 160
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|(?<=[。！？])|\n")
_LENGTHS = ((200, "under 200 characters"), (1000, "200 to 999"), (10**9, "1,000 and more"))
_FEWEST = 5
"""A group of fewer rows is not listed: its mean says nothing."""
_LETTERS = 200
"""Letters that decide the script of a text."""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows of one length or one script."""

    name: str
    rows: int
    agreement: float


@dataclass(frozen=True, kw_only=True)
class _RowScores:
    """What a student finds in an index, compared with what the stored vectors find."""

    queries: int
    agreement: float
    """Mean share of the ten nearest rows of a stored vector that are among the student's ten."""
    first: float
    """Share of rows whose nearest row is among the student's ten."""
    cosine: float
    """Mean cosine of the student's vectors and the stored ones."""
    known_items: int
    known_item: float | None
    """Share of rows that are among the student's ten for their own title or first sentence."""
    by_length: tuple[_Group, ...]
    by_script: tuple[_Group, ...]


def score_rows(
    student: Embedder,
    texts: Sequence[str],
    vectors: Vectors,
    asked: Sequence[int],
    *,
    similarity: Similarity = "cosine",
    progress: Progress = SILENT,
) -> _RowScores:
    """Ask the rows at the positions `asked` as queries, and for each of them as a known item."""
    own = list(asked)
    queries = [texts[place] for place in own]
    openings = [_opening_words(text) for text in queries]
    items = [row for row, words in enumerate(openings) if words and len(words) < len(queries[row].strip())]
    with progress.task(f"{student.name}, {len(own) + len(items)} queries", None):
        ours = check_vectors(student.document(queries), queries, student.name)
        words = [openings[row] for row in items]
        short = check_vectors(student.query(words), words, student.name) if words else ours[:0]
    truth = nearest(vectors[own], vectors, _AT, left_out=own, similarity=similarity)
    found = nearest(ours, vectors, _AT, left_out=own, similarity=similarity)
    shares = (truth[:, :, None] == found[:, None, :]).any(axis=2).mean(axis=1)
    known = None
    if items:
        wanted = np.array([own[row] for row in items])
        known = float(
            (nearest(short, vectors, _AT, similarity=similarity) == wanted[:, None]).any(axis=1).mean()
        )
    return _RowScores(
        queries=len(own),
        agreement=float(shares.mean()),
        first=float((found == truth[:, :1]).any(axis=1).mean()),
        cosine=float(_paired_cosines(ours, vectors[own]).mean(dtype=np.float64)),
        known_items=len(items),
        known_item=known,
        by_length=_groups(queries, shares, _length),
        by_script=_groups(queries, shares, _script_of),
    )


def _opening_words(text: str) -> str:
    """Return the title or first sentence of a text, as short as a query."""
    sentence = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
    return sentence if len(sentence) <= _LONGEST_QUERY else sentence[:_LONGEST_QUERY].rsplit(" ", 1)[0]


def _script_of(text: str) -> str:
    """Return the script that most letters of a text are in, such as Latin or Cyrillic."""
    letters = [letter for letter in text[: 4 * _LETTERS] if letter.isalpha()][:_LETTERS]
    scripts = Counter(unicodedata.name(letter, "other").split()[0] for letter in letters)
    return scripts.most_common(1)[0][0].capitalize() if scripts else "no letters"


def _length(text: str) -> str:
    return next(name for limit, name in _LENGTHS if len(text) < limit)


def _groups(
    texts: Sequence[str], shares: NDArray[np.float64], group_of: Callable[[str], str]
) -> tuple[_Group, ...]:
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for row, text in enumerate(texts):
        rows[group_of(text)].append(row)
    order = [name for _, name in _LENGTHS]
    names = sorted(rows, key=lambda name: (order.index(name) if name in order else -len(rows[name]), name))
    groups = (
        _Group(name=name, rows=len(rows[name]), agreement=float(shares[rows[name]].mean())) for name in names
    )
    return tuple(group for group in groups if group.rows >= _FEWEST)
