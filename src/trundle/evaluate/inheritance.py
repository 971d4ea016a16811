"""What a student inherits: how teacher and student fare side by side when their vectors are cut short and coarsened.

Nothing is trained for it. Both are coarsened with the same ranges, taken from the teacher's vectors. LEAF's finding is that a
student's curve follows its teacher's, so each score is also given as a share of the same model's own at full length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trundle.embedder import Embedder, asymmetric
from trundle.evaluate.fidelity import AGREEMENT_AT, agreement
from trundle.evaluate.ranking import nearest
from trundle.evaluate.scoring import SEED
from trundle.evaluate.shortening import PRECISIONS, Precision, Ranges, bytes_of, with_shortened
from trundle.evaluate.tasks import Task
from trundle.progress import SILENT, Progress

Score = Callable[[Embedder], dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One way to keep vectors, and what searches in them score.

    Scores are the teacher's alone, those of the student's queries in the teacher's index, and the student's alone;
    `kept` is each as a share of its own with whole vectors.
    """

    dimensions: int
    precision: Precision
    bytes: int
    scores: dict[str, float]
    kept: dict[str, float | None]
    tasks: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """All ways to keep vectors, for one student."""

    student: str
    teacher: str
    measure: str
    calibration: str
    rows: tuple[Kept, ...]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def inherited(
    student: Embedder,
    teacher: Embedder,
    score: Score,
    *,
    measure: str,
    dimensions: Sequence[int],
    ranges: Ranges,
    calibration: str,
    progress: Progress = SILENT,
) -> Inheritance:
    """Score both models, and the student in the teacher's index, for each way to keep vectors.

    `score` gives a figure for each task; whole float32 vectors are always measured, as what the others are a share of.
    """
    width = len(ranges.lowest)
    ways = [
        (size, precision) for size in sorted({width, *dimensions}, reverse=True) for precision in PRECISIONS
    ]
    rows: list[Kept] = []
    with progress.task(f"shortened vectors, {student.name}", len(ways)) as advance:
        for size, precision in ways:
            master, pupil = (with_shortened(model, size, precision, ranges) for model in (teacher, student))
            figures = {
                "teacher": score(master),
                "asymmetric": score(asymmetric(pupil, master)),
                "student": score(pupil),
            }
            means = {who: sum(found.values()) / len(found) for who, found in figures.items()}
            whole = rows[0].scores if rows else means
            rows.append(
                Kept(
                    dimensions=size,
                    precision=precision,
                    bytes=bytes_of(size, precision),
                    scores=means,
                    kept={who: mean / whole[who] if whole[who] else None for who, mean in means.items()},
                    tasks=figures,
                )
            )
            advance(1)
    return Inheritance(
        student=student.name, teacher=teacher.name, measure=measure, calibration=calibration, rows=tuple(rows)
    )


def by_tasks(tasks: Sequence[Task], *, seed: int = SEED) -> Score:
    """Each task's main score."""

    def score(model: Embedder) -> dict[str, float]:
        found = {task.name: task.run(model, seed=seed) for task in tasks}
        return {name: scores.measures[scores.main] for name, scores in found.items()}

    return score


def by_agreement(
    teacher: Embedder, queries: Sequence[str], documents: Sequence[str], *, k: int = AGREEMENT_AT
) -> Score:
    """The share of the documents the whole teacher finds first that are found as well."""
    asked, held = list(dict.fromkeys(queries)), list(dict.fromkeys(documents))
    truth = nearest(teacher.query(asked), teacher.document(held), k)

    def score(model: Embedder) -> dict[str, float]:
        found = nearest(model.query(asked), model.document(held), k)
        return {f"agreement@{k}": agreement(truth, found)}

    return score
