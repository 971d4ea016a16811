"""What opening a run's model brings to a report: each model beside its teacher, asked once for each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trundle.data.sampling import sample
from trundle.embedder import Embedder, Vectors
from trundle.errors import UserError
from trundle.evaluate.comparison import Comparison, Shorten, compare
from trundle.evaluate.fidelity import AGREEMENT_AT, Fidelity, Top, find_top, on_a_plane
from trundle.evaluate.scoring import Memory
from trundle.evaluate.shortening import read_ranges
from trundle.methods.vocabulary.scores import count_tokens, tokenised
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.model.token_map import read_vocabulary
from trundle.progress import Progress
from trundle.report.markup import _one_line
from trundle.report.reading import _TORCH
from trundle.report.records import (
    _Apart,
    _Found,
    _Kept,
    _Measured,
    _Projection,
    _Quality,
    _Run,
    _Search,
    _Shortened,
    _TaskScore,
    _TokenCurve,
)
from trundle.runtime.encoder import Encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.texts import Text
    from trundle.evaluate.tasks import Task

_SAMPLE_QUERIES = 12
_PROJECTED = 240
_EXAMPLES = 8
_LONGEST = 320
"""Characters of a text that are shown."""
_CURVE_POINTS = 80


class _Measuring:
    """The opened models; each is asked once for each text."""

    def __init__(self, runs: Sequence[_Run], teacher: Embedder, *, trust: bool, progress: Progress) -> None:
        memory = Memory(progress)
        self._runs, self._progress = runs, progress
        self._teacher = memory.remember(teacher, f"{_one_line(teacher.name, 40)}: encoding")
        self._students = {
            run.name: memory.remember(_opened(run, trust=trust), f"{run.name}: encoding") for run in runs
        }

    def compare(self, tasks: Sequence[Task], texts: Sequence[Text]) -> Comparison:
        """Tasks, fidelity, and vectors cut short."""
        ranges = {run.name: kept for run in self._runs if (kept := read_ranges(run.folder)) is not None}
        return compare(
            list(self._students.values()),
            teacher=self._teacher,
            tasks=tasks,
            texts=texts,
            examples=_EXAMPLES,
            shorten=Shorten(ranges=ranges) if texts else None,
            progress=self._progress,
        )

    def searches(
        self, queries: Sequence[str], documents: Sequence[str]
    ) -> tuple[dict[str, tuple[_Search, ...]], dict[int, str]]:
        """What some queries find, by each run and by the teacher, and the documents that were found."""
        asked = sample(queries, _SAMPLE_QUERIES, seed=0)
        index = self._teacher.document(documents)
        by_teacher = find_top(self._teacher.query(asked), index, AGREEMENT_AT)
        found: dict[str, tuple[_Search, ...]] = {}
        for name, student in self._near():
            own = student.query(asked)
            in_its_index = find_top(own, index, AGREEMENT_AT)
            alone = find_top(own, student.document(documents), AGREEMENT_AT)
            found[name] = tuple(
                _Search(
                    query=_one_line(query, _LONGEST),
                    teacher=_found(by_teacher, row),
                    asymmetric=_found(in_its_index, row),
                    student=_found(alone, row),
                )
                for row, query in enumerate(asked)
            )
        places = {
            place
            for searches in found.values()
            for search in searches
            for way in (search.teacher, search.asymmetric, search.student)
            for place in way.documents
        }
        return found, {place: _one_line(documents[place], _LONGEST) for place in sorted(places)}

    def planes(self, queries: Sequence[str], documents: Sequence[str]) -> dict[str, _Projection]:
        """Each run's vectors and the teacher's on one plane; it is laid through all texts, and some are shown."""

        def vectors(model: Embedder) -> Vectors:
            return np.vstack([model.query(queries), model.document(documents)])

        texts = [*queries, *documents]
        chosen = sorted(sample(range(len(texts)), _PROJECTED, seed=0))
        theirs = vectors(self._teacher)
        found = {}
        for name, student in self._near():
            plane = on_a_plane(theirs, vectors(student))
            found[name] = _Projection(
                texts=tuple(_one_line(texts[place], 120) for place in chosen),
                teacher=_points(plane.teacher[chosen]),
                student=_points(plane.student[chosen]),
                shown=round(plane.shown, 4),
            )
        return found

    def _near(self) -> list[tuple[str, Embedder]]:
        """The runs whose vectors are as wide as the teacher's."""
        width = self._teacher.text(["width"]).shape[1]
        return [
            (n, student) for n, student in self._students.items() if student.text(["width"]).shape[1] == width
        ]


