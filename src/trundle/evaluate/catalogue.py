"""From names to tasks: what lies in a folder of task files, and how a person may call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from trundle import evaluate
from trundle.errors import BadInput
from trundle.evaluate.tasks import (
    ClassificationTask,
    ClusteringTask,
    PairTask,
    RetrievalTask,
    SimilarityTask,
    Task,
)

KINDS: dict[str, Callable[..., Task]] = {
    kind.kind: kind for kind in (SimilarityTask, RetrievalTask, ClassificationTask, ClusteringTask, PairTask)
}
EVERYTHING = "all"
MTEB = "mteb:"
CORPUS = "corpus.parquet"

Place = tuple[str, Path]


def find_tasks(names: Sequence[str], root: str | Path | None = None, *, split: str = "test") -> list[Task]:
    """The tasks of these names, each once, in their order.

    A name is that of a file or folder under `root` (`STSBenchmark`, `sts/STS12`), a kind (`sts`, `retrieval`,
    `classification`, `clustering`, `pairs`), `all`, a path to such a file or folder, or `mteb:NAME`.
    """
    if isinstance(names, str) or not names:
        raise BadInput("no tasks were named; give a list of names, or ['all']")
    folder = None if root is None else Path(root)
    if folder is not None and not folder.is_dir():
        raise BadInput(f"{folder} is not a folder; give the one that holds {', '.join(KINDS)}")
    listing = [] if folder is None else [place for kind in KINDS for place in _of_kind(folder, kind)]
    found: dict[object, Task] = {}
    for name in names:
        if name.startswith(MTEB):
            found[name] = evaluate.MtebTask.named(name.removeprefix(MTEB), split=split)
            continue
        places = _listed(name, listing) or _at_path(Path(name))
        if not places:
            raise BadInput(_unknown(name, listing, folder))
        for kind, path in places:
            found[path.resolve()] = KINDS[kind](name=_label(path), path=path, split=split)
    return list(found.values())


def _of_kind(root: Path, kind: str) -> list[Place]:
    """Where the tasks of one kind are."""
    if kind == RetrievalTask.kind:
        return [(kind, corpus.parent) for corpus in sorted((root / kind).glob(f"*/{CORPUS}"))]
    return [(kind, path) for path in sorted((root / kind).glob("*.parquet"))]


def _label(path: Path) -> str:
    return path.name.removesuffix(".parquet")


def _listed(name: str, listing: Sequence[Place]) -> list[Place]:
    """The places a name stands for among those listed."""
    if name == EVERYTHING:
        return list(listing)
    if name in KINDS:
        return [(kind, path) for kind, path in listing if kind == name]
    places = [(kind, path) for kind, path in listing if name in (_label(path), f"{kind}/{_label(path)}")]
    if len(places) > 1:
        raise BadInput(
            f"{name} is the name of {len(places)} tasks; say {_either(f'{k}/{name}' for k, _ in places)}"
        )
    return places


def _at_path(path: Path) -> list[Place]:
    """The places a path stands for, by the folder it lies in."""
    if (path / CORPUS).is_file():
        return [(RetrievalTask.kind, path)]
    if path.is_dir() and path.name in KINDS:
        return _of_kind(path.parent, path.name)
    if path.is_file():
        kind = path.absolute().parent.name
        if kind not in KINDS or kind == RetrievalTask.kind:
            raise BadInput(
                f"{path} does not show what kind of task it is; put it in a folder named "
                f"{_either(kind for kind in KINDS if kind != RetrievalTask.kind)}"
            )
        return [(kind, path)]
    return []


def _unknown(name: str, listing: Sequence[Place], root: Path | None) -> str:
    """One sentence about a name nobody knows, with the nearest ones or all there are."""
    if root is None:
        return (
            f"{name} is not a path to a task; to use its name say which folder holds the tasks, with --root"
        )
    if name in KINDS:
        return f"there are no tasks of the kind {name} in {root}; put their files into {root / name}"
    labels = [_label(path) for _, path in listing]
    near = get_close_matches(name, [*labels, *(f"{kind}/{_label(path)}" for kind, path in listing), *KINDS])
    if near:
        return f"{name} is not a task in {root}; did you mean {_either(near)}?"
    return f"{name} is not a task in {root}; there are {', '.join(labels) or 'none'}"


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
