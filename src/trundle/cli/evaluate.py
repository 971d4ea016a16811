"""The commands for models that exist already: `inspect`, `evaluate`, `bench` and `pair`."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from trundle.cli import console, tables
from trundle.errors import BadInput
from trundle.folders import check_free, check_not_read, write_atomic
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.embedder import Embedder
    from trundle.evaluate.comparison import Comparison
    from trundle.methods.depth.curve import LayerCurve
    from trundle.progress import Progress

_TORCH = "torch"
_Models = Annotated[
    list[str], Argument(help="Model folders or hub names; without --teacher, the first is the reference.")
]


def evaluate(
    flags: console._CommonFlags,
    models: _Models,
    tasks: Annotated[
        list[str] | None,
        Option(help="Tasks: names or kinds in --root, paths, or mteb:NAME; comma-separated or repeated."),
    ] = None,
    root: Annotated[Path | None, Option(envvar="TRUNDLE_TASKS", help="Folder of task files.")] = None,
    teacher: Annotated[
        str | None, Option(help="Large model, endpoint URL or table of vectors; its index is searched too.")
    ] = None,
    teacher_model: console._TeacherModel = None,
    graph: Annotated[
        str | None, Option(help="Graph to score, such as onnx-int8 or fastest; default: torch if possible.")
    ] = None,
    data: console._Data = None,
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
    _check_writable(output)
    if output is not None and data:
        from trundle.data.corpus import files_of

        check_not_read(output, files_of(data))
    if not tasks and not (teacher and data):
        raise BadInput("pass what to evaluate on: --tasks, or --teacher and --data")
    if teacher is None and (data or inherit or dimensions):
        raise BadInput("--data, --inherit and --dimensions compare with a teacher; name it with --teacher")
    try:
        cuts = tuple(int(number) for number in (dimensions or "").split(",") if number.strip())
    except ValueError as error:
        raise BadInput(f"--dimensions takes whole numbers such as 256,64, not {dimensions!r}") from error
    folder = None if teacher is None else Path(teacher).resolve()
    students = [name for name in dict.fromkeys(models) if Path(name).resolve() != folder]
    if not students and data:
        raise BadInput(f"{teacher} would be compared with itself; name another model, or another --teacher")
    console._check_inputs(data=data, graph=graph)
    progress = flags.progress()
    from trundle.data.corpus import unseen_texts
    from trundle.evaluate.comparison import compare
    from trundle.evaluate.fidelity import MEASURED_TEXTS
    from trundle.evaluate.scoring import find_tasks
    from trundle.evaluate.shortening import Shorten, read_ranges
    from trundle.export.open import open_embedder
    from trundle.records import read_lineage

    chosen = find_tasks(console._several(tasks), root, split=split) if tasks else []
    console._check_inputs(*models, teacher=teacher, trust=flags.trust)
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
    if not flags.shows_json(found.as_json()):
        _show_comparison(found, None if teacher is None else teacher_model or teacher)


def _open_teacher(
    name: str, endpoint_model: str | None, *, graph: str | None = None, trust: bool, progress: Progress
) -> Embedder:
    from trundle.export.open import open_embedder

    kind = teacher_kind(name)
    if kind == "endpoint":
        from trundle.teacher.endpoint import open_endpoint

        return open_endpoint(name, endpoint_model)[0]
    if kind != "model":
        from trundle.teacher.stored import stored_embedder
        from trundle.teacher.teacher import open_teacher

        return stored_embedder(open_teacher(name, progress=progress).stored(progress=progress), name)
    return open_embedder(name, graph=graph, trust_remote_code=trust, progress=progress)[0]


def _show_comparison(found: Comparison, teacher: str | None) -> None:
    from trundle.bench.workload import short_names

    if teacher is None:
        console._show_table(tables._scores(found.results, short_names(found.models)), texts=(0, 1))
    else:
        teacher_name, *names = short_names([teacher, *found.models])
        by_model = dict(zip(found.models, names, strict=True))
        if found.results:
            console._show_table(tables._compare_scores(found, [teacher_name, *names]), texts=(0, 1))
        if found.fidelity:
            students = [by_model[one.student] for one in found.fidelity]
            console._show_table(
                tables._fidelities(found.fidelity, students, teacher_name), gap=bool(found.results)
            )
        for one in found.fidelity:
            if one.farthest:
                console._show_table(tables._text_errors(one, by_model[one.student]), texts=(2,), gap=True)
        for left in found.inheritance:
            name = by_model[left.student]
            rows = tables._inheritance(left, teacher_name, name)
            console._show_table(rows, title=f"{name}, {left.measure}", texts=(1,), gap=True)
            console._show(f"int8 calibrated on {left.calibration}.")
    for note in found.notes:
        console._show(f"\n{note}")


def bench(
    flags: console._CommonFlags,
    models: Annotated[list[str], Argument(help="Model folders or hub names; the first is the reference.")],
    data: console._Data = None,
    rounds: Annotated[int, Option(help="How many times each metric is measured.")] = 5,
    seconds: Annotated[float, Option(help="Seconds per metric and round.")] = 0.5,
    batch_size: Annotated[int, Option(help="Texts per batch when throughput is measured.")] = 32,
    threads: Annotated[int | None, Option(help="Threads for each model; default: all cores.")] = None,
) -> None:
    """Compare speed, latency, memory and size of models.

    Each model runs in its own process; measurements are interleaved. Without --data, texts are generated.
    """
    console._check_inputs(*models, data=data)
    from trundle.bench.rounds import BenchOptions
    from trundle.bench.rounds import bench as measure
    from trundle.bench.workload import caution, rows

    texts = None
    if data:
        from trundle.data.texts import read_texts

        texts = (text.text for text in read_texts(data))
    result = measure(
        models,
        texts=texts,
        options=BenchOptions(rounds=rounds, seconds=seconds, batch_size=batch_size, threads=threads),
        all_engines=True,
        trust_remote_code=flags.trust,
        progress=flags.progress(),
    )
    if flags.shows_json(result.as_dict()):
        return
    console._show_table(rows(result))
    if warning := caution(result):
        console._show(warning)


def pair(
    flags: console._CommonFlags,
    student: Annotated[str, Argument(help="The small model, in its teacher's vector space.")],
    teacher: Annotated[str, Option(help="The large model's folder or hub name.")],
    output: Annotated[Path, Option("--output", "-o", help="Folder for the pair.")],
    force: console._Force = False,
) -> None:
    """Put a student and its teacher into one model folder.

    encode_query uses the student, encode_document the teacher; plain sentence-transformers loads it.
    """
    if teacher_kind(teacher) != "model":
        raise BadInput(f"a pair holds both models, and {teacher} is not a model; pass the teacher's folder")
    check_free(output, replace=force, read=[student, teacher])
    console._check_inputs(student, teacher, trust=flags.trust)
    progress = flags.progress()
    from trundle.pipeline.pair import pair as write_pair

    made = write_pair(
        student, teacher, output=output, replace=force, trust_remote_code=flags.trust, progress=progress
    )
    if flags.shows_json(made.as_json()):
        return
    small, large = tables._count(made.query_parameters), tables._count(made.document_parameters)
    console._show(f"Written to {made.output}: {small} parameters for queries, {large} for documents.")


def inspect(
    flags: console._CommonFlags,
    model: console._Model,
    layers: Annotated[
        bool, Option("--layers", help="Plot the loss if the model ended at each layer; needs --data.")
    ] = False,
    vocabulary: Annotated[
        bool, Option("--vocabulary", help="Show how much of your texts smaller vocabularies cover.")
    ] = False,
    data: Annotated[
        list[str] | None,
        Option("--data", "-d", help="Labelled tuples for --layers, texts for --vocabulary; repeatable."),
    ] = None,
    scale: Annotated[float, Option(min=0.1, help="With --layers: multiplier of cosines in the loss.")] = 20.0,
    output: Annotated[
        Path | None, Option("--output", "-o", help="With --layers: plot to this .html or .svg file.")
    ] = None,
    seed: console._Seed = 0,
) -> None:
    """Show the size of each part and what each method could save."""
    if layers and vocabulary:
        raise BadInput("--layers and --vocabulary exclude each other; pass one at a time")
    if layers and not data:
        raise BadInput("--layers compares the layers on tuples of query and positive; pass them with --data")
    if data and not layers and not vocabulary:
        raise BadInput("--data is for inspecting layers or tokens; add --layers or --vocabulary")
    if not layers and output is not None:
        raise BadInput("--output is for the plot of the layers; add --layers")
    if output is not None and output.suffix not in (".html", ".svg"):
        raise BadInput(f"{output} is not a supported file type; use a name that ends in .html or .svg")
    _check_writable(output)
    console._check_inputs(data=data)
    progress = flags.progress()
    corpus = None
    if data:
        from trundle.data.corpus import read_corpus

        corpus = read_corpus(data, seed=seed, progress=progress)
        if layers:
            next(corpus.examples(), None)  # rejects a file without tuples
    console._check_inputs(model, trust=flags.trust)
    from trundle.methods.depth.curve import list_savings, measure_curve
    from trundle.model.cost import cost
    from trundle.model.load import load

    loaded = load(model, trust_remote_code=flags.trust)
    if vocabulary:
        from trundle.methods.contract import Context
        from trundle.methods.vocabulary.vocabulary import list_sizes

        sizes = list_sizes(loaded, Context(original=loaded, corpus=corpus, seed=seed, progress=progress))
        if not flags.shows_json({"model": model, **sizes.as_json()}):
            scored = f"scored on {sizes.texts:,} texts of {sizes.tokens:,} tokens"
            measured = f"tokens per text measured on {sizes.held_out:,} others"
            console._show(f"{model}: {sizes.rows[0].keep:,} tokens, {scored}; {measured}")
            table = tables._vocabulary(sizes)
            console._show_table(table, texts=(1, 3, len(table[0]) - 1), gap=True)
        return
    family, about = tables._described(loaded)
    now, savings = cost(loaded), list_savings(loaded)
    rows = [{"step": saving.name, "keeps": saving.keeps, **saving.after.as_json()} for saving in savings]
    shown: dict[str, Any] = {"model": model, "family": family, **now.as_json(), "savings": rows}
    curve = None
    if layers and corpus is not None:
        curve = measure_curve(loaded, corpus.examples(), scale=scale, seed=seed, progress=progress)
        shown["curve"] = curve.as_json()
        if output is not None:
            _write_curve(output, model, loaded, curve)
    if flags.shows_json(shown):
        return
    console._show(f"{model}: {about}, vectors of {loaded.get_embedding_dimension()} dimensions")
    console._show_table(tables._parts(now), texts=(0, 2), gap=True)
    if savings:
        title = f"What each method could save (FLOPs at {now.length} tokens per text)"
        console._show_table(tables._savings(now, savings), title=title, texts=(0, 1), gap=True)
    if curve is not None:
        tuples = f"({curve.tuples:,} tuples)"
        console._show(f"\nThe loss of each layer as the last one, before any training {tuples}\n")
        for line in console._curve(curve.losses, _marks(curve)):
            console._show(f"  {line}")
        console._show_table(_layer_rows(loaded, curve), texts=(0, 1), gap=True)
        for note in _layer_notes(curve):
            console._show(note)
        if output is not None:
            console._show(f"Written to {output}")


def _check_writable(output: Path | None) -> None:
    if output is not None and (output.is_dir() or not os.access(output.absolute().parent, os.W_OK)):
        raise BadInput(f"{output} can't be written; pass a file in a folder that exists and is writable")


def _write_curve(output: Path, name: str, model: SentenceTransformer, curve: LayerCurve) -> None:
    from trundle.report.page import curve_page, curve_svg

    title = f"{Path(name).name}: the loss of each layer as the last one, {curve.tuples:,} tuples"
    drawn = curve.losses, _marks(curve), title
    if output.suffix == ".svg":
        write_atomic(output, curve_svg(*drawn))
    else:
        write_atomic(output, curve_page(*drawn, _layer_rows(model, curve), _layer_notes(curve)))


def _marks(curve: LayerCurve) -> dict[int, str]:
    large = {curve.large: "large"}
    return large if curve.small is None else {curve.small: "small"} | large


def _layer_rows(model: SentenceTransformer, curve: LayerCurve) -> tables._Rows:
    from trundle.methods.depth.curve import layer_savings
    from trundle.model.cost import cost

    savings = layer_savings(model, curve)
    heading, *lines = tables._savings(cost(model), savings)
    shown = [
        (method, keeps, f"{curve.losses[saving.after.layers - 1]:.3f}", *rest)
        for (method, keeps, *rest), saving in zip(lines, savings, strict=True)
    ]
    return [("", heading[1], "loss", *heading[2:]), *shown]


def _layer_notes(curve: LayerCurve) -> list[str]:
    notes = []
    if curve.large == curve.layers:
        notes.append("No layer of the upper half has a lower loss than the last one: large cuts nothing.")
    if curve.advice is not None:
        notes.append(f"{curve.advice[0].upper()}{curve.advice[1:]}.")
    if curve.small is None:
        notes.append("A model of one layer has nothing to cut; depth --keep 0 makes it static.")
    else:
        notes.append("Cut with: trundle depth MODEL --pick large --data TUPLES -o FOLDER; then train it.")
    return notes