def _found(top: Top, row: int) -> _Found:
    cosines = tuple(round(float(cosine), 4) for cosine in top.cosines[row])
    return _Found(documents=tuple(top.positions[row].tolist()), cosines=cosines)


def _points(places: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    return tuple((round(float(x), 4), round(float(y), 4)) for x, y in places)


def _opened(run: _Run, *, trust: bool) -> Embedder:
    if run.form.engine != _TORCH:
        return Encoder(run.folder, graph=run.form.engine).embedder(run.name)
    return embedder(load(run.folder, trust_remote_code=trust).float(), name=run.name)


def _measured(number: int, run: _Run, found: Comparison) -> _Measured:
    """What a comparison says of one run, the n-th of those compared."""
    return _Measured(
        quality=_quality(run.name, found),
        tasks=_task_scores(number, found),
        shortened=_shortened(run.name, found),
        nearest=_apart(found, run.name, near=True),
        farthest=_apart(found, run.name, near=False),
    )


def _quality(name: str, found: Comparison) -> _Quality | None:
    near = _fidelity(found, name)
    shares = {
        share.mode: share.share for share in found.shares if share.model == name and share.over == "all"
    }
    if near is None and not shares:
        return None
    on = (
        []
        if near is None
        else [f"{near.queries:,} queries × {near.documents:,} documents that the runs have not learned from"]
    )
    on += [f"{found.shares[0].tasks} task{'s' if found.shares[0].tasks > 1 else ''}"] if shares else []
    return _Quality(
        measured=" and ".join(on),
        k=AGREEMENT_AT if near is None else near.k,
        agreement_asymmetric=None if near is None else near.agreement_asymmetric,
        agreement_standard=None if near is None else near.agreement_standard,
        cosine=None if near is None else near.cosine,
        distance=None if near is None else near.distance,
        share_standard=shares.get("standard"),
        share_asymmetric=shares.get("asymmetric"),
    )


def _fidelity(found: Comparison, name: str) -> Fidelity | None:
    return next((one for one in found.fidelity if one.student == name), None)


def _task_scores(number: int, found: Comparison) -> tuple[_TaskScore, ...]:
    """A run's scores beside the teacher's, whose row comes first."""
    if not found.results:
        return ()
    ours = {(result.kind, result.task, result.mode): result.score for result in found.results[number + 1]}
    return tuple(
        _TaskScore(
            task=theirs.task,
            kind=theirs.kind,
            measure=theirs.main,
            teacher=theirs.score,
            standard=ours[theirs.kind, theirs.task, "standard"],
            asymmetric=ours.get((theirs.kind, theirs.task, "asymmetric")),
        )
        for theirs in found.results[0]
    )


def _shortened(name: str, found: Comparison) -> tuple[_Shortened, ...]:
    return tuple(
        _Shortened(
            measure=one.measure,
            rows=tuple(
                _Kept(dimensions=row.dimensions, precision=row.precision, bytes=row.bytes, scores=row.scores)
                for row in one.rows
            ),
        )
        for one in found.inheritance
        if one.student == name
    )


def _apart(found: Comparison, name: str, *, near: bool) -> tuple[_Apart, ...]:
    one = _fidelity(found, name)
    if one is None:
        return ()
    return tuple(
        _Apart(text=_one_line(error.text, _LONGEST), distance=error.distance, cosine=error.cosine)
        for error in (one.closest if near else one.farthest)
    )


def _token_curve(model: SentenceTransformer, name: str, texts: Sequence[str]) -> _TokenCurve | None:
    """What share of the texts the most frequent tokens are; None for a model whose tokens can't be listed."""
    try:
        vocabulary = read_vocabulary(model)
    except UserError:
        return None
    size = max(vocabulary.size, max(vocabulary.tokens) + 1)
    counts = np.sort(count_tokens(tokenised(vocabulary.backend, texts), size).occurrences)[::-1]
    covered = np.cumsum(counts) / max(int(counts.sum()), 1)
    sizes = np.unique(np.geomspace(10, size, _CURVE_POINTS).round().astype(int))
    points = [(float(n), round(float(covered[n - 1]), 5)) for n in sizes]
    return _TokenCurve(tokenizer=name, texts=len(texts), points=tuple(points))
