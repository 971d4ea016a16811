"""Tasks × model → results that say everything needed to take them again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any, Literal

from trundle.artifact import VERSIONED, versions
from trundle.embedder import Embedder, asymmetric
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory
from trundle.evaluate.tasks import Task
from trundle.progress import SILENT, Progress

Mode = Literal["standard", "asymmetric"]

SEED = 42  # mteb's, so that figures compare
USED = (*VERSIONED, "scipy", "mteb")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model on one task. `documents` names the model that encoded the documents, where it was another."""

    task: str
    kind: str
    split: str
    mode: Mode
    model: str
    documents: str | None
    main: str
    score: float
    measures: Mapping[str, float]
    texts: int
    seconds: float
    fingerprint: str
    seed: int
    settings: Mapping[str, Any]
    note: str
    versions: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; `Result(**values)` reads them back."""
        return asdict(self)


def evaluate(
    embedder: Embedder,
    tasks: Sequence[Task],
    *,
    documents: Embedder | None = None,
    seed: int = SEED,
    memory: Memory | None = None,
    progress: Progress = SILENT,
) -> list[Result]:
    """Score a model on tasks; each distinct text is encoded once, and not at all if `memory` knows it.

    With `documents` (the teacher whose index is there already) a task with queries and documents is scored a
    second time, queries by the model and documents by the teacher. Elsewhere that would be the same figure.
    """
    if not tasks:
        raise BadInput("there are no tasks to score; name at least one")
    memory = memory or Memory(progress)
    used = versions(USED)
    results = []
    for task in tasks:
        standard = memory.remember(embedder, task.name)
        results.append(_score(task, standard, None, seed=seed, used=used, progress=progress))
        if documents is not None and task.has_documents:
            teacher = memory.remember(documents, f"{task.name} by {documents.name}")
            results.append(_score(task, standard, teacher, seed=seed, used=used, progress=progress))
    return results


def _score(
    task: Task,
    model: Embedder,
    teacher: Embedder | None,
    *,
    seed: int,
    used: Mapping[str, str],
    progress: Progress,
) -> Result:
    began = time.perf_counter()
    scores = task.run(model if teacher is None else asymmetric(model, teacher), seed=seed)
    seconds = time.perf_counter() - began
    mode: Mode = "standard" if teacher is None else "asymmetric"
    who, measured = PurePath(model.name).name, f"{scores.main} {scores.measures[scores.main]:.4f}"
    progress.say(f"{who}, {task.name} ({mode}, {scores.split}): {measured}")
    return Result(
        task=task.name,
        kind=task.kind,
        split=scores.split,
        mode=mode,
        model=model.name,
        documents=None if teacher is None else teacher.name,
        main=scores.main,
        score=scores.measures[scores.main],
        measures=scores.measures,
        texts=scores.texts,
        seconds=seconds,
        fingerprint=scores.fingerprint,
        seed=scores.seed,
        settings=scores.settings,
        note=scores.note,
        versions=used,
    )


def of_mode(results: Sequence[Result], mode: Mode) -> list[Result]:
    """One result a task: those of the mode, and the standard one of tasks the mode changes nothing for."""
    chosen: dict[tuple[str, str], Result] = {}
    for result in results:
        if result.mode == mode or (result.mode == "standard" and (result.kind, result.task) not in chosen):
            chosen[result.kind, result.task] = result
    return list(chosen.values())


def mean_score(results: Sequence[Result], mode: Mode = "standard") -> float:
    """The mean of the main scores over tasks, each task counting once."""
    chosen = of_mode(results, mode)
    if not chosen:
        raise BadInput("there are no results to take a mean of; evaluate at least one task")
    return sum(result.score for result in chosen) / len(chosen)


def share_of_teacher(results: Sequence[Result], teacher: Sequence[Result], mode: Mode = "standard") -> float:
    """The student's mean score as a share of the teacher's own, over the same data."""
    ours = {(result.kind, result.task): result.fingerprint for result in of_mode(results, mode)}
    theirs = {(result.kind, result.task): result.fingerprint for result in of_mode(teacher, "standard")}
    differing = sorted(task for _, task in {key for key, _ in ours.items() ^ theirs.items()})
    if differing:
        raise BadInput(
            f"student and teacher were not scored on the same data ({', '.join(differing)}); "
            "evaluate both on the same tasks"
        )
    whole = mean_score(teacher)
    if whole == 0:
        raise BadInput("the teacher's mean score is 0, so there is no share of it; choose other tasks")
    return mean_score(results, mode) / whole
