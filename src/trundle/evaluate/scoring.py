"""Tasks × model → results that say everything needed to take them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path, PurePath
from typing import Any, Literal

from trundle.embedder import Embedder, asymmetric
from trundle.errors import BadInput
from trundle.evaluate.encoding import Memory
from trundle.evaluate.tasks import (
    Task,
    _ClassificationTask,
    _ClusteringTask,
    _PairTask,
    _RetrievalTask,
    _SimilarityTask,
)
from trundle.progress import SILENT, Progress
from trundle.records import VERSIONED, versions

_Mode = Literal["standard", "asymmetric"]

_SEED = 42  # mteb's, so that figures compare
_USED = (*VERSIONED, "scipy", "mteb")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One model on one task. `documents` names the model that encoded the documents, where it was another."""

    task: str
    kind: str
    split: str
    mode: _Mode
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
    seed: int = _SEED,
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
    used = versions(_USED)
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
    mode: _Mode = "standard" if teacher is None else "asymmetric"
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


def _of_mode(results: Sequence[Result], mode: _Mode) -> list[Result]:
    """One result a task: those of the mode, and the standard one of tasks the mode changes nothing for."""
    chosen: dict[tuple[str, str], Result] = {}
    for result in results:
        if result.mode == mode or (result.mode == "standard" and (result.kind, result.task) not in chosen):
            chosen[result.kind, result.task] = result
    return list(chosen.values())


def _mean_score(results: Sequence[Result], mode: _Mode = "standard") -> float:
    """The mean of the main scores over tasks, each task counting once."""
    chosen = _of_mode(results, mode)
    if not chosen:
        raise BadInput("there are no results to take a mean of; evaluate at least one task")
    return sum(result.score for result in chosen) / len(chosen)


def _share_of_teacher(
    results: Sequence[Result], teacher: Sequence[Result], mode: _Mode = "standard"
) -> float:
    """The student's mean score as a share of the teacher's own, over the same data."""
    ours = {(result.kind, result.task): result.fingerprint for result in _of_mode(results, mode)}
    theirs = {(result.kind, result.task): result.fingerprint for result in _of_mode(teacher, "standard")}
    differing = sorted(task for _, task in {key for key, _ in ours.items() ^ theirs.items()})
    if differing:
        raise BadInput(
            f"student and teacher were not scored on the same data ({', '.join(differing)}); "
            "evaluate both on the same tasks"
        )
    whole = _mean_score(teacher)
    if whole == 0:
        raise BadInput("the teacher's mean score is 0, so there is no share of it; choose other tasks")
    return _mean_score(results, mode) / whole


_KINDS: dict[str, Callable[..., Task]] = {
    kind.kind: kind
    for kind in (_SimilarityTask, _RetrievalTask, _ClassificationTask, _ClusteringTask, _PairTask)
}
_EVERYTHING = "all"
_MTEB = "mteb:"
_CORPUS = "corpus.parquet"

_Place = tuple[str, Path]


def find_tasks(names: Sequence[str], root: str | Path | None = None, *, split: str = "test") -> list[Task]:
    """The tasks of these names, each once, in their order.

    A name is that of a file or folder under `root` (`STSBenchmark`, `sts/STS12`), a kind (`sts`, `retrieval`,
    `classification`, `clustering`, `pairs`), `all`, a path to such a file or folder, or `mteb:NAME`.
    """
    if isinstance(names, str) or not names:
        raise BadInput("no tasks were named; give a list of names, or ['all']")
    folder = None if root is None else Path(root)
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that holds {', '.join(_KINDS)}")
    listing = [] if folder is None else [place for kind in _KINDS for place in _of_kind(folder, kind)]
    found: dict[object, Task] = {}
    for name in names:
        if name.startswith(_MTEB):
            from trundle.evaluate.mteb import _MtebTask

            found[name] = _MtebTask.named(name.removeprefix(_MTEB), split=split)
            continue
        places = _listed(name, listing) or _at_path(Path(name))
        if not places:
            raise BadInput(_unknown(name, listing, folder))
        for kind, path in places:
            found[path.resolve()] = _KINDS[kind](name=_label(path), path=path, split=split)
    return list(found.values())


def _of_kind(root: Path, kind: str) -> list[_Place]:
    """Where the tasks of one kind are."""
    if kind == _RetrievalTask.kind:
        return [(kind, corpus.parent) for corpus in sorted((root / kind).glob(f"*/{_CORPUS}"))]
    return [(kind, path) for path in sorted((root / kind).glob("*.parquet"))]


def _label(path: Path) -> str:
    return path.name.removesuffix(".parquet")


def _listed(name: str, listing: Sequence[_Place]) -> list[_Place]:
    """The places a name stands for among those listed."""
    if name == _EVERYTHING:
        return list(listing)
    if name in _KINDS:
        return [(kind, path) for kind, path in listing if kind == name]
    places = [(kind, path) for kind, path in listing if name in (_label(path), f"{kind}/{_label(path)}")]
    if len(places) > 1:
        raise BadInput(
            f"{name} is the name of {len(places)} tasks; say {_either(f'{k}/{name}' for k, _ in places)}"
        )
    return places


def _at_path(path: Path) -> list[_Place]:
    """The places a path stands for, by the folder it lies in."""
    if (path / _CORPUS).is_file():
        return [(_RetrievalTask.kind, path)]
    if path.is_dir() and path.name in _KINDS:
        return _of_kind(path.parent, path.name)
    if path.is_file():
        kind = path.absolute().parent.name
        if kind not in _KINDS or kind == _RetrievalTask.kind:
            raise BadInput(
                f"{path} does not show what kind of task it is; put it in a folder named "
                f"{_either(kind for kind in _KINDS if kind != _RetrievalTask.kind)}"
            )
        return [(kind, path)]
    return []


def _unknown(name: str, listing: Sequence[_Place], root: Path | None) -> str:
    """One sentence about a name nobody knows, with the nearest ones or all there are."""
    if root is None:
        return (
            f"{name} is not a path to a task; to use its name say which folder holds the tasks, with --root"
        )
    if name in _KINDS:
        return f"there are no tasks of the kind {name} in {root}; put their files into {root / name}"
    labels = [_label(path) for _, path in listing]
    near = get_close_matches(name, [*labels, *(f"{kind}/{_label(path)}" for kind, path in listing), *_KINDS])
    if near:
        return f"{name} is not a task in {root}; did you mean {_either(near)}?"
    return f"{name} is not a task in {root}; there are {', '.join(labels) or 'none'}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
