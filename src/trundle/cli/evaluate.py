"""The commands for models that exist already: `evaluate`, `bench` and `pair`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trundle.cli.console import _show, _show_json, _show_table, _terminal
from trundle.cli.options import _CommonFlags, _Data, _Force, _Json, _Quiet, _TeacherModel
from trundle.cli.tables import _compare_scores, _count, _fidelities, _inheritance, _scores, _text_errors
from trundle.errors import BadInput

if TYPE_CHECKING:
    from trundle.embedder import Embedder
    from trundle.evaluate.comparison import Comparison
    from trundle.progress import Progress

_TORCH = "torch"
_Models = Annotated[
    list[str], Argument(help="Model folders or hub names; without --teacher, the first is the reference.")
]


def evaluate(
    flags: _CommonFlags,
    models: _Models,
    tasks: Annotated[
        str | None, Option(help="Comma-separated tasks: names or kinds in --root, paths, or mteb:NAME.")
    ] = None,
    root: Annotated[Path | None, Option(envvar="TRUNDLE_TASKS", help="Folder of task files.")] = None,
    teacher: Annotated[
        str | None, Option(help="Large model or endpoint URL; also scores queries on its documents.")
    ] = None,
    teacher_model: _TeacherModel = None,
    graph: Annotated[
        str | None, Option(help="Graph to score, such as onnx-int8 or fastest; default: torch if possible.")
    ] = None,
    data: _Data = None,
    examples: Annotated[int, Option(min=0, help="How many of the worst and best texts to show.")] = 5,
    inherit: Annotated[
        bool, Option("--inherit", help="Also score truncated, int8 and binary vectors.")
    ] = False,
    dimensions: Annotated[
        str | None, Option(help="For --inherit: dimensions such as 256,64; default: powers of 2.")
    ] = None,
    split: Annotated[str, Option(help="Split of the tasks: test, or dev for choosing settings.")] = "test",
    output: Annotated[Path | None, Option("--output", "-o", help="Also write this JSON file.")] = None,
) -> None:
    """Score models on tasks, alone and on a teacher's index.

    With --teacher and --data: how far each model agrees with its teacher on your own texts, without labels.
    With --inherit: how much is left when the vectors of both are truncated and quantised.
    """
    progress = flags.progress()
    from trundle.data.corpus import ENVIRONMENT, unseen_texts
    from trundle.data.files import parse_source
    from trundle.evaluate.comparison import compare
    from trundle.evaluate.fidelity import MEASURED_TEXTS
    from trundle.evaluate.scoring import find_tasks
    from trundle.evaluate.shortening import Shorten, read_ranges
    from trundle.export.open import open_embedder
    from trundle.folders import check_not_read, write_atomic
    from trundle.records import read_lineage

    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise BadInput(f"{output} can't be written; pass a file in a folder that exists")
    if output is not None:
        named = [source for source in data or [] if source != ENVIRONMENT]
        check_not_read(output, [file for source in named for file in parse_source(source).files])
    if not tasks and not (teacher and data):
        raise BadInput("pass what to evaluate on: --tasks, or --teacher and --data")
    if teacher is None and (data or inherit or dimensions):
        raise BadInput("--data, --inherit and --dimensions compare with a teacher; name it with --teacher")
    try:
        cuts = tuple(int(number) for number in (dimensions or "").split(",") if number.strip())
    except ValueError as error:
        raise BadInput(f"--dimensions takes whole numbers such as 256,64, not {dimensions!r}") from error
    wanted = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    chosen = find_tasks(wanted, root, split=split) if wanted else []
    students = [name for name in dict.fromkeys(models) if not (teacher and _same(name, teacher))]
    if not students:
        students, teacher = models[:1], None
    trust, large = flags.trust, None
    if teacher is not None:
        large = _open_teacher(teacher, teacher_model, trust=trust, progress=progress)
    loaded = [
        open_embedder(name, graph=graph, trust_remote_code=trust, progress=progress) for name in students
    ]
    shorten = None
    if inherit or cuts:
        ranges = {name: kept for name in students if (kept := read_ranges(name)) is not None}
        shorten = Shorten(dimensions=cuts, ranges=ranges)
    lineages = [read_lineage(name) for name in students]
    texts = unseen_texts(data, lineages, MEASURED_TEXTS, progress=progress) if data else []
    found = compare(
        [model for model, _ in loaded],
        teacher=large,
        tasks=chosen,
        texts=texts,
        examples=examples,
        shorten=shorten,
        progress=progress,
    )
    run_by = tuple(f"{model.name} is run by {engine}." for model, engine in loaded if engine != _TORCH)
    found = replace(found, notes=(*found.notes, *run_by))
    if output is not None:
        write_atomic(output, json.dumps(found.as_json(), indent=2, ensure_ascii=False) + "\n")
    if flags.as_json:
        _show_json(found.as_json())
    else:
        _show_comparison(found, None if teacher is None else teacher_model or teacher)


def _same(name: str, teacher: str) -> bool:
    return name == teacher or (Path(name).is_dir() and Path(name).resolve() == Path(teacher).resolve())


def _open_teacher(
    name: str, endpoint_model: str | None, *, graph: str | None = None, trust: bool, progress: Progress
) -> Embedder:
    from trundle.export.open import open_embedder
    from trundle.teacher import teacher_kind

    kind = teacher_kind(name)
    if kind == "endpoint":
        from trundle.teacher.endpoint import open_endpoint

        return open_endpoint(name, endpoint_model)[0]
    if kind != "model":
        raise BadInput(f"{name} has vectors of its own texts only; name the model or endpoint that made them")
    return open_embedder(name, graph=graph, trust_remote_code=trust, progress=progress)[0]


def _show_comparison(found: Comparison, teacher: str | None) -> None:
    from trundle.bench.results import short_names

    if teacher is None:
        _show_table(_scores(found.results, short_names(found.models)), texts=(0, 1))
    else:
        teacher_name, *names = short_names([teacher, *found.models])
        by_model = dict(zip(found.models, names, strict=True))
        if found.results:
            _show_table(_compare_scores(found, [teacher_name, *names]), texts=(0, 1))
        if found.fidelity:
            students = [by_model[one.student] for one in found.fidelity]
            _show_table(_fidelities(found.fidelity, students, teacher_name), gap=bool(found.results))
        for one in found.fidelity:
            if one.farthest:
                _show_table(_text_errors(one, by_model[one.student]), texts=(2,), gap=True)
        for left in found.inheritance:
            name = by_model[left.student]
            rows = _inheritance(left, teacher_name, name)
            _show_table(rows, title=f"{name}, {left.measure}", texts=(1,), gap=True)
            _show(f"int8 calibrated on {left.calibration}.")
    for note in found.notes:
        _show(f"\n{note}")


def bench(
    models: Annotated[list[str], Argument(help="Model folders or hub names; the first is the reference.")],
    data: _Data = None,
    rounds: Annotated[int, Option(help="How many times each metric is measured.")] = 5,
    seconds: Annotated[float, Option(help="Seconds per metric and round.")] = 0.5,
    batch_size: Annotated[int, Option(help="Texts per batch when throughput is measured.")] = 32,
    threads: Annotated[int | None, Option(help="Threads for each model; default: all cores.")] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
) -> None:
    """Compare speed, latency, memory and size of models.

    Each model runs in its own process; measurements are interleaved. Without --data, texts are generated.
    """
    from trundle.bench.results import caution, rows
    from trundle.bench.rounds import BenchOptions
    from trundle.bench.rounds import bench as measure

    texts = None
    if data:
        from trundle.data.texts import read_texts

        texts = (text.text for text in read_texts(data))
    result = measure(
        models,
        texts=texts,
        options=BenchOptions(rounds=rounds, seconds=seconds, batch_size=batch_size, threads=threads),
        all_engines=True,
        progress=_terminal(quiet=quiet or as_json),
    )
    if as_json:
        _show_json(result.as_dict())
        return
    _show_table(rows(result))
    if warning := caution(result):
        _show(warning)


def pair(
    flags: _CommonFlags,
    student: Annotated[str, Argument(help="The small model, in its teacher's vector space.")],
    teacher: Annotated[str, Option(help="The large model's folder or hub name.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the pair.")],
    force: _Force = False,
) -> None:
    """Put a student and its teacher into one model folder.

    encode_query uses the student, encode_document the teacher; plain sentence-transformers loads it.
    """
    progress = flags.progress()
    from trundle.pipeline.pair import pair as write_pair

    made = write_pair(
        student, teacher, output=output, replace=force, trust_remote_code=flags.trust, progress=progress
    )
    if flags.as_json:
        _show_json(made.as_json())
        return
    small, large = _count(made.query_parameters), _count(made.document_parameters)
    _show(f"Written to {made.output}: {small} parameters for queries, {large} for documents.")
