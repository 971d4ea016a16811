"""From run folders to a report: read what they keep, open the models where something is to be measured, write both files.

Without texts and tasks no model is opened, and the report shows what the folders hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import trundle.bench as race
import trundle.data as data_room
import trundle.evaluate as judge
import trundle.model as body
from trundle.artifact import read_lineage, write_whole
from trundle.embedder import Embedder
from trundle.errors import BadInput, UserError
from trundle.evaluate.comparison import Comparison
from trundle.evaluate.encoding import Memory
from trundle.evaluate.fidelity import AGREEMENT_AT, MEASURED_TEXTS, Fidelity, queries_and_documents
from trundle.evaluate.samples import find_top, on_a_plane
from trundle.measure.token_counts import count_tokens, tokenised
from trundle.progress import SILENT, Progress
from trundle.report.figures import one_line
from trundle.report.page import page
from trundle.report.reading import TORCH, read_runs, thinned, weigh
from trundle.report.records import (
    Apart,
    Found,
    Kept,
    Measured,
    Projection,
    Quality,
    Report,
    Run,
    Search,
    Shortened,
    Speed,
    TaskScore,
    Teacher,
    TokenCurve,
)
from trundle.runtime import Encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.evaluate import Task

SAMPLE_QUERIES = 12
PROJECTED = 240
EXAMPLES = 8
LONGEST = 320
"""Characters of a text that are shown."""
CURVE_POINTS = 80
ROUNDS, SECONDS = 3, 0.4


def make_report(
    folders: Sequence[str | Path],
    *,
    teacher: str | None = None,
    data: Sequence[str] = (),
    tasks: Sequence[str] = (),
    texts: int = MEASURED_TEXTS,
    speed: bool = True,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Report:
    """Read the runs; with `data` or `tasks` also measure them beside their teacher, and with `speed` race them."""
    runs = read_runs(folders)
    chosen = find_tasks_in(tasks) if tasks else []
    if not data and not chosen:
        return Report(runs=runs, teacher=_weighed(teacher or _only(run.teacher for run in runs), runs))
    name = _teacher_here(runs, teacher)
    large = body.load(name, trust_remote_code=trust_remote_code).float()
    measuring = Measuring(runs, body.embedder(large, name=name), trust=trust_remote_code, progress=progress)
    lineages = [read_lineage(run.folder) for run in runs]
    read = data_room.unseen_texts(list(data), lineages, texts, progress=progress) if data else []
    queries, documents = queries_and_documents(read)
    found = measuring.compare(chosen, read)
    searches, shown = measuring.searches(queries, documents) if read else ({}, {})
    planes = measuring.planes(queries, documents) if read else {}
    speeds, machine = (
        _speeds(name, runs, [text.text for text in read], progress) if speed else ({}, "")
    )
    weighed = _weighed(name, runs)
    return Report(
        runs=runs,
        teacher=Teacher(
            name=weighed.name if weighed else name,
            path=name,
            parameters=sum(weight.numel() for weight in large.parameters()),
            bytes=weighed.bytes if weighed else None,
            speed=speeds.get(name),
        ),
        measured={
            run.name: Measured(
                quality=_quality(run.name, found),
                speed=speeds.get(run.folder),
                tasks=_task_scores(number, found),
                shortened=_shortened(run.name, found),
                nearest=_apart(found, run.name, near=True),
                farthest=_apart(found, run.name, near=False),
                searches=searches.get(run.name, ()),
                projection=planes.get(run.name),
            )
            for number, run in enumerate(runs)
        },
        documents=shown,
        tokens=_token_curve(large, name, documents) if any(run.coverage for run in runs) and read else None,
        machine=machine,
        notes=found.notes,
    )


def write_report(report: Report, output: str | Path) -> tuple[Path, Path]:
    """Write the page, and beside it the same as JSON."""
    place = Path(output)
    beside = place.with_suffix(".json")
    write_whole(place, page(report))
    write_whole(beside, json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n")
    return place, beside


def check_output(output: Path) -> None:
    """Refuse a place that can't hold a page, before anything heavy."""
    if output.suffix not in (".html", ".htm"):
        raise BadInput(f"{output} is no name for a page; end it in .html")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise BadInput(f"{output} can't be written; give a file in a folder that exists")


def find_tasks_in(places: Sequence[str]) -> list[Task]:
    """All tasks of folders that hold kinds of tasks, and tasks that are named by their own path."""
    found: list[Task] = []
    for place in places:
        kinds = [kind for kind in ("sts", "retrieval", "classification", "clustering", "pairs") if (Path(place) / kind).is_dir()]
        found += judge.find_tasks(["all"], place) if kinds else judge.find_tasks([place])
    return found


