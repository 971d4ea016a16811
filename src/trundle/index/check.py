"""The proof that nothing need be embedded again: how far a student finds in an index what its teacher finds.

With the teacher at hand both are asked the same queries, and the ten texts each finds are compared. Without it the index
itself stands in: the stored vector of a text is the teacher's word for it, the student embeds the same text, and the
neighbours of both are compared, the text itself left out.
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
from trundle.index.contract import _Readable, _Sample
from trundle.progress import SILENT, Progress

_AT = 10
_LEAST_TEXTS = 50
"""Among fewer texts, agreement says little more than chance."""
_LONGEST_QUERY = 160
_COMPARED = 32
"""Texts by which it is checked whether the teacher built the index."""
_SAME_MODEL = 0.98
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s+|\n")
_ENOUGH, _HALF = 0.8, 0.5


@dataclass(frozen=True, kw_only=True)
class _Check:
    """What was found."""

    index: str
    student: str
    teacher: str | None
    texts: int
    """Texts searched in: the sample."""
    total: int
    queries: int
    queries_from: str
    agreement: float
    """Mean share of the teacher's ten that are among the student's."""
    first: float
    """How often the teacher's best is among the student's ten."""
    cosine: float
    """Mean cosine of the student's vectors with those the teacher gives for the same."""
    built_by_teacher: float | None
    """Mean cosine of the teacher's vectors with the stored ones; None where there was no teacher to ask."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {"at": _AT, "says": list(self.says())}

    def says(self) -> tuple[str, ...]:
        """The same in plain words."""
        of = "all of it" if self.texts == self.total else f"a sample of the {self.total:,} texts there"
        lines = [
            f"{self.student} was asked {self.queries:,} queries ({self.queries_from}) and searched {self.texts:,} "
            f"texts of {self.index}, {of}, by their stored vectors.",
            f"Of the ten texts that {self.teacher or 'the stored vectors'} would find, it finds "
            f"{10 * self.agreement:.1f}; the best of them is among its ten for {self.first:.0%} of the queries.",
        ]
        if self.agreement >= _ENOUGH:
            lines.append("It can take over the queries of this index: nothing need be embedded again.")
        elif self.agreement >= _HALF:
            lines.append(
                "It works on this index, with other results here and there; aligning it longer on texts like "
                "these brings it closer, without embedding anything again."
            )
        else:
            lines.append(
                "It is not in the space of this index, or not near enough: align it with trundle align on texts "
                "like these before it takes over."
            )
        if self.built_by_teacher is not None and self.built_by_teacher < _SAME_MODEL:
            lines.append(
                f"Take care: {self.teacher} gives other vectors for these texts than the stored ones (cosine "
                f"{self.built_by_teacher:.3f}), so it did not build this index as it is, or with another prompt."
            )
        return tuple(lines)


def check_index(
    index: _Readable,
    student: Embedder,
    *,
    teacher: Embedder | None = None,
    queries: Sequence[str] = (),
    texts: int = 5000,
    most_queries: int = 200,
    seed: int = 0,
    progress: Progress = SILENT,
) -> _Check:
    """Measure how far the student agrees with the teacher on what is stored; nothing is written."""
    if queries and teacher is None:
        raise BadInput("for your own queries the teacher must be asked, too; name it with --teacher")
    drawn = index.sample(texts, seed)
    if len(drawn.texts) < _LEAST_TEXTS:
        raise BadInput(
            f"{index.name} holds {len(drawn.texts)} texts, and among fewer than {_LEAST_TEXTS} agreement says nothing; "
            "check an index that is in use"
        )
    if teacher is None:
        asked = list(drawn.texts[:most_queries])
        ours = _vectors(student, "document", asked, progress)
        theirs = drawn.vectors[: len(asked)]
        own: list[int] | None = list(range(len(asked)))
        source = "its own texts, whole; their stored vectors stand in for the teacher"
    else:
        asked = list(dict.fromkeys(queries))[:most_queries] or _opening_words(drawn.texts)[:most_queries]
        ours = _vectors(student, "query", asked, progress)
        theirs = _vectors(teacher, "query", asked, progress)
        own = None
        source = "yours" if queries else "the first sentences of its texts"
    for name, vectors in ((student.name, ours), ("the teacher", theirs)):
        if vectors.shape[1] != drawn.vectors.shape[1]:
            raise BadInput(
                f"{name} gives vectors of {vectors.shape[1]} numbers and {index.name} stores "
                f"{drawn.vectors.shape[1]}; bring the student into the teacher's space with trundle align"
            )
    truth = nearest(theirs, drawn.vectors, _AT, left_out=own)
    found = nearest(ours, drawn.vectors, _AT, left_out=own)
    return _Check(
        index=index.name,
        student=student.name,
        teacher=None if teacher is None else teacher.name,
        texts=len(drawn.texts),
        total=drawn.total,
        queries=len(asked),
        queries_from=source,
        agreement=top_agreement(truth, found),
        first=float(np.mean((found == truth[:, :1]).any(axis=1))),
        cosine=float(np.einsum("ij,ij->i", unit(ours), unit(theirs)).mean()),
        built_by_teacher=None if teacher is None else _built_by(teacher, drawn, progress),
    )


def _opening_words(texts: Sequence[str]) -> list[str]:
    """The first sentence of each text, at most so many characters: what somebody might type to find it."""
    found = []
    for text in texts:
        sentence = _SENTENCE_END.split(text.strip(), maxsplit=1)[0]
        if len(sentence) > _LONGEST_QUERY:
            sentence = sentence[:_LONGEST_QUERY].rsplit(" ", 1)[0]
        found.append(sentence)
    return list(dict.fromkeys(words for words in found if words))


def _built_by(teacher: Embedder, drawn: _Sample, progress: Progress) -> float:
    some = list(drawn.texts[:_COMPARED])
    again = _vectors(teacher, "document", some, progress)
    return float(np.einsum("ij,ij->i", unit(again), unit(drawn.vectors[: len(some)])).mean())


def _vectors(embedder: Embedder, role: str, texts: Sequence[str], progress: Progress) -> Vectors:
    with progress.task(f"{embedder.name}, {len(texts)} texts", None):
        encode = embedder.query if role == "query" else embedder.document
        return check_vectors(encode(texts), texts, embedder.name)
