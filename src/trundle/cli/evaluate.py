"""The verbs for a student and its teacher: measure them side by side, put them into one folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trundle.cli import console
from trundle.cli.common import _Data, _Force, _Json, _Quiet, _TrustRemoteCode, _Verbose
from trundle.cli.console import _calm_libraries, _show_json, _show_table, _terminal
from trundle.cli.tables import _compare_scores, _count, _fidelities, _inheritance, _scores, _text_errors
from trundle.errors import BadInput

if TYPE_CHECKING:
    from trundle.embedder import Embedder
    from trundle.evaluate.comparison import Comparison

_TORCH = "torch"
_Models = Annotated[
    list[str],
    typer.Argument(
        help="Model folders or hub names; without --teacher the first is what others are compared with."
    ),
]


def evaluate(
    models: _Models,
    tasks: Annotated[
        str | None, typer.Option(help="Comma-separated: names or kinds under --root, paths, or mteb:NAME.")
    ] = None,
    root: Annotated[Path | None, typer.Option(envvar="TRUNDLE_TASKS", help="Folder of task files.")] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The large model (or endpoint URL): also score each model's queries on its documents."
        ),
    ] = None,
    teacher_model: Annotated[str | None, typer.Option(help="Which model of an endpoint.")] = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="Score this graph of each model, such as onnx-int8, or the fastest; by default torch where it can."
        ),
    ] = None,
    data: _Data = None,
    examples: Annotated[
        int, typer.Option(min=0, help="How many of the worst and best texts of --data to show.")
    ] = 5,
    inherit: Annotated[
        bool, typer.Option("--inherit", help="Also with vectors cut short and kept as bytes or bits.")
    ] = False,
    dimensions: Annotated[
        str | None,
        typer.Option(help="Comma-separated: what --inherit cuts vectors to; powers of two by default."),
    ] = None,
    split: Annotated[str, typer.Option(help="test, or dev to choose settings by.")] = "test",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the results to this JSON file.")
    ] = None,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Score models on tasks, alone and on a teacher's index.

    With --teacher and --data: how far each model agrees with its teacher on your own texts, without labels. With
    --inherit: what is left when the vectors of both are shortened.
    """
    _calm_libraries(verbose=verbose)
    from trundle.data.corpus import unseen_texts
    from trundle.evaluate.comparison import Shorten, compare
    from trundle.evaluate.fidelity import MEASURED_TEXTS
    from trundle.evaluate.scoring import find_tasks
    from trundle.evaluate.shortening import read_ranges
    from trundle.export.open import open_embedder
    from trundle.folders import write_whole
    from trundle.records import read_lineage

    progress = _terminal(quiet=quiet or as_json)
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        raise BadInput(f"{output} can't be written; give a file in a folder that exists")
    if not tasks and not (teacher and data):
        raise BadInput("say what to measure on: --tasks, or --teacher and --data")
    if teacher is None and (data or inherit or dimensions):
        raise BadInput("--data, --inherit and --dimensions compare with a teacher; name it with --teacher")
    cuts = _numbers(dimensions)
    wanted = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    chosen = find_tasks(wanted, root, split=split) if wanted else []
    students = [name for name in dict.fromkeys(models) if not (teacher and _same(name, teacher))]
    if not students:
        students, teacher = models[:1], None
    index = None if teacher is None else _open_teacher(teacher, teacher_model, trust=trust)
    opened = [
        open_embedder(name, graph=graph, trust_remote_code=trust, progress=progress) for name in students
    ]
    shorten = None
    if inherit or cuts:
        ranges = {name: kept for name in students if (kept := read_ranges(name)) is not None}
        shorten = Shorten(dimensions=cuts, ranges=ranges)
    lineages = [read_lineage(name) for name in students]
    texts = unseen_texts(data, lineages, MEASURED_TEXTS, progress=progress) if data else []
    found = compare(
        [model for model, _ in opened],
        teacher=index,
        tasks=chosen,
        texts=texts,
        examples=examples,
        shorten=shorten,
        progress=progress,
    )
    run_by = tuple(f"{model.name} is run by {engine}." for model, engine in opened if engine != _TORCH)
    found = replace(found, notes=(*found.notes, *run_by))
    if output is not None:
        write_whole(output, json.dumps(found.as_json(), indent=2, ensure_ascii=False) + "\n")
    if as_json:
        _show_json(found.as_json())
    else:
        _show(found, None if teacher is None else teacher_model or teacher)


def _numbers(given: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in (given or "").split(",") if number.strip())
    except ValueError as error:
        raise BadInput(f"--dimensions takes whole numbers such as 256,64, not {given!r}") from error


def _same(name: str, teacher: str) -> bool:
    return name == teacher or (Path(name).is_dir() and Path(name).resolve() == Path(teacher).resolve())


def _open_teacher(name: str, endpoint_model: str | None, *, trust: bool) -> Embedder:
    """Whoever can be asked for the vector of any text."""
    from trundle.export.open import open_embedder
    from trundle.teacher import teacher_kind

    kind = teacher_kind(name)
    if kind == "endpoint":
        from trundle.teacher.endpoint import endpoint_teacher

        return endpoint_teacher(name, endpoint_model)
    if kind != "model":
        raise BadInput(f"{name} has vectors of its own texts only; name the model or endpoint that made them")
    model, _ = open_embedder(name, trust_remote_code=trust)
    return model


def _show(found: Comparison, teacher: str | None) -> None:
    from trundle.report.reading import short_names

    if teacher is None:
        _show_table(_scores(found.results, short_names(found.models)), texts=(0, 1))
        _show_notes(found)
        return
    names = short_names([teacher, *found.models])
    heading = dict(zip(found.models, names[1:], strict=True))
    if found.results:
        _show_table(_compare_scores(found, names), texts=(0, 1))
    if found.fidelity:
        near = [heading[one.student] for one in found.fidelity]
        if found.results:
            console._show()
        _show_table(_fidelities(found.fidelity, near, names[0]))
        for one in found.fidelity:
            if one.farthest:
                console._show()
                _show_table(_text_errors(one, heading[one.student]), texts=(2,))
    for left in found.inheritance:
        name = heading[left.student]
        console._show()
        _show_table(_inheritance(left, names[0], name), title=f"{name}, {left.measure}", texts=(1,))
        console._show(f"int8 calibrated on {left.calibration}.")
    _show_notes(found)


def _show_notes(found: Comparison) -> None:
    for note in found.notes:
        console._show()
        console._show(note)


def pair(
    student: Annotated[str, typer.Argument(help="The small model, in its teacher's space.")],
    teacher: Annotated[str, typer.Option(help="The large model's folder or hub name.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the pair.")],
    force: _Force = False,
    as_json: _Json = False,
    quiet: _Quiet = False,
    verbose: _Verbose = False,
    trust: _TrustRemoteCode = False,
) -> None:
    """Put a student and its teacher into one model folder.

    encode_query is the student's, encode_document the teacher's; plain sentence-transformers opens it.
    """
    _calm_libraries(verbose=verbose)
    from trundle.pipeline.pair import pair as put_together

    made = put_together(
        student,
        teacher,
        output=output,
        replace=force,
        trust_remote_code=trust,
        progress=_terminal(quiet=quiet or as_json),
    )
    if as_json:
        _show_json(made.as_json())
        return
    small, large = _count(made.query_parameters), _count(made.document_parameters)
    console._show(f"Written to {made.output}: queries by {small} parameters, documents by {large}.")