class Measuring:
    """The opened models; each is asked once for each text."""

    def __init__(self, runs: Sequence[Run], teacher: Embedder, *, trust: bool, progress: Progress) -> None:
        memory = Memory(progress)
        self._runs, self._progress = runs, progress
        self._teacher = memory.remember(teacher, f"{one_line(teacher.name, 40)}: encoding")
        self._students = {
            run.name: memory.remember(_opened(run, trust=trust), f"{run.name}: encoding") for run in runs
        }

    def compare(self, tasks: Sequence[Task], texts: Sequence[data_room.Text]) -> Comparison:
        """Tasks, fidelity, and vectors cut short."""
        ranges = {run.name: kept for run in self._runs if (kept := judge.read_ranges(run.folder)) is not None}
        return judge.compare(
            list(self._students.values()),
            teacher=self._teacher,
            tasks=tasks,
            texts=texts,
            examples=EXAMPLES,
            shorten=judge.Shorten(ranges=ranges) if texts else None,
            progress=self._progress,
        )

    def searches(
        self, queries: Sequence[str], documents: Sequence[str]
    ) -> tuple[dict[str, tuple[Search, ...]], dict[int, str]]:
        """What some queries find, by each run and by the teacher, and the documents that were found."""
        asked = data_room.sample(queries, SAMPLE_QUERIES, seed=0)
        index = self._teacher.document(documents)
        by_teacher = find_top(self._teacher.query(asked), index, AGREEMENT_AT)
        found: dict[str, tuple[Search, ...]] = {}
        for name, student in self._near():
            own = student.query(asked)
            ways = (by_teacher, find_top(own, index, AGREEMENT_AT), find_top(own, student.document(documents), AGREEMENT_AT))
            found[name] = tuple(
                Search(
                    query=one_line(query, LONGEST),
                    **{
                        who: Found(
                            documents=tuple(way.positions[row].tolist()),
                            cosines=tuple(round(float(cosine), 4) for cosine in way.cosines[row]),
                        )
                        for who, way in zip(("teacher", "asymmetric", "student"), ways, strict=True)
                    },
                )
                for row, query in enumerate(asked)
            )
        places = {
            place
            for searches in found.values()
            for search in searches
            for way in (search.teacher, search.asymmetric, search.student)
            for place in way.documents
        }
        return found, {place: one_line(documents[place], LONGEST) for place in sorted(places)}

    def planes(self, queries: Sequence[str], documents: Sequence[str]) -> dict[str, Projection]:
        """Each run's vectors and the teacher's on one plane; it is laid through all texts, and some are shown."""

        def vectors(model: Embedder) -> np.ndarray:
            return np.vstack([model.query(queries), model.document(documents)])

        texts = [*queries, *documents]
        chosen = sorted(data_room.sample(range(len(texts)), PROJECTED, seed=0))
        theirs = vectors(self._teacher)
        found = {}
        for name, student in self._near():
            plane = on_a_plane(theirs, vectors(student))
            found[name] = Projection(
                texts=tuple(one_line(texts[place], 120) for place in chosen),
                teacher=tuple((round(float(x), 4), round(float(y), 4)) for x, y in plane.teacher[chosen]),
                student=tuple((round(float(x), 4), round(float(y), 4)) for x, y in plane.student[chosen]),
                shown=round(plane.shown, 4),
            )
        return found

    def _near(self) -> list[tuple[str, Embedder]]:
        """The runs whose vectors are as wide as the teacher's."""
        width = self._teacher.text(["width"]).shape[1]
        return [(n, student) for n, student in self._students.items() if student.text(["width"]).shape[1] == width]


def _opened(run: Run, *, trust: bool) -> Embedder:
    if run.form.engine != TORCH:
        return Encoder(run.folder, graph=run.form.engine).embedder(run.name)
    return body.embedder(body.load(run.folder, trust_remote_code=trust).float(), name=run.name)


def _only(names: Iterable[str]) -> str | None:
    """The one name they all have, if they do."""
    found = set(names)
    return found.pop() if len(found) == 1 else None


def _teacher_here(runs: Sequence[Run], given: str | None) -> str:
    """The teacher to measure against: the one that was named, or the one all runs have."""
    name = given or _only(run.teacher for run in runs)
    if name is None:
        several = " and ".join(sorted({run.teacher for run in runs}))
        raise BadInput(f"the runs have different teachers ({several}); name one with --teacher")
    if name.startswith(("http://", "https://")) or name.endswith(".parquet"):
        raise BadInput(f"{name} can't be opened for a report; name the teacher's folder with --teacher")
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise BadInput(f"the teacher {name} is not here; say where it is with --teacher FOLDER")
    return name


