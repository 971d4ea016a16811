"""Measure loaded models against their teacher; each model encodes each text once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sklearn.decomposition import PCA

from trundle.data.sampling import sample
from trundle.data.texts import Text
from trundle.embedder import Embedder, Vectors
from trundle.errors import UserError
from trundle.evaluate.comparison import Comparison, compare
from trundle.evaluate.fidelity import AGREEMENT_AT, Fidelity
from trundle.evaluate.retrieval import nearest, unit
from trundle.evaluate.shortening import Shorten, read_ranges
from trundle.evaluate.tasks import Task
from trundle.methods.vocabulary.scores import count_tokens, tokenised
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.model.token_map import read_vocabulary
from trundle.progress import Progress
from trundle.report import contents
from trundle.report.contents import _Projection, _Quality, _RunMeasurements, _RunRecord, _SampleSearch
from trundle.report.markup import _numbered, _one_line
from trundle.report.reading import _TORCH
from trundle.runtime.encoder import Encoder
from trundle.teacher.targets import HeldOutVectors
from trundle.teacher.teacher import Teacher

_SAMPLE_QUERIES = 12
_PROJECTED = 240
_EXAMPLES = 8
_LONGEST = 320
"""The most characters of a text that are shown."""
_CURVE_POINTS = 80


class _Measuring:
    def __init__(
        self, runs: Sequence[_RunRecord], teacher: Embedder, *, trust: bool, progress: Progress
    ) -> None:
        held_out = HeldOutVectors(progress)
        self._runs, self._progress = runs, progress
        self._teacher = held_out.remember(teacher, f"{_one_line(teacher.name, 40)}: encoding")
        self._students = {
            run.name: held_out.remember(_load(run, trust=trust), f"{run.name}: encoding") for run in runs
        }

    def compare(self, tasks: Sequence[Task], texts: Sequence[Text]) -> Comparison:
        ranges = {run.name: found for run in self._runs if (found := read_ranges(run.folder)) is not None}
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
    ) -> tuple[dict[str, tuple[_SampleSearch, ...]], dict[int, str]]:
        """Search some queries in three modes; return the results by run, and the documents found."""
        chosen = sample(queries, _SAMPLE_QUERIES, seed=0)
        index = self._teacher.document(documents)
        by_teacher = _find_top(self._teacher.query(chosen), index, AGREEMENT_AT)
        found: dict[str, tuple[_SampleSearch, ...]] = {}
        places: set[int] = set()
        for name, student in self._same_width():
            vectors = student.query(chosen)
            asymmetric = _find_top(vectors, index, AGREEMENT_AT)
            alone = _find_top(vectors, student.document(documents), AGREEMENT_AT)
            found[name] = tuple(
                _SampleSearch(
                    query=_one_line(query, _LONGEST), teacher=teacher, asymmetric=in_theirs, student=in_own
                )
                for query, teacher, in_theirs, in_own in zip(
                    chosen, by_teacher, asymmetric, alone, strict=True
                )
            )
            places.update(*(top.documents for top in (*by_teacher, *asymmetric, *alone)))
        return found, {place: _one_line(documents[place], _LONGEST) for place in sorted(places)}

    def projections(self, queries: Sequence[str], documents: Sequence[str]) -> dict[str, _Projection]:
        """Project some texts' vectors of the teacher and each run on two dimensions, fitted to all texts."""

        def vectors(model: Embedder) -> Vectors:
            return np.vstack([model.query(queries), model.document(documents)])

        def points(found: Vectors) -> tuple[tuple[float, float], ...]:
            return tuple((x, y) for x, y in plane.transform(found[chosen]).round(4).tolist())

        texts = [*queries, *documents]
        chosen = sorted(sample(range(len(texts)), _PROJECTED, seed=0))
        theirs = vectors(self._teacher)
        plane, shown = _principal_plane(theirs)
        return {
            name: _Projection(
                texts=tuple(_one_line(texts[place], 120) for place in chosen),
                teacher=points(theirs),
                student=points(vectors(student)),
                shown=round(shown, 4),
            )
            for name, student in self._same_width()
        }

    def _same_width(self) -> list[tuple[str, Embedder]]:
        width = self._teacher.text(["width"]).shape[1]
        return [each for each in self._students.items() if each[1].text(["width"]).shape[1] == width]


def _load(run: _RunRecord, *, trust: bool) -> Embedder:
    if run.form.engine != _TORCH:
        return Encoder(run.folder, graph=run.form.engine).embedder(run.name)
    return embedder(load(run.folder, trust_remote_code=trust).float(), name=run.name)


