"""Make and write reports: read run folders, measure their models if requested, write page and JSON.

Without texts and tasks no model is loaded, and the report shows what the folders contain.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.bench.rounds import BenchOptions, bench
from trundle.bench.workload import BenchResult, caution
from trundle.data.corpus import unseen_texts
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.evaluate.fidelity import MEASURED_TEXTS, queries_and_documents
from trundle.evaluate.scoring import find_tasks
from trundle.evaluate.tasks import Task
from trundle.folders import write_atomic
from trundle.progress import SILENT, Progress
from trundle.records import read_lineage
from trundle.report.contents import _Report, _RunRecord, _SpeedFigures, _TeacherModel
from trundle.report.markup import _numbered
from trundle.report.page import _page
from trundle.report.reading import _TORCH, _read_runs, _weigh
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.teacher.teacher import Teacher

_KINDS = ("sts", "retrieval", "classification", "clustering", "pairs")


def make_report(
    folders: Sequence[str | Path],
    *,
    teacher: str | Teacher | None = None,
    data: Sequence[str] = (),
    tasks: Sequence[str] = (),
    texts: int | Sequence[Text] = MEASURED_TEXTS,
    speed: bool | BenchResult = True,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> _Report:
    """Read the runs in `folders`; with `data` or `tasks`, also measure them and their teacher.

    `texts` is how many texts of `data` are used at most, or the texts themselves. `speed` is a benchmark of
    the teacher and the runs, or whether to run one. A `teacher` that a run has opened does not encode a
    held-out text again.
    """
    runs = _read_runs(folders)
    opened = None if isinstance(teacher, str) else teacher
    named = teacher if teacher is None or isinstance(teacher, str) else teacher.name
    teachers = [named] if named else sorted({run.teacher for run in runs})
    chosen = _find_tasks_in(tasks) if tasks else []
    read = [] if isinstance(texts, int) else list(texts)
    if not data and not chosen and not read:
        return _Report(runs=runs, teacher=_teacher_model(teachers[0], runs) if len(teachers) == 1 else None)
    # These import torch, which a report without measurements does not need.
    from trundle.report.measuring import _measurements, _Measuring, _open_teacher, _token_curve

    name = _check_teacher(teachers)
    large, theirs = _open_teacher(name, opened, trust=trust_remote_code)
    measuring = _Measuring(runs, theirs, trust=trust_remote_code, progress=progress)
    lineages = [read_lineage(run.folder) for run in runs]
    if data and isinstance(texts, int):
        read = unseen_texts(list(data), lineages, texts, progress=progress)
    queries, documents = queries_and_documents(read)
    found = measuring.compare(chosen, read)
    searches, shown = measuring.searches(queries, documents) if read else ({}, {})
    projections = measuring.projections(queries, documents) if read else {}
    if speed is True:
        speed = bench(
            list(dict.fromkeys([name, *(run.folder for run in runs)])),
            texts=[text.text for text in read] or None,
            options=BenchOptions(rounds=3, seconds=0.4),
            only={name: _TORCH} | {run.folder: run.form.engine for run in runs},
            trust_remote_code=trust_remote_code,
            progress=progress,
        )
    speeds = _speeds(name, runs, speed) if speed else {}
    model = _teacher_model(name, runs)
    cut = any(run.coverage for run in runs)
    return _Report(
        runs=runs,
        teacher=replace(
            model, parameters=sum(weight.numel() for weight in large.parameters()), speed=speeds.get(name)
        ),
        measured={
            run.name: replace(
                _measurements(number, run, found),
                speed=speeds.get(run.folder),
                searches=searches.get(run.name, ()),
                projection=projections.get(run.name),
            )
            for number, run in enumerate(runs)
        },
        documents=shown,
        tokens=_token_curve(large, model.name, [*queries, *documents]) if cut and read else None,
        machine=f"{speed.machine.cpu}, {_numbered(speed.settings.threads, 'thread', 'threads')}"
        if speed
        else "",
        busy=caution(speed) if speed else None,
        notes=found.notes,
    )


def write_report(report: _Report, output: str | Path) -> tuple[Path, Path]:
    """Write the page to `output` and the JSON next to it; return both paths."""
    page = Path(output)
    machine_readable = page.with_suffix(".json")
    write_atomic(page, _page(report))
    write_atomic(machine_readable, json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    return page, machine_readable


def check_output(output: Path) -> None:
    """Reject an output that can't be written, before any heavy work."""
    if output.suffix not in (".html", ".htm"):
        raise BadInput(f"{output} is not a name for an HTML file; end it in .html")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"{output} can't be written; name a file in a folder that exists")


def _find_tasks_in(places: Sequence[str]) -> list[Task]:
    """Find all tasks in folders that hold kinds of tasks, and tasks that are named by their own path."""
    found: list[Task] = []
    for place in places:
        holds_kinds = any((Path(place) / kind).is_dir() for kind in _KINDS)
        found += find_tasks(["all"], place) if holds_kinds else find_tasks([place])
    return found


def _check_teacher(teachers: Sequence[str]) -> str:
    """Return the one teacher to measure against; reject several, and one that can't be loaded."""
    if len(teachers) > 1:
        several = " and ".join(teachers)
        raise BadInput(f"the runs have different teachers ({several}); name one with --teacher")
    name = teachers[0]
    if teacher_kind(name) != "model":
        raise BadInput(f"a report can't load the teacher {name}; name its model folder with --teacher")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise BadInput(f"there is no folder for the teacher {name}; name it with --teacher FOLDER")
    return name


def _teacher_model(name: str, runs: Sequence[_RunRecord]) -> _TeacherModel:
    known = next((run.origin for run in runs if run.source == name), {})
    size, parameters = _weigh(Path(name)) if Path(name).is_dir() else (0, 0)
    return _TeacherModel(
        name=Path(name).name or name,
        path=name,
        parameters=parameters or known.get("parameters"),
        bytes=size or known.get("bytes"),
        layers=known.get("layers"),
        width=known.get("width"),
    )


def _speeds(teacher: str, runs: Sequence[_RunRecord], result: BenchResult) -> dict[str, _SpeedFigures]:
    """Return the speed of each run in its measured form and of the teacher in torch."""
    wanted = {teacher: _TORCH} | {run.folder: run.form.engine for run in runs}
    return {
        one.model: _SpeedFigures(
            engine=one.engine,
            milliseconds=round(1e3 * one.short_latency_p50.value, 3),
            texts_per_second=round(one.long_texts_per_second.value, 2),
        )
        for one in result.models
        if one.engine == wanted.get(one.model)
    }
