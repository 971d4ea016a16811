"""Compares students with their teacher on tasks and on plain texts; each model encodes each text once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trundle.data.texts import Text
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.fidelity import FEWEST_DOCUMENTS, Fidelity, measure_fidelity, queries_and_documents
from trundle.evaluate.scoring import Result, _mean_score, _Mode, _of_mode, evaluate
from trundle.evaluate.shortening import Inheritance, Shorten, _inherited
from trundle.evaluate.tasks import Task
from trundle.progress import SILENT, Progress
from trundle.records import CALIBRATION_FILE
from trundle.teacher.targets import HeldOutVectors

_PROBE = "How wide is a vector?"


@dataclass(frozen=True, kw_only=True)
class _Share:
    """A student's mean over some tasks, and its teacher's over the same."""

    model: str
    teacher: str
    mode: _Mode
    over: str
    """all, or retrieval: the tasks in which the two modes differ."""
    tasks: int
    mean: float
    teacher_mean: float

    @property
    def share(self) -> float | None:
        return self.mean / self.teacher_mean if self.teacher_mean else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of all models; empty if not requested."""

    models: tuple[str, ...]
    teacher: str | None
    results: tuple[tuple[Result, ...], ...]
    """One row per model, the teacher's first if there is a teacher."""
    shares: tuple[_Share, ...]
    fidelity: tuple[Fidelity, ...]
    inheritance: tuple[Inheritance, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self) | {
            "results": [result.as_json() for row in self.results for result in row],
            "shares": [asdict(share) | {"share": share.share} for share in self.shares],
        }


def compare(
    models: Sequence[Embedder],
    *,
    teacher: Embedder | None = None,
    tasks: Sequence[Task] = (),
    texts: Sequence[Text] = (),
    examples: int = 10,
    shorten: Shorten | None = None,
    progress: Progress = SILENT,
) -> Comparison:
    """Score each model on the tasks; with a teacher, also in its index and by agreement on the texts.

    `shorten` adds the same with truncated and quantised vectors, on the tasks with documents if there are
    any. A model of another width than the teacher can't search its index: it is scored alone, and a note says
    so.
    """
    if not tasks and not texts:
        raise BadInput("there is nothing to measure on; name tasks, or texts to compare with a teacher on")
    if texts and teacher is None:
        raise BadInput("texts without labels only show how close a model is to another; name its teacher")
    if shorten and teacher is None:
        raise BadInput("shortened vectors are compared with the teacher's; name the teacher")
    held_out = HeldOutVectors(progress)
    notes: list[str] = []
    aligned: list[Embedder] = []
    if teacher is not None:
        width = _width_of(teacher)
        widths = {model.name: _width_of(model) for model in models}
        aligned = [model for model in models if widths[model.name] == width]
        notes = [
            f"{name} has vectors of {own} dimensions and {teacher.name} of {width}, so it can't search that "
            "index; align it with trundle align"
            for name, own in widths.items()
            if own != width
        ]
    queries, documents = queries_and_documents(texts)
    if texts and len(documents) < FEWEST_DOCUMENTS:
        raise BadInput(f"{len(texts)} texts are too few; pass at least {2 * FEWEST_DOCUMENTS}")
    if teacher and shorten:
        _check_shorten(shorten, aligned, _width_of(teacher))
    results = []
    for model in [*([] if teacher is None else [teacher]), *models] if tasks else []:
        index = teacher if model in aligned else None
        results.append(tuple(evaluate(model, tasks, documents=index, held_out=held_out, progress=progress)))
    fidelity: list[Fidelity] = []
    inheritance: list[Inheritance] = []
    for model in aligned:
        assert teacher is not None
        if texts:
            near = measure_fidelity(model, teacher, queries, documents, examples=examples, held_out=held_out)
            fidelity.append(near)
        if shorten:
            inheritance += _inherited(model, teacher, tasks, texts, shorten, held_out, progress)
    return Comparison(
        models=tuple(model.name for model in models),
        teacher=None if teacher is None else teacher.name,
        results=tuple(results),
        shares=() if teacher is None else _shares_of(results),
        fidelity=tuple(fidelity),
        inheritance=tuple(inheritance),
        notes=tuple(notes),
    )


def _width_of(model: Embedder) -> int:
    return model.width or model.text([_PROBE]).shape[1]


def _check_shorten(shorten: Shorten, models: Sequence[Embedder], width: int) -> None:
    """Reject impossible settings before anything is encoded."""
    for wanted in shorten.dimensions:
        if not 1 <= wanted <= width:
            raise BadInput(f"vectors can't be truncated to {wanted} dimensions; choose from 1 to {width}")
    for model in models:
        kept = shorten.ranges.get(model.name)
        if kept is not None and len(kept.lowest) != width:
            other = f"the {CALIBRATION_FILE} of {model.name} is for vectors of {len(kept.lowest)} dimensions"
            raise BadInput(f"{other}, not {width}; name the teacher it was aligned to")


def _shares_of(results: Sequence[Sequence[Result]]) -> tuple[_Share, ...]:
    """Means of both modes over all tasks, and over those with documents if there are others.

    The first row is the teacher's.
    """
    if not results:
        return ()
    theirs = {(result.kind, result.task): result for result in results[0]}
    found = []
    for row in results[1:]:
        with_documents = {(result.kind, result.task) for result in row if result.mode == "asymmetric"}
        groups = {"all": set(theirs)}
        if with_documents and with_documents != set(theirs):
            groups["retrieval"] = with_documents
        modes: tuple[_Mode, ...] = ("standard", "asymmetric") if with_documents else ("standard",)
        for over, mode in ((over, mode) for over in groups for mode in modes):
            ours = [one for one in _of_mode(row, mode) if (one.kind, one.task) in groups[over]]
            share = _Share(
                model=row[0].model,
                teacher=results[0][0].model,
                mode=mode,
                over=over,
                tasks=len(ours),
                mean=_mean_score(ours, mode),
                teacher_mean=_mean_score([theirs[one.kind, one.task] for one in ours]),
            )
            found.append(share)
    return tuple(found)
