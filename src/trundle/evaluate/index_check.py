"""Measures whether a student can search an existing index: how far it retrieves what its teacher retrieves.

With a teacher, both encode the same queries, and the ten texts that each retrieves are compared. Without one,
rows that were not trained on are the queries: their true neighbours are those of their stored vectors, and as
a known item a row is asked for by its title or first sentence.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Vectors, check_vectors, top_agreement
from trundle.errors import BadInput
from trundle.evaluate.retrieval import _paired_cosines, nearest
from trundle.index.rows import IndexReader, SearchedRows, draw_sample
from trundle.progress import SILENT, Progress

_AT = 10
_LEAST_TEXTS = 50
"""Among fewer texts, the agreement means little."""
_COMPARED = 32
"""Texts used to check whether the teacher built the index."""
_SAME_MODEL = 0.98
_VERDICTS = (
    (0.8, "It can encode the queries of this index without embedding any text again."),
    (0.5, "It works on this index, with some different results; training on such texts helps."),
    (0.0, "It is not in this index's vector space: align it on such texts with trundle align."),
)
"""From which agreement on each is true."""
_DOCUMENTS = (
    "Rows stand in for queries here, but documents are not queries: name who made the index with --teacher "
    "and pass real queries with --queries FILE to know more."
)
_LONGEST_QUERY = 160
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|(?<=[。！？])|\n")
_LENGTHS = ((200, "under 200 characters"), (1000, "200 to 999"), (10**9, "1,000 and more"))
_FEWEST = 5
"""A group of fewer rows is not listed: its mean says nothing."""
_LETTERS = 200
"""Letters that decide the script of a text."""


@dataclass(frozen=True, kw_only=True)
class IndexCheck:
    """How far a student agrees with a teacher on an index."""

    index: str
    student: str
    teacher: str | None = None
    texts: int
    """The number of sampled texts that were searched."""
    total: int
    queries: int
    queries_from: str
    agreement: float
    """Mean share of the teacher's ten results that are among the student's."""
    first: float
    """Share of queries whose best result by the teacher is among the student's ten."""
    cosine: float
    """Mean cosine of the student's and the teacher's vectors of the same texts."""
    built_by_teacher: float | None = None
    """Mean cosine of the teacher's vectors with the stored ones; None without a teacher."""
    rows: _RowScores | None = None
    """The same from rows of the index alone; None if they were not asked."""

    def as_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self) | {"at": _AT, "says": list(self.says())}

    def says(self) -> tuple[str, ...]:
        """Return the verdict in sentences."""
        of = "all of them" if self.texts == self.total else f"a sample of {self.total:,}"
        lines = [
            f"{self.student} encoded {self.queries:,} queries ({self.queries_from}) and searched "
            f"{self.texts:,} texts of {self.index} ({of}) by their stored vectors.",
            f"Of the ten texts that {self.teacher or 'the stored vectors'} would retrieve, it retrieves "
            f"{10 * self.agreement:.1f}; the best one is among its ten for {self.first:.0%} of the queries.",
        ]
        lines.append(next(verdict for least, verdict in _VERDICTS if self.agreement >= least))
        if (rows := self.rows) is not None:
            if rows.known_item is not None:
                lines.append(
                    f"Asked for {rows.known_items:,} rows by their title or first sentence, it has "
                    f"{rows.known_item:.0%} of them among its ten."
                )
            for what, groups in (("length", rows.by_length), ("script", rows.by_script)):
                if len(groups) > 1:
                    each = (f"{one.name} {one.agreement:.1%} ({one.rows:,} rows)" for one in groups)
                    lines.append(f"Agreement by {what}: {', '.join(each)}.")
        if self.teacher is None:
            lines.append(_DOCUMENTS)
        if self.built_by_teacher is not None and self.built_by_teacher < _SAME_MODEL:
            lines.append(
                f"Warning: the vectors of {self.teacher} differ from the stored ones (cosine "
                f"{self.built_by_teacher:.3f}), so it did not build this index, or used another prompt."
            )
        return tuple(lines)


def check_index(
    index: IndexReader,
    student: Embedder,
    *,
    teacher: Embedder | None = None,
    queries: Sequence[str] = (),
    texts: int = 5000,
    most_queries: int = 200,
    seed: int = 0,
    progress: Progress = SILENT,
) -> IndexCheck:
    """Measure how far the student agrees with the teacher on an index; nothing is written.

    Without a teacher, the stored vectors take its place. Without `queries`, the first sentences of the
    sampled texts are used.
    """
    if queries and teacher is None:
        raise BadInput("your own queries need the teacher; name it with --teacher")
    rows = draw_sample(index, texts, seed)
    if len(rows.texts) < _LEAST_TEXTS:
        raise BadInput(f"{rows.index} holds {len(rows.texts)} texts; the check needs {_LEAST_TEXTS} or more")
    if teacher is None:
        return check_rows(rows, student, range(min(most_queries, len(rows.texts))), progress=progress)
    some = list(rows.texts[:_COMPARED])
    built = _cosine(_vectors(teacher, "document", some, progress), rows.vectors[: len(some)])
    openings = list(dict.fromkeys(filter(None, map(_opening_words, rows.texts))))
    words = (list(dict.fromkeys(queries)) or openings)[:most_queries]
    source = "yours" if queries else "the first sentences of its texts"
    found = check_queries(rows, student, teacher, words, progress=progress)
    return replace(found, built_by_teacher=built, queries_from=source)


