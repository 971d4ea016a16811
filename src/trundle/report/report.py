"""From run folders to a report: read what they keep, open the models where something is to be measured, write both files.

Without texts and tasks no model is opened, and the report shows what the folders hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.bench.results import caution
from trundle.bench.rounds import BenchOptions, bench
from trundle.data.corpus import unseen_texts
from trundle.errors import BadInput
from trundle.evaluate.fidelity import MEASURED_TEXTS, queries_and_documents
from trundle.evaluate.scoring import find_tasks
from trundle.folders import write_whole
from trundle.model.encode import embedder
from trundle.model.load import load
from trundle.progress import SILENT, Progress
from trundle.records import read_lineage
from trundle.report.markup import _numbered
from trundle.report.measuring import _measured, _Measuring, _token_curve
from trundle.report.page import _page
from trundle.report.reading import _TORCH, _read_runs, _weigh
from trundle.report.records import _Report, _Run, _Speed, _Teacher
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.bench.results import BenchResult
    from trundle.evaluate.tasks import Task

_PAGES = (".html", ".htm")
_KINDS = ("sts", "retrieval", "classification", "clustering", "pairs")
_ROUNDS, _SECONDS = 3, 0.4


def make_report(
    folders: Sequence[str | Path],
    *,
    teacher: str | None = None,
    data: Sequence[str] = (),
    tasks: Sequence[str] = (),
    texts: int = MEASURED_TEXTS,
    speed: bool = True,
    raced: BenchResult | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> _Report:
    """Read the runs; with `data` or `tasks` also measure them beside their teacher, and with `speed` race them.

    A race of the teacher and the runs that was `raced` already is not run again.
    """
    runs = _read_runs(folders)
    chosen = _find_tasks_in(tasks) if tasks else []
    if not data and not chosen:
        common = teacher or _only(run.teacher for run in runs)
        return _Report(runs=runs, teacher=None if common is None else _weighed(common, runs))
    name = _teacher_here(runs, teacher)
    large = load(name, trust_remote_code=trust_remote_code).float()
    measuring = _Measuring(runs, embedder(large, name=name), trust=trust_remote_code, progress=progress)
    lineages = [read_lineage(run.folder) for run in runs]
    read = unseen_texts(list(data), lineages, texts, progress=progress) if data else []
    queries, documents = queries_and_documents(read)
    found = measuring.compare(chosen, read)
    searches, shown = measuring.searches(queries, documents) if read else ({}, {})
    planes = measuring.planes(queries, documents) if read else {}
    if speed and raced is None:
        raced = _race(name, runs, [text.text for text in read], progress)
    speeds, machine = _speeds(name, runs, raced) if raced else ({}, "")
    weighed = _weighed(name, runs)
    return _Report(
        runs=runs,
        teacher=replace(
            weighed,
            parameters=sum(weight.numel() for weight in large.parameters()),
            speed=speeds.get(name),
        ),
        measured={
            run.name: replace(
                _measured(number, run, found),
                speed=speeds.get(run.folder),
                searches=searches.get(run.name, ()),
                projection=planes.get(run.name),
            )
            for number, run in enumerate(runs)
        },
        documents=shown,
        tokens=_token_curve(large, weighed.name, [*queries, *documents])
        if any(run.coverage for run in runs) and read
        else None,
        machine=machine,
        notes=found.notes,
    )


def write_report(report: _Report, output: str | Path) -> tuple[Path, Path]:
    """Write the page, and beside it the same as JSON."""
    place = Path(output)
    beside = place.with_suffix(".json")
    write_whole(place, _page(report))
    write_whole(beside, json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    return place, beside


def check_output(output: Path) -> None:
    """Refuse a place that can't hold a page, before anything heavy."""
    if output.suffix not in _PAGES:
        raise BadInput(f"{output} is no name for a page; end it in .html")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"{output} can't be written; give a file in a folder that exists")


def _find_tasks_in(places: Sequence[str]) -> list[Task]:
    """All tasks of folders that hold kinds of tasks, and tasks that are named by their own path."""
    found: list[Task] = []
    for place in places:
        holds_kinds = any((Path(place) / kind).is_dir() for kind in _KINDS)
        found += find_tasks(["all"], place) if holds_kinds else find_tasks([place])
    return found


def _only(names: Iterable[str]) -> str | None:
    """The one name they all have, if they do."""
    found = set(names)
    return found.pop() if len(found) == 1 else None


def _teacher_here(runs: Sequence[_Run], given: str | None) -> str:
    """The teacher to measure against: the one that was named, or the one all runs have."""
    name = given or _only(run.teacher for run in runs)
    if name is None:
        several = " and ".join(sorted({run.teacher for run in runs}))
        raise BadInput(f"the runs have different teachers ({several}); name one with --teacher")
    if teacher_kind(name) != "model":
        raise BadInput(f"{name} can't be opened for a report; name the teacher's folder with --teacher")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise BadInput(f"the teacher {name} is not here; say where it is with --teacher FOLDER")
    return name


def _weighed(name: str, runs: Sequence[_Run]) -> _Teacher:
    """What the teacher's files say, or what a lineage remembers of it."""
    known = next((run.origin for run in runs if run.source == name), {})
    size, parameters = _weigh(Path(name)) if Path(name).is_dir() else (0, 0)
    return _Teacher(
        name=Path(name).name or name,
        path=name,
        parameters=parameters or known.get("parameters"),
        bytes=size or known.get("bytes"),
        layers=known.get("layers"),
        width=known.get("width"),
    )


def _race(teacher: str, runs: Sequence[_Run], texts: Sequence[str], progress: Progress) -> BenchResult:
    """Every model against the others, each in a process of its own."""
    folders = [teacher, *(run.folder for run in runs)]
    return bench(
        list(dict.fromkeys(folders)),
        texts=texts or None,
        options=BenchOptions(rounds=_ROUNDS, seconds=_SECONDS),
        all_engines=True,
        progress=progress,
    )


def _speeds(teacher: str, runs: Sequence[_Run], result: BenchResult) -> tuple[dict[str, _Speed], str]:
    """Of each model the form that is shipped, of the teacher torch; and what they were taken on."""
    wanted = {teacher: _TORCH} | {run.folder: run.form.engine for run in runs}
    found = {
        one.model: _Speed(
            engine=one.engine,
            milliseconds=round(1e3 * one.short_latency_p50.value, 3),
            texts_per_second=round(one.long_texts_per_second.value, 2),
        )
        for one in result.models
        if one.engine == wanted.get(one.model)
    }
    machine = f"{result.machine.cpu}, {_numbered(result.settings.threads, 'thread', 'threads')}"
    warning = caution(result)
    return found, f"{machine}; {warning}" if warning else machine
