"""Measures whether a student can search an existing index: how far it retrieves what its teacher retrieves.

With a teacher, both encode the same queries, and the ten texts that each retrieves are compared. Without one,
the stored vector of a text takes the place of the teacher's: the student encodes the same text, and the
neighbours of both vectors are compared, without the text itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trundle.embedder import Embedder, Vectors, check_vectors, top_agreement
from trundle.errors import BadInput
from trundle.evaluate.retrieval import nearest, unit
from trundle.index.rows import IndexReader, draw_sample
from trundle.progress import SILENT, Progress

_AT = 10
_LEAST_TEXTS = 50
"""Among fewer texts, the agreement means little."""
_LONGEST_QUERY = 160
_COMPARED = 32
"""Texts used to check whether the teacher built the index."""
_SAME_MODEL = 0.98
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n")
_GOOD, _FAIR = 0.8, 0.5


@dataclass(frozen=True, kw_only=True)
class _Check:
    """How far a student agrees with a teacher on an index."""

    index: str
    student: str
    teacher: str | None
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
    built_by_teacher: float | None
    """Mean cosine of the teacher's vectors with the stored ones; None without a teacher."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"at": _AT, "says": list(self.says())}

    def says(self) -> tuple[str, ...]:
        of = "all of them" if self.texts == self.total else f"a sample of {self.total:,}"
        lines = [
            f"{self.student} encoded {self.queries:,} queries ({self.queries_from}) and searched "
            f"{self.texts:,} texts of {self.index} ({of}) by their stored vectors.",
            f"Of the ten texts that {self.teacher or 'the stored vectors'} would retrieve, it retrieves "
            f"{10 * self.agreement:.1f}; the best one is among its ten for {self.first:.0%} of the queries.",
        ]
        if self.agreement >= _GOOD:
            lines.append("It can encode the queries of this index without embedding any text again.")
        elif self.agreement >= _FAIR:
            lines.append("It works on this index, with some different results; longer alignment helps.")
        else:
            lines.append("It is not in this index's vector space: align it on such texts with trundle align.")
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
) -> _Check:
    """Measure how far the student agrees with the teacher on an index; nothing is written.

    Without a teacher, the stored vectors take its place. Without `queries`, the first sentences of the
    sampled texts are used.
    """
    if queries and teacher is None:
        raise BadInput("your own queries need the teacher; name it with --teacher")
    drawn = draw_sample(index, texts, seed)
    if len(drawn.texts) < _LEAST_TEXTS:
        raise BadInput(
            f"{index.where} holds {len(drawn.texts)} texts; the check needs {_LEAST_TEXTS} or more"
        )
    if teacher is None:
        asked = list(drawn.texts[:most_queries])
        ours = _vectors(student, "document", asked, progress)
        theirs = drawn.vectors[: len(asked)]
        own: list[int] | None = list(range(len(asked)))
        source = "its own texts; their stored vectors take the place of the teacher's"
    else:
        asked = list(dict.fromkeys(queries))[:most_queries] or _opening_words(drawn.texts)[:most_queries]
        ours = _vectors(student, "query", asked, progress)
        theirs = _vectors(teacher, "query", asked, progress)
        own = None
        source = "yours" if queries else "the first sentences of its texts"
    for name, vectors in ((student.name, ours), ("the teacher", theirs)):
        if vectors.shape[1] != drawn.vectors.shape[1]:
            stored = f"{index.where} stores {drawn.vectors.shape[1]}"
            raise BadInput(f"{name} returns vectors of width {vectors.shape[1]} and {stored}; align it first")
    built_by_teacher = None
    if teacher is not None:
        some = list(drawn.texts[:_COMPARED])
        built_by_teacher = _cosine(_vectors(teacher, "document", some, progress), drawn.vectors[: len(some)])
    truth = nearest(theirs, drawn.vectors, _AT, left_out=own)
    found = nearest(ours, drawn.vectors, _AT, left_out=own)
    return _Check(
        index=index.where,
        student=student.name,
        teacher=None if teacher is None else teacher.name,
        texts=len(drawn.texts),
        total=drawn.total,
        queries=len(asked),
        queries_from=source,
        agreement=top_agreement(truth, found),
        first=float(np.mean((found == truth[:, :1]).any(axis=1))),
        cosine=_cosine(ours, theirs),
        built_by_teacher=built_by_teacher,
    )


def _opening_words(texts: Sequence[str]) -> list[str]:
    found = []
    for text in texts:
        sentence = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
        if len(sentence) > _LONGEST_QUERY:
            sentence = sentence[:_LONGEST_QUERY].rsplit(" ", 1)[0]
        found.append(sentence)
    return list(dict.fromkeys(words for words in found if words))


def _cosine(ours: Vectors, theirs: Vectors) -> float:
    return float(np.einsum("ij,ij->i", unit(ours), unit(theirs)).mean())


def _vectors(embedder: Embedder, role: str, texts: Sequence[str], progress: Progress) -> Vectors:
    with progress.task(f"{embedder.name}, {len(texts)} texts", None):
        encode = embedder.query if role == "query" else embedder.document
        return check_vectors(encode(texts), texts, embedder.name)