def check_rows(
    rows: SearchedRows, student: Embedder, asked: Sequence[int], *, progress: Progress = SILENT
) -> IndexCheck:
    """Measure what the student finds in some rows, which are asked in place of queries."""
    one = check_vectors(student.document(rows.texts[:1]), rows.texts[:1], student.name)
    _check_width(one, rows, student.name)
    found = _score_rows(student, rows, asked, progress=progress)
    return IndexCheck(
        index=rows.index,
        student=student.name,
        texts=len(rows.texts),
        total=rows.total,
        queries=found.queries,
        queries_from="its own texts; their stored vectors take the place of the teacher's",
        agreement=found.agreement,
        first=found.first,
        cosine=found.cosine,
        rows=found,
    )


def check_queries(
    rows: SearchedRows,
    student: Embedder,
    teacher: Embedder,
    queries: Sequence[str],
    *,
    progress: Progress = SILENT,
) -> IndexCheck:
    """Measure what the student finds in some rows for queries, compared with what the teacher finds."""
    ours, theirs = (_vectors(each, "query", queries, progress) for each in (student, teacher))
    for name, vectors in ((student.name, ours), ("the teacher", theirs)):
        _check_width(vectors, rows, name)
    by = rows.similarity
    truth, found = (nearest(each, rows.vectors, _AT, similarity=by) for each in (theirs, ours))
    return IndexCheck(
        index=rows.index,
        student=student.name,
        teacher=teacher.name,
        texts=len(rows.texts),
        total=rows.total,
        queries=len(queries),
        queries_from="yours",
        agreement=top_agreement(truth, found),
        first=float(np.mean((found == truth[:, :1]).any(axis=1))),
        cosine=_cosine(ours, theirs),
    )


def _check_width(vectors: Vectors, rows: SearchedRows, name: str) -> None:
    if vectors.shape[1] != rows.vectors.shape[1]:
        stored = f"{rows.index} stores {rows.vectors.shape[1]}"
        raise BadInput(f"{name} returns vectors of width {vectors.shape[1]} and {stored}; align it first")


def _cosine(ours: Vectors, theirs: Vectors) -> float:
    return float(_paired_cosines(ours, theirs).mean(dtype=np.float64))


def _vectors(embedder: Embedder, role: str, texts: Sequence[str], progress: Progress) -> Vectors:
    with progress.task(f"{embedder.name}, {len(texts)} texts", None):
        encode = embedder.query if role == "query" else embedder.document
        return check_vectors(encode(texts), texts, embedder.name)


@dataclass(frozen=True, kw_only=True)
class _Group:
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


def _score_rows(
    student: Embedder, rows: SearchedRows, asked: Sequence[int], *, progress: Progress = SILENT
) -> _RowScores:
    """Ask the rows at the positions `asked` as queries, and for each of them as a known item."""
    own, vectors = list(asked), rows.vectors
    search = partial(nearest, documents=vectors, k=_AT, similarity=rows.similarity)
    queries = [rows.texts[place] for place in own]
    openings = [_opening_words(text) for text in queries]
    items = [row for row, words in enumerate(openings) if words and len(words) < len(queries[row].strip())]
    with progress.task(f"{student.name}, {len(own) + len(items)} queries", None):
        ours = check_vectors(student.document(queries), queries, student.name)
        words = [openings[row] for row in items]
        short = check_vectors(student.query(words), words, student.name) if words else ours[:0]
    truth, found = (search(each, left_out=own) for each in (vectors[own], ours))
    shares = (truth[:, :, None] == found[:, None, :]).any(axis=2).mean(axis=1)
    known = None
    if items:
        wanted = np.array([own[row] for row in items])
        known = float((search(short) == wanted[:, None]).any(axis=1).mean())
    return _RowScores(
        queries=len(own),
        agreement=float(shares.mean()),
        first=float((found == truth[:, :1]).any(axis=1).mean()),
        cosine=_cosine(ours, vectors[own]),
        known_items=len(items),
        known_item=known,
        by_length=_groups(
            queries, shares, lambda text: next(name for most, name in _LENGTHS if len(text) < most)
        ),
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
