"""Students beside their teacher, on tasks with labels and on plain texts without, each model asked once for each text.

What this is not: it opens no model and prints nothing. The command line does both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trundle.data.texts import Text
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory
from trundle.evaluate.fidelity import (
    AGREEMENT_AT,
    FEWEST_DOCUMENTS,
    Fidelity,
    measure_fidelity,
    queries_and_documents,
)
from trundle.evaluate.scoring import Result, _Mode, _of_mode, evaluate
from trundle.evaluate.shortening import (
    Inheritance,
    _by_agreement,
    _by_tasks,
    _measure_inheritance,
    _Ranges,
    _Score,
    _usual_dimensions,
    measure_ranges,
)
from trundle.evaluate.tasks import Task
from trundle.progress import SILENT, Progress
from trundle.records import CALIBRATION_FILE

_PROBE = "How wide is a vector?"


@dataclass(frozen=True, kw_only=True)
class Share:
    """A student's mean over some tasks, beside its teacher's own over the same."""

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
        """How much of the teacher's mean is left; None where that is 0."""
        return self.mean / self.teacher_mean if self.teacher_mean else None

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self) | {"share": self.share}


@dataclass(frozen=True, kw_only=True)
class Shorten:
    """How vectors are to be shortened: to which dimensions (none: the usual ones), with which ranges for each model.

    A model without ranges of its own gets those of the teacher's vectors of the texts it is measured on.
    """

    dimensions: tuple[int, ...] = ()
    ranges: Mapping[str, _Ranges] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found of each model; empty where it was not asked for."""

    models: tuple[str, ...]
    teacher: str | None
    results: tuple[tuple[Result, ...], ...]
    """One row for each model, the teacher's own first where there is a teacher."""
    shares: tuple[Share, ...]
    fidelity: tuple[Fidelity, ...]
    inheritance: tuple[Inheritance, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "models": list(self.models),
            "teacher": self.teacher,
            "results": [result.as_json() for row in self.results for result in row],
            "shares": [share.as_json() for share in self.shares],
            "fidelity": [found.as_json() for found in self.fidelity],
            "inheritance": [found.as_json() for found in self.inheritance],
            "notes": list(self.notes),
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
    """Score each model on the tasks; with a teacher also on the teacher's index, and by agreement on the texts.

    `shorten` adds the same with vectors cut short and coarsened, on the tasks with documents where there are any.
    A model of another width than the teacher's can't search its index: it is scored alone, and a note says so.
    """
    if not tasks and not texts:
        raise BadInput("there is nothing to measure on; name tasks, or texts to compare with a teacher on")
    if texts and teacher is None:
        raise BadInput("texts without labels only show how near a model is to another; name its teacher")
    if shorten and teacher is None:
        raise BadInput("what a model inherits is seen beside its teacher; name the teacher")
    memory = Memory(progress)
    notes, near = _sorted_out(models, teacher)
    queries, documents = queries_and_documents(texts)
    if texts and len(documents) < FEWEST_DOCUMENTS:
        raise BadInput(
            f"{len(texts)} texts are too few to tell how far two models agree on the {AGREEMENT_AT} nearest; "
            f"give at least {2 * FEWEST_DOCUMENTS}"
        )
    if teacher and shorten:
        _check_shorten(shorten, near, teacher)
    everyone = [*([] if teacher is None else [teacher]), *models]
    results = tuple(
        tuple(
            evaluate(
                model, tasks, documents=teacher if model in near else None, memory=memory, progress=progress
            )
        )
        for model in everyone
        if tasks
    )
    fidelity, inheritance = [], []
    for model in near:
        assert teacher is not None
        if texts:
            fidelity.append(
                measure_fidelity(model, teacher, queries, documents, examples=examples, memory=memory)
            )
        if shorten:
            inheritance += _inherited(model, teacher, tasks, texts, shorten, memory, progress)
    return Comparison(
        models=tuple(model.name for model in models),
        teacher=None if teacher is None else teacher.name,
        results=results,
        shares=() if teacher is None else _shares_of(results),
        fidelity=tuple(fidelity),
        inheritance=tuple(inheritance),
        notes=tuple(notes),
    )


def _sorted_out(models: Sequence[Embedder], teacher: Embedder | None) -> tuple[list[str], list[Embedder]]:
    """The models that can search the teacher's index, and why the others can't."""
    if teacher is None:
        return [], []
    width = teacher.text([_PROBE]).shape[1]
    notes, near = [], []
    for model in models:
        own = model.text([_PROBE]).shape[1]
        if own == width:
            near.append(model)
        else:
            notes.append(
                f"{model.name} has vectors of {own} numbers and {teacher.name} of {width}, so it can't search "
                "that index; trundle align brings it there"
            )
    return notes, near


def _check_shorten(shorten: Shorten, models: Sequence[Embedder], teacher: Embedder) -> None:
    """Refuse what can't be done to these vectors, before anything is encoded."""
    width = teacher.text([_PROBE]).shape[1]
    for wanted in shorten.dimensions:
        if not 1 <= wanted <= width:
            raise BadInput(f"vectors of {width} numbers can't be cut to {wanted}; choose from 1 to {width}")
    for model in models:
        kept = shorten.ranges.get(model.name)
        if kept is not None and len(kept.lowest) != width:
            raise BadInput(
                f"the {CALIBRATION_FILE} of {model.name} is for vectors of {len(kept.lowest)} numbers, and "
                f"those of {teacher.name} have {width}; name the teacher it was aligned to"
            )


def _inherited(
    model: Embedder,
    teacher: Embedder,
    tasks: Sequence[Task],
    texts: Sequence[Text],
    shorten: Shorten,
    memory: Memory,
    progress: Progress,
) -> list[Inheritance]:
    """What is left of shortened vectors, by the tasks and by agreement on the texts."""
    master, pupil = (memory.remember(one, f"{one.name}: encoding") for one in (teacher, model))
    measured: dict[str, _Score] = {}
    if tasks:
        chosen = [task for task in tasks if task.has_documents] or list(tasks)
        names = ", ".join(task.name for task in chosen)
        measured[f"mean of {names}" if len(chosen) > 1 else names] = _by_tasks(chosen)
    if texts:
        measured[f"agreement@{AGREEMENT_AT} with whole vectors of the teacher"] = _by_agreement(
            master, *queries_and_documents(texts)
        )
    ranges, calibration = _calibration(model, teacher, shorten, memory)
    dimensions = shorten.dimensions or _usual_dimensions(len(ranges.lowest))
    return [
        _measure_inheritance(
            pupil,
            master,
            score,
            measure=measure,
            dimensions=dimensions,
            ranges=ranges,
            calibration=calibration,
            progress=progress,
        )
        for measure, score in measured.items()
    ]


def _calibration(model: Embedder, teacher: Embedder, shorten: Shorten, memory: Memory) -> tuple[_Ranges, str]:
    """The ranges to coarsen with, and where they come from."""
    kept = shorten.ranges.get(model.name)
    if kept is not None:
        return kept, f"{kept.vectors:,} training vectors of the teacher, kept with the model"
    seen = [memory.known(encode) for encode in dict.fromkeys((teacher.document, teacher.text))]
    ranges = measure_ranges([block for block in seen if block is not None], teacher.name)
    return ranges, f"{ranges.vectors:,} of the measured vectors: the model's folder keeps no ranges"


def _shares_of(results: Sequence[Sequence[Result]]) -> tuple[Share, ...]:
    """Means of both modes over all tasks, and over those with documents where there are others too.

    The first row is the teacher's.
    """
    if not results:
        return ()
    theirs = {(result.kind, result.task): result for result in results[0]}
    found = []
    for row in results[1:]:
        apart = {(result.kind, result.task) for result in row if result.mode == "asymmetric"}
        groups = {"all": set(theirs)} | ({"retrieval": apart} if apart and apart != set(theirs) else {})
        modes: tuple[_Mode, ...] = ("standard", "asymmetric") if apart else ("standard",)
        for over, keys in groups.items():
            for mode in modes:
                ours = [result for result in _of_mode(row, mode) if (result.kind, result.task) in keys]
                found.append(
                    Share(
                        model=row[0].model,
                        teacher=results[0][0].model,
                        mode=mode,
                        over=over,
                        tasks=len(ours),
                        mean=sum(result.score for result in ours) / len(ours),
                        teacher_mean=sum(theirs[r.kind, r.task].score for r in ours) / len(ours),
                    )
                )
    return tuple(found)