def _open_teacher(name: str, opened: Teacher | None, *, trust: bool) -> tuple[SentenceTransformer, Embedder]:
    """Return the teacher in full precision: the opened one if it computes in it, otherwise loaded here."""
    if opened is not None and opened.model is not None and opened.embedder is not None:
        large = opened.model
        if large.dtype == torch.float32 and large.device.type == "cpu":  # a GPU labels in half precision
            return large, replace(opened.embedder, name=name)
    large = load(name, trust_remote_code=trust).float()
    return large, embedder(large, name=name)


def _measurements(number: int, run: _RunRecord, found: Comparison) -> _RunMeasurements:
    """Return the results of a comparison for its n-th run."""
    fidelity = next((one for one in found.fidelity if one.student == run.name), None)
    nearest, farthest = (
        tuple(replace(one, text=_one_line(one.text, _LONGEST)) for one in texts)
        for texts in ((fidelity.closest, fidelity.farthest) if fidelity else ((), ()))
    )
    return _RunMeasurements(
        quality=_quality(run.name, fidelity, found),
        tasks=_task_scores(number, found),
        shortened=tuple(one for one in found.inheritance if one.student == run.name),
        nearest=nearest,
        farthest=farthest,
    )


def _quality(name: str, fidelity: Fidelity | None, found: Comparison) -> _Quality | None:
    shares = {one.mode: one for one in found.shares if one.model == name and one.over == "all"}
    measured = []
    if fidelity:
        texts = f"{fidelity.queries:,} queries × {fidelity.documents:,} documents"
        measured.append(f"{texts} that the runs were not trained on")
    if shares:
        measured.append(_numbered(found.shares[0].tasks, "task", "tasks"))
    if not measured:
        return None
    names = ("k", "agreement_asymmetric", "agreement_standard", "cosine", "distance")
    figures: dict[str, Any] = {name: getattr(fidelity, name) for name in names} if fidelity else {}
    figures |= {f"share_{mode}": one.share for mode, one in shares.items()}
    return _Quality(measured=" and ".join(measured), **figures)


def _task_scores(number: int, found: Comparison) -> tuple[contents._TaskScore, ...]:
    """Return a run's scores next to the teacher's, which are the first row of the results."""
    if not found.results:
        return ()
    ours = {(result.kind, result.task, result.mode): result.score for result in found.results[number + 1]}
    return tuple(
        contents._TaskScore(
            task=theirs.task,
            kind=theirs.kind,
            measure=theirs.main,
            teacher=theirs.score,
            standard=ours[theirs.kind, theirs.task, "standard"],
            asymmetric=ours.get((theirs.kind, theirs.task, "asymmetric")),
        )
        for theirs in found.results[0]
    )


def _token_curve(model: SentenceTransformer, name: str, texts: Sequence[str]) -> contents._TokenCurve | None:
    """Count the share of the texts that the most frequent tokens cover; None without a list of tokens."""
    try:
        vocabulary = read_vocabulary(model)
    except UserError:
        return None
    size = max(vocabulary.size, max(vocabulary.tokens) + 1)
    counts = np.sort(count_tokens(tokenised(vocabulary.backend, texts), size).occurrences)[::-1]
    covered = np.cumsum(counts) / max(int(counts.sum()), 1)
    sizes = np.unique(np.geomspace(10, size, _CURVE_POINTS).round().astype(int))
    points = [(float(n), round(float(covered[n - 1]), 5)) for n in sizes]
    return contents._TokenCurve(tokenizer=name, texts=len(texts), points=tuple(points))


def _find_top(queries: Vectors, documents: Vectors, k: int) -> list[contents._TopDocuments]:
    positions = nearest(queries, documents, k)
    cosines = np.einsum("qd,qkd->qk", unit(queries), unit(documents)[positions]).round(4)
    return [
        contents._TopDocuments(documents=tuple(places), cosines=tuple(found))
        for places, found in zip(positions.tolist(), cosines.tolist(), strict=True)
    ]


def _principal_plane(vectors: Vectors) -> tuple[PCA, float]:
    """Fit the first two principal components; also return the share of the variance that they show."""
    with np.errstate(invalid="ignore"):  # equal vectors have no variance
        plane = PCA(2, svd_solver="full").fit(vectors.astype(np.float64))
    return plane, float(np.nan_to_num(plane.explained_variance_ratio_.sum(), nan=1.0))