def _weighed(name: str | None, runs: Sequence[Run]) -> Teacher | None:
    """What the teacher's files say, or what a lineage remembers of it."""
    if name is None:
        return None
    short = Path(name).name or name
    if Path(name).is_dir():
        size, parameters = weigh(Path(name))
        return Teacher(name=short, path=name, parameters=parameters or None, bytes=size or None)
    known = [run.origin for run in runs if run.source == name]
    if not known:
        return Teacher(name=short, path=name)
    return Teacher(name=short, path=name, parameters=known[0].get("parameters"), bytes=known[0].get("bytes"))


def _quality(name: str, found: Comparison) -> Quality | None:
    near = _fidelity(found, name)
    shares = {share.mode: share.share for share in found.shares if share.model == name and share.over == "all"}
    if near is None and not shares:
        return None
    on = [] if near is None else [f"{near.queries:,} queries × {near.documents:,} documents it has not learned from"]
    on += [f"{found.shares[0].tasks} tasks"] if shares else []
    return Quality(
        measured=" and ".join(on),
        k=AGREEMENT_AT if near is None else near.k,
        agreement_asymmetric=None if near is None else near.agreement_asymmetric,
        agreement_standard=None if near is None else near.agreement_standard,
        cosine=None if near is None else near.cosine,
        distance=None if near is None else near.distance,
        share_standard=shares.get("standard"),
        share_asymmetric=shares.get("asymmetric"),
    )


def _fidelity(found: Comparison, name: str) -> Fidelity | None:
    return next((one for one in found.fidelity if one.student == name), None)


def _task_scores(number: int, found: Comparison) -> tuple[TaskScore, ...]:
    """A run's scores beside the teacher's, whose row comes first."""
    if not found.results:
        return ()
    ours = {(result.kind, result.task, result.mode): result.score for result in found.results[number + 1]}
    return tuple(
        TaskScore(
            task=theirs.task,
            kind=theirs.kind,
            measure=theirs.main,
            teacher=theirs.score,
            standard=ours[theirs.kind, theirs.task, "standard"],
            asymmetric=ours.get((theirs.kind, theirs.task, "asymmetric")),
        )
        for theirs in found.results[0]
    )


def _shortened(name: str, found: Comparison) -> tuple[Shortened, ...]:
    return tuple(
        Shortened(
            measure=one.measure,
            rows=tuple(
                Kept(dimensions=row.dimensions, precision=row.precision, bytes=row.bytes, scores=row.scores)
                for row in one.rows
            ),
        )
        for one in found.inheritance
        if one.student == name
    )


def _apart(found: Comparison, name: str, *, near: bool) -> tuple[Apart, ...]:
    one = _fidelity(found, name)
    if one is None:
        return ()
    return tuple(
        Apart(text=one_line(error.text, LONGEST), distance=error.distance, cosine=error.cosine)
        for error in (one.closest if near else one.farthest)
    )


def _token_curve(model: SentenceTransformer, name: str, texts: Sequence[str]) -> TokenCurve | None:
    """What share of the texts the most frequent tokens are; None for a model whose tokens can't be listed."""
    try:
        vocabulary = body.read_vocabulary(model)
    except UserError:
        return None
    size = max(vocabulary.size, max(vocabulary.tokens) + 1)
    counts = np.sort(count_tokens(tokenised(vocabulary.backend, texts), size).occurrences)[::-1]
    covered = np.cumsum(counts) / max(int(counts.sum()), 1)
    sizes = np.unique(np.geomspace(10, size, CURVE_POINTS).round().astype(int))
    points = [(float(n), round(float(covered[n - 1]), 5)) for n in sizes]
    return TokenCurve(tokenizer=Path(name).name, texts=len(texts), points=thinned(points, CURVE_POINTS))


def _speeds(
    teacher: str, runs: Sequence[Run], texts: Sequence[str], progress: Progress
) -> tuple[dict[str, Speed], str]:
    """Every model raced against the others, each in a process of its own."""
    folders = [teacher, *(run.folder for run in runs)]
    result = race.bench(
        list(dict.fromkeys(folders)),
        texts=texts or None,
        rounds=ROUNDS,
        seconds=SECONDS,
        all_engines=True,
        progress=progress,
    )
    wanted = {teacher: TORCH} | {run.folder: run.form.engine for run in runs}
    found = {
        one.model: Speed(
            engine=one.engine,
            milliseconds=round(1e3 * one.short_latency_p50.value, 3),
            texts_per_second=round(one.long_texts_per_second.value, 2),
        )
        for one in result.models
        if one.engine == wanted[one.model]
    }
    machine = f"{result.machine.cpu}, {result.settings.threads} threads"
    warning = race.caution(result)
    return found, f"{machine}; {warning}" if warning else machine
