"""The commands `compress`, `recipes` and `demo`, and the run behind every method's own command."""

from __future__ import annotations

import sys
import time
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from trundle.cli import console, tables
from trundle.errors import BadInput, UserError
from trundle.folders import check_free, write_atomic
from trundle.progress import Stopwatch, is_first
from trundle.records import PLANNING_FILE
from trundle.search.limits import MINUTES, TeacherOptions, parse_budget
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.pipeline.run import Run
    from trundle.progress import Progress
    from trundle.recipe import Recipe
    from trundle.search.trials import Outcome
    from trundle.teacher.teacher import Teacher

_REPORT, _DEMO = "report.html", Path("demo/small")
_SHOWN_CANDIDATES = 12
_INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended
_BUDGET = "4x"


@dataclass(frozen=True, kw_only=True)
class _SearchFlags(console._RunFlags, console._IndexFlags):
    """The flags of `compress`."""


def compress(
    flags: _SearchFlags,
    model: Annotated[
        str | None,
        Argument(help="A model folder or hub name; with --budget any teacher: an endpoint, table or store."),
    ] = None,
    budget: Annotated[
        list[str] | None,
        Option(
            "--budget",
            "-b",
            help="A limit: 12MB, 10x (smaller), 20M-params or 5ms (a query); repeatable; default: 4x.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, Option("--recipe", "-r", help="Instead of a budget: a recipe's name, or a .yaml file.")
    ] = None,
    minutes: Annotated[
        float | None,
        Option(min=0.1, max=1e5, help="Minutes for the search (default: 30), or for a recipe's training."),
    ] = None,
    student: Annotated[
        list[str] | None,
        Option("--student", help="With --budget: also try this small model; with --recipe: train this one."),
    ] = None,
    index: Annotated[str | None, Option(help="Learn from this index, such as postgresql://host/db.")] = None,
    teacher: Annotated[
        str | None, Option(help="With --index: the model or endpoint that made it; it labels queries.")
    ] = None,
    teacher_model: console._TeacherModel = None,
    queries: Annotated[
        str | None, Option(help="With --index and --teacher: a file of your users' queries.")
    ] = None,
    fast: Annotated[
        bool,
        console._expert("--fast", help="With --budget: matmuls of int4 graphs in int8: faster, less exact."),
    ] = False,
    change: Annotated[
        list[str] | None, console._expert("--set", help="Change the recipe: method.option=value; repeatable.")
    ] = None,
    rows: Annotated[
        int | None, console._expert(min=100, help="Maximum rows to read of the index; default: 100,000.")
    ] = None,
    teacher_calls: Annotated[
        int | None,
        console._expert(min=1, help="Maximum texts that an endpoint or --teacher gets; default: 5,000."),
    ] = None,
) -> None:
    """Make a small model from a large one, for a budget or by a recipe.

    With a budget, trundle searches for the best model within all limits and trains it. With --index, it
    learns from the texts and vectors of an index, and says whether its queries find the same.
    """
    if recipe is not None and budget:
        raise BadInput("--budget searches and --recipe runs fixed methods; leave one of them out")
    if model is not None and teacher is not None:
        raise BadInput(f"{model} and --teacher both name the teacher; leave one of them out")
    if recipe is None:
        if change:
            raise BadInput("--set changes a recipe, and --budget makes its own; leave one of them out")
        taught = TeacherOptions(
            **flags.named(), index=index, rows=rows, model=teacher_model, calls=teacher_calls, queries=queries
        )
        source, limits, allowed = model or teacher or "", budget or [_BUDGET], minutes or MINUTES
        _run_budget(source, limits, flags, taught, minutes=allowed, students=student or [], fast=fast)
        return
    if index or teacher or queries or teacher_model:
        raise BadInput("--index and --teacher go with --budget; a recipe takes --set align.teacher=NAME")
    if fast:
        raise BadInput("--fast goes with --budget; a recipe's model gets its graph from trundle export")
    if model is None:
        raise BadInput("name the model to compress")
    from trundle.recipe import read_recipe

    changes = change or []
    if student:
        if len(student) > 1:
            raise BadInput("a recipe trains one student; pass --student once")
        changes, model = [*changes, f"align.teacher={model}"], student[0]
    found = read_recipe(recipe, changes)
    if minutes is not None:
        trained = [call.method.name for call in found.calls if "minutes" in call.method.options.model_fields]
        if not trained:
            raise BadInput(f"the recipe {found.name} trains nothing; leave --minutes out")
        share = minutes / len(trained)
        found = read_recipe(recipe, [*changes, *(f"{name}.minutes={share}" for name in trained)])
    _run_recipe(model, found, flags)


def recipes(as_json: console._Json = False) -> None:
    """List the recipes that come with trundle."""
    from trundle.recipe import read_recipe, recipe_names

    found = [read_recipe(name) for name in recipe_names()]
    if as_json:
        console._show_json({recipe.name: recipe.as_json() for recipe in found})
        return
    methods = [" → ".join(call.method.name for call in recipe.calls) for recipe in found]
    rows = [(recipe.name, calls, recipe.about) for recipe, calls in zip(found, methods, strict=True)]
    console._show_table([("recipe", "methods", ""), *rows], texts=(0, 1, 2))


def demo(
    flags: console._CommonFlags,
    output: Annotated[Path, Option("--output", "-o", help="Folder for the small model.")] = _DEMO,
    force: console._Force = False,
) -> None:
    """Run the complete workflow on this machine, with a real model.

    The texts are the documentation of the installed Python packages; nothing is downloaded.
    """
    if not (output / PLANNING_FILE).is_file():  # of an interrupted search, which may go on
        check_free(output, replace=force)
    progress = flags.progress()
    from trundle.bench.workload import caution
    from trundle.demo import run_demo

    result = run_demo(output, replace=force, progress=progress)
    if flags.shows_json(result.as_json()):
        return
    console._show(tables._demo_summary(result))
    if warning := caution(result.speed):
        console._show(warning)
    console._show_table(tables._demo(result), gap=True)
    console._show("")
    _show_candidates(result.outcome)
    name = "SentenceTransformer" if result.graph is None else "Encoder"
    console._show(
        f"""\nThe small model is {result.graph or result.output}. Use it with the index of the original model:

    from {"sentence_transformers" if result.graph is None else "trundle"} import {name}
    {name}("{result.output}").encode_query("how do I open a file?")

Report: {result.page}"""
    )
    if sys.stdout.isatty():
        webbrowser.open(result.page.absolute().as_uri())


def _run_recipe(model: str, recipe: Recipe, flags: console._RunFlags) -> None:
    read = [(call.method.name, name) for call in recipe.calls for name in call.method.reads(call.options)]
    console._check_inputs(data=[name for method, name in read if method == "weights"])
    others = [name for method, name in read if method != "weights"]
    flags.check(model, *others)
    progress = flags.progress()
    corpus = flags.corpus(progress)
    recipe.check(corpus)
    request = flags.request(model, corpus, progress, others)
    from trundle.pipeline.compress import run_recipe

    run = run_recipe(request, recipe)
    if not is_first():
        return
    if flags.shows_json(run.as_json()):
        return
    console._show_table(tables._run(run))
    if flags.dry_run:
        console._show(f"\n{tables._forecast(run)}")
    _show_run(run)
    if run.output is not None and run.only_cut:
        command = f"trundle align {quote(str(run.output))} --teacher {quote(run.source)} --data TEXTS -o NEW"
        console._show(f"It is cut, not trained; to train what it lost: {command}")


def _run_budget(
    model: str,
    budget: Sequence[str],
    flags: console._RunFlags,
    taught: TeacherOptions,
    *,
    minutes: float,
    students: Sequence[str],
    fast: bool,
) -> None:
    began = time.monotonic()
    parse_budget(budget, whole_bytes=1 if model and teacher_kind(model) == "model" else None)
    searched_before = flags.output is not None and (flags.output / PLANNING_FILE).is_file()
    # An interrupted search may go on in its own folder, which only the search itself can recognise.
    replace(flags, force=flags.force or searched_before).check(model, *students)
    watch = Stopwatch(flags.progress(), began)
    corpus = flags.corpus(watch)
    with watch.task("reading the texts", None):
        taught.check(model, corpus, pair=flags.pair)
        if taught.index is not None:
            opened = taught.open_index(minutes=minutes, seed=flags.seed, fresh=flags.fresh, progress=watch)
            taught = replace(taught, opened=opened)
    request = flags.request(model, corpus, watch, students)
    from trundle.search.search import compress_to_budget

    outcome = compress_to_budget(
        request, budget, minutes=minutes, students=students, fast=fast, teacher_options=taught
    )
    if outcome.run is not None and flags.output is not None:
        data, texts, teacher = flags.data or [], outcome.proof_texts, outcome.run.teacher
        data = data if teacher.model is not None else []  # a report measures with a model only
        try:
            with watch.task("report", None):
                _write_report(flags.output, teacher, data, texts=texts, trust=flags.trust, progress=watch)
        except KeyboardInterrupt:
            sys.stderr.write(f"trundle: interrupted; {flags.output} is complete, only {_REPORT} is missing\n")
            sys.exit(_INTERRUPTED)
        outcome = replace(outcome, spent=watch.count())
        write_atomic(flags.output / PLANNING_FILE, outcome.record().as_text())
    run = outcome.run.as_json() if outcome.run else None
    if not flags.shows_json(outcome.record().as_json() | {"run": run}):
        _show_outcome(outcome)


def _write_report(
    output: Path, teacher: str | Teacher, data: list[str], *, texts: int, trust: bool, progress: Progress
) -> None:
    """Writes the report into the model's folder, without a comparison if there are too few texts for one."""
    from trundle.report.report import make_report, write_report

    make = partial(make_report, [output], teacher=teacher, trust_remote_code=trust, progress=progress)
    try:
        made = make(data=data, texts=texts, speed=False)  # the search has timed a query of both models
    except UserError as problem:
        progress.say(f"the report has no comparison: {problem}")
        made = make()
    write_report(made, output / _REPORT)


def _show_outcome(outcome: Outcome) -> None:
    _show_candidates(outcome)
    hidden = len(outcome.tried) - _SHOWN_CANDIDATES
    if hidden > 0:
        console._show(f"and {hidden} more that fit")
    if outcome.run is None:
        console._show(f"\n{tables._time_plan(outcome)}")
        return
    console._show_table(tables._budget_result(outcome), gap=True)
    for remark in outcome.remarks:
        console._show(f"{remark[0].upper()}{remark[1:]}.")
    console._show(tables._time_spent(outcome))
    _show_run(outcome.run)
    if outcome.milliseconds is not None:
        files = "it needs onnx/, encoder.json and tokenizer.json; the weights beside them are for torch"
        console._show(f"Without torch: trundle.Encoder({str(outcome.run.output)!r}).encode([...]); {files}")
    console._show(f"Report: {outcome.run.output}/{_REPORT}")
    if outcome.check is not None:
        console._show("")
        for line in outcome.check.says():
            console._show(line)


def _show_candidates(outcome: Outcome) -> None:
    rows = tables._candidates(outcome, _SHOWN_CANDIDATES)
    console._show_table(rows, title=f"Within {outcome.budget}", texts=(0, 1))


def _show_run(run: Run) -> None:
    from trundle.pipeline.pair import how_to_open

    if run.fidelity is not None:
        console._show_table(tables._fidelities([run.fidelity], [""], run.fidelity.teacher), gap=True)
    if run.judged:
        console._show_table(tables._before_after(run.judged), gap=True)
    if run.additional:
        console._show_table(tables._besides(run), gap=True)
    if run.output is not None:
        call = how_to_open(str(run.output), needs_trundle=run.needs_trundle)
        console._show(f"\nWritten to {run.output}; load it with {call}")
    if run.pair is not None:
        console._show(f"Written to {run.pair}; the small model encodes queries, its teacher documents")
