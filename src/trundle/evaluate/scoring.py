"""Score models on tasks; each distinct text is encoded once."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, Literal

from trundle.embedder import Embedder, asymmetric
from trundle.errors import BadInput
from trundle.evaluate.tasks import _TASK_KINDS, Task, _Scores
from trundle.progress import SILENT, Progress
from trundle.records import TRACKED, versions
from trundle.teacher.targets import HeldOutVectors

_Mode = Literal["standard", "asymmetric"]

_SEED = 42  # mteb's, so that figures are comparable
_USED = (*TRACKED, "scipy", "mteb")


@dataclass(frozen=True, kw_only=True)
class Result(_Scores):
    """One model on one task."""

    task: str
    kind: str
    mode: _Mode
    model: str
    documents: str | None
    """The model that encoded the documents, if it was another one."""
    score: float
    seconds: float
    versions: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """The same as plain values; `Result(**values)` reads them back."""
        return asdict(self)


def evaluate(
    embedder: Embedder,
    tasks: Sequence[Task],
    *,
    documents: Embedder | None = None,
    seed: int = _SEED,
    held_out: HeldOutVectors | None = None,
    progress: Progress = SILENT,
) -> list[Result]:
    """Score a model on tasks; texts whose vectors are in `held_out` are not encoded again.

    With `documents` (the teacher that built the index), a task with queries and documents is scored a second
    time, with queries encoded by the model and documents by the teacher. For other tasks that would be the
    same figure.
    """
    if not tasks:
        raise BadInput("there are no tasks to score; name at least one")
    held_out = held_out or HeldOutVectors(progress)
    used = versions(_USED)
    results = []
    for task in tasks:
        modes: tuple[_Mode, ...] = ("standard", "asymmetric")
        for mode in modes[: 2 if documents is not None and task.has_documents else 1]:
            model, teacher = held_out.remember(embedder, task.name), None
            if documents is not None and mode == "asymmetric":
                teacher = documents.name
                model = asymmetric(model, held_out.remember(documents, f"{task.name} by {teacher}"))
            began = time.perf_counter()
            scores = task.run(model, seed=seed)
            seconds = time.perf_counter() - began
            score = scores.measures[scores.main]
            name = f"{PurePath(embedder.name).name}, {task.name} ({mode}, {scores.split})"
            progress.say(f"{name}: {scores.main} {score:.4f}")
            result = Result(
                **vars(scores),
                task=task.name,
                kind=task.kind,
                mode=mode,
                model=embedder.name,
                documents=teacher,
                score=score,
                seconds=seconds,
                versions=used,
            )
            results.append(result)
    return results


def _of_mode(results: Sequence[Result], mode: _Mode) -> list[Result]:
    """One result per task: that of the mode, or the standard one if the task has no other."""
    chosen: dict[tuple[str, str], Result] = {}
    for result in results:
        if result.mode == mode or (result.mode == "standard" and (result.kind, result.task) not in chosen):
            chosen[result.kind, result.task] = result
    return list(chosen.values())


def _mean_score(results: Sequence[Result], mode: _Mode = "standard") -> float:
    chosen = _of_mode(results, mode)
    if not chosen:
        raise BadInput("there are no results to take a mean of; evaluate at least one task")
    return sum(result.score for result in chosen) / len(chosen)


_EVERYTHING = "all"
_MTEB = "mteb:"
_CORPUS, _RETRIEVAL = "corpus.parquet", "retrieval"

_TaskPath = tuple[str, Path]
"""The kind of a task, and its file or folder."""


def find_tasks(names: Sequence[str], root: str | Path | None = None, *, split: str = "test") -> list[Task]:
    """The tasks of these names, each once, in their order.

    A name is that of a file or folder under `root` (`STSBenchmark`, `sts/STS12`), a kind (`sts`, `retrieval`,
    `classification`, `clustering`, `pairs`), `all`, a path to such a file or folder, or `mteb:NAME`.
    """
    if isinstance(names, str) or not names:
        raise BadInput("no tasks were named; pass a list of names, or ['all']")
    folder = None if root is None else Path(root)
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; pass the one that holds {', '.join(_TASK_KINDS)}")
    listing = [] if folder is None else [path for kind in _TASK_KINDS for path in _of_kind(folder, kind)]
    found: dict[object, Task] = {}
    for name in names:
        if name.startswith(_MTEB):
            from trundle.evaluate.mteb import _MtebTask

            found[name] = _MtebTask.named(name.removeprefix(_MTEB), split=split)
            continue
        paths = _listed(name, listing) or _at_path(Path(name))
        if not paths:
            raise BadInput(_unknown(name, listing, folder))
        for kind, path in paths:
            found[path.resolve()] = _TASK_KINDS[kind](name=_label(path), path=path, split=split)
    return list(found.values())


def _of_kind(root: Path, kind: str) -> list[_TaskPath]:
    if kind == _RETRIEVAL:
        return [(kind, corpus.parent) for corpus in sorted((root / kind).glob(f"*/{_CORPUS}"))]
    return [(kind, path) for path in sorted((root / kind).glob("*.parquet"))]


def _label(path: Path) -> str:
    return path.name.removesuffix(".parquet")


def _listed(name: str, listing: Sequence[_TaskPath]) -> list[_TaskPath]:
    if name == _EVERYTHING:
        return list(listing)
    if name in _TASK_KINDS:
        return [(kind, path) for kind, path in listing if kind == name]
    paths = [(kind, path) for kind, path in listing if name in (_label(path), f"{kind}/{_label(path)}")]
    if len(paths) > 1:
        names = " or ".join(f"{kind}/{name}" for kind, _ in paths)
        raise BadInput(f"{name} is the name of {len(paths)} tasks; use {names}")
    return paths


def _at_path(path: Path) -> list[_TaskPath]:
    """The tasks at a path; the name of its folder is their kind."""
    if (path / _CORPUS).is_file():
        return [(_RETRIEVAL, path)]
    if path.is_dir() and path.name in _TASK_KINDS:
        return _of_kind(path.parent, path.name)
    if path.is_file():
        kind = path.absolute().parent.name
        kinds = [kind for kind in _TASK_KINDS if kind != _RETRIEVAL]
        if kind not in kinds:
            raise BadInput(
                f"{path} does not show its kind of task; put it in a folder named {' or '.join(kinds)}"
            )
        return [(kind, path)]
    return []


def _unknown(name: str, listing: Sequence[_TaskPath], root: Path | None) -> str:
    """The error for an unknown name, with similar names or all there are."""
    if root is None:
        return f"{name} is not a path to a task; to use names, pass the folder of the tasks with --root"
    if name in _TASK_KINDS:
        return f"there are no tasks of the kind {name} in {root}; put their files into {root / name}"
    labels = [_label(path) for _, path in listing]
    known = [*labels, *(f"{kind}/{_label(path)}" for kind, path in listing), *_TASK_KINDS]
    if close := get_close_matches(name, known):
        return f"{name} is not a task in {root}; did you mean {' or '.join(close)}?"
    return f"{name} is not a task in {root}; there are {', '.join(labels) or 'none'}"
