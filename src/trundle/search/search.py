"""From a budget to a model: predict all candidates, try the promising ones, train and export the best.

Each trial is a folder in the cache, so an interrupted search resumes where it was. Trials are compared by the
distance to the teacher on validation texts; the held-out texts of the final comparison are not used before
the end.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trundle.cache import cache_entry, locked
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, UserError
from trundle.folders import check_free, write_atomic
from trundle.model.cost import Cost, cost
from trundle.model.load import load
from trundle.model.save import model_digest, weight_bytes
from trundle.pipeline.compress import compare_held_out
from trundle.pipeline.pair import _add_graph_to_card, pair_folder
from trundle.pipeline.run import Request
from trundle.precision import Precision, graph_format
from trundle.progress import Progress, Stopwatch
from trundle.records import PLANNING_FILE, versions
from trundle.runtime.encoder import Encoder
from trundle.search.budget import (
    _ENOUGH_TEXTS,
    _LABELLING,
    _NOTHING_TO_LEARN,
    _SHORTEST_GPU_TRAINING,
    _SHORTEST_TRIAL,
    _TRYING,
    _plan_time,
    _time_left,
)
from trundle.search.candidates import _Candidate
from trundle.search.limits import MINUTES, TeacherOptions, _Budget, parse_budget
from trundle.search.prospects import _export_graph, _Prospects, _Speed, _time_queries
from trundle.search.training_source import _find_training_source, _prepare, _TrainingSource
from trundle.search.trials import (
    _CONTEST_OVER,
    _RATE_FILE,
    Outcome,
    _any_wrote,
    _mark_written,
    _once,
    _Trials,
    _Tried,
    _usual_rate,
    _wrote,
)

_CALIBRATION_TEXTS = 400


def _ship(
    candidate: _Candidate,
    output: Path,
    corpus: Corpus,
    *,
    limits: _Budget,
    speeds: Mapping[tuple[str, Precision], _Speed],
    progress: Progress,
) -> dict[str, Any]:
    """Exports the graph and returns its measured size and speed, as fields of `Outcome`.

    If a graph loses too much accuracy, a graph with float matmuls takes its place if it fits the budget.
    """
    texts = _calibration_texts(corpus)

    def make(precision: Precision) -> dict[str, Any]:
        weight = _export_graph(output, precision, calibrate=texts, progress=progress)
        timed = _time_queries([output])[0]
        return {"bytes": weight, "milliseconds": timed.milliseconds, "undisturbed": timed.undisturbed}

    try:
        return make(candidate.precision)
    except UserError as error:
        refused = f"there is no {candidate.precision} graph: {_cause(error)}"
    speed = speeds.get((candidate.base, "float32"))
    for precision in graph_format("onnx", candidate.precision).fallbacks:
        other = replace(candidate, precision=precision)
        fits = limits.allows(
            file_bytes=other.bytes,
            parameters=other.cost.parameters,
            milliseconds=speed.milliseconds(candidate.cost) if speed is not None else None,
        )
        if fits:
            try:
                instead = f"{refused}; the {precision} graph fits as well and is there instead"
                return make(precision) | {"no_graph": instead}
            except UserError as error:
                refused = f"{refused}; there is no {precision} graph: {_cause(error)}"
    left = "the weights are there without it; allow a larger --budget or more --minutes"
    return {"bytes": weight_bytes(output), "no_graph": f"{refused}; {left}"}


def _calibration_texts(corpus: Corpus) -> list[str]:
    """Validation texts, or training texts if those are few."""
    texts = [text.text for text in islice(corpus.validation(), _CALIBRATION_TEXTS)]
    if len(texts) < _CALIBRATION_TEXTS:
        texts = [text.text for text in islice(corpus.train(), _CALIBRATION_TEXTS)]
    return texts


def _cause(error: UserError) -> str:
    """What is wrong, without the advice after the semicolon, which names a flag of `trundle export`."""
    return (str(error).rpartition("; ")[0] or str(error)).removesuffix(", so nothing was written")


def compress_to_budget(
    request: Request,
    budget: Sequence[str],
    *,
    minutes: float = MINUTES,
    students: Sequence[str] = (),
    fast: bool = False,
    teacher_options: TeacherOptions | None = None,
) -> Outcome:
    """Finds the best model within a budget.

    Parameters: `budget` lists limits such as "12MB", "10x", "20M-params" or "5ms"; `minutes` is the time for
    the whole search; `students` are other backbones that may be trained into the source's space. `fast` runs
    the matmuls of int4 candidates in int8, as a limit in milliseconds does. A dry run lists the candidates
    and the time plan. The source and the students are loaded once.

    The source is a model, or any other teacher: an endpoint, a table, a store. `teacher_options` names the
    model of an endpoint, or an index to learn from; then the source is who made the index, or "" if unknown.
    """
    watch = request.progress if isinstance(request.progress, Stopwatch) else Stopwatch(request.progress)
    request = replace(request, progress=watch)
    if not 0 < minutes < math.inf:
        raise BadInput(f"a search can't take {minutes} minutes; pass a number above 0")
    options = teacher_options or TeacherOptions()
    read = [name for name in (request.name, *students, options.index, options.queries) if name]
    _check_outputs(request, read, own=request.target is not None and _any_wrote(request.target))
    with watch.task("reading the texts", None):
        training = _find_training_source(request, options, students, minutes=minutes)
    parse_budget(budget, whole_bytes=None if training.owner is None else 1)  # before a model is loaded
    trust, progress = request.trust_remote_code, request.progress
    with watch.task("loading the models", None):
        bases = {name: load(name, trust_remote_code=trust) for name in training.bases}
    training = _prepare(training, bases, request)
    assert training.corpus is not None
    request = replace(request, source=training.name, corpus=training.corpus, kept=training.opened())
    prospects = replace(training.prospects(bases, progress), fast=fast)
    before = None if training.owner is None else cost(bases[training.owner])
    limits = parse_budget(budget, whole_bytes=None if before is None else before.file_bytes)
    speeds = _speeds(prospects, limits, before)
    with watch.task("choosing candidates", None):
        planned = _planned(prospects, limits, speeds, before=before)
    untouched = planned.chosen.candidate.untouched
    if request.pair and untouched:
        raise _pair_of_one_model(request.name, planned)
    if request.dry_run:
        rate = 1.0 if untouched else prospects.reading_rate()
        return planned if untouched else _timed(planned, prospects, minutes, rate, training)
    if request.target is None:
        raise BadInput("pass a folder for the result with -o FOLDER, or use --dry-run")
    with watch.task("identifying models and texts", None):
        digests = {name: model_digest(model) for name, model in bases.items()}
        known = [digests, training.identity(), str(training.corpus.facts())]
    entry = cache_entry("trials", *known, [*budget, minutes, fast, request.seed], versions())
    taken = partial(progress.say, "another process runs the same search; this one starts its own")
    with locked(entry, if_taken=taken) as work:
        resumes = _wrote(work, request.target)
        _check_outputs(request, read, own=resumes)
        if request.fresh:
            shutil.rmtree(work, ignore_errors=True)
        if not untouched:
            # A resumed search uses the rate it measured first, so that it plans the same way again.
            with watch.task("measuring the teacher's speed", None):
                rate = _once(work / _RATE_FILE, lambda: _usual_rate(known, prospects.reading_rate()))
            planned = _timed(planned, prospects, minutes, rate, training)
        times, may_replace = planned.timetable, request.replace or resumes
        request = replace(request, replace=may_replace, opened=bases)
        request = replace(request, measured_texts=times.proved, measured_seconds=math.inf)
        trials = _Trials(
            source=prospects.source,
            request=request,
            texts=times.texts,
            mapped=times.mapped,
            heals=times.heals,
            work=work,
            watch=watch,
            endpoint_model=training.endpoint_model,
        )
        outcome = _carried_out(planned, prospects, trials, training, speeds, watch.began, minutes)
        shutil.rmtree(work, ignore_errors=True)
        return outcome


def _speeds(
    prospects: _Prospects, limits: _Budget, before: Cost | None
) -> dict[tuple[str, Precision], _Speed]:
    """Times graphs if the budget limits the time of a query and its other limits can be met."""
    if limits.milliseconds is None:
        return {}
    if limits != _Budget(milliseconds=limits.milliseconds):
        prospects.promising(replace(limits, milliseconds=None), {}, before=before)
    return prospects.speeds()


def _pair_of_one_model(source: str, planned: Outcome) -> BadInput:
    return BadInput(
        f"{source} is within {planned.budget} once it is {planned.chosen.candidate.precision}, so a pair "
        "would hold the same model twice; leave --pair out, or pass a smaller budget"
    )


def _check_outputs(request: Request, read: Sequence[str], *, own: bool) -> None:
    """Rejects an output that is `read`, or that exists unless it may be replaced or is the search's `own`."""
    if request.target is None:
        return
    files = () if request.corpus is None else request.corpus.files
    for folder in (request.target, *([pair_folder(request.target)] if request.pair else [])):
        check_free(folder, replace=request.replace or own, read=[*read, *files])


def _planned(
    prospects: _Prospects,
    limits: _Budget,
    speeds: Mapping[tuple[str, Precision], _Speed],
    *,
    before: Cost | None,
) -> Outcome:
    tried = [_Tried(candidate=each) for each in prospects.promising(limits, speeds, before=before)]
    return Outcome(
        budget=limits,
        before=before,
        before_milliseconds=prospects.slowest(speeds, before),
        tried=tuple(tried),
        chosen=tried[0],
        timetable=_NOTHING_TO_LEARN,
    )


def _timed(
    planned: Outcome, prospects: _Prospects, minutes: float, rate: float, training: _TrainingSource
) -> Outcome:
    """Adds the time plan, from how many texts the teacher, or the first student, encodes in a second."""
    there = training.most_texts(prospects.text_count())
    first, before = planned.chosen.candidate, planned.before
    times = _plan_time(
        minutes,
        len(planned.tried),
        rate=rate,
        labels=training.label_rate(rate, there),
        there=there,
        on_gpu=torch.cuda.is_available(),
        near=first.in_space,
        work=1.0 if before is None else first.cost.flops_per_token / before.flops_per_token,
    )
    shortest = 0.0
    if times.trains:
        shortest = _SHORTEST_GPU_TRAINING if torch.cuda.is_available() else _SHORTEST_TRIAL
    least = (times.labelling + times.mapping + shortest + times.closing) / 60
    if least > minutes:
        prospects.progress.say(f"this needs about {least:,.1f} minutes here; an interrupted run resumes")
    if not times.trains:
        prospects.progress.say(
            f"{times.steps:.0f} steps would gain nothing, so the model is made in closed form"
        )
    elif times.texts < min(_ENOUGH_TEXTS, there):
        speed = f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"
        used = f"so training uses {times.texts:,} texts; more --minutes or a GPU allow more"
        prospects.progress.say(f"the model encodes {speed} texts a second here, {used}")
    return replace(planned, timetable=times)


def _carried_out(
    planned: Outcome,
    prospects: _Prospects,
    trials: _Trials,
    training: _TrainingSource,
    speeds: Mapping[tuple[str, Precision], _Speed],
    began: float,
    minutes: float,
) -> Outcome:
    """Runs the trials, trains the best candidate, exports and checks it; each part saves its result."""
    request = trials.request
    assert request.target is not None
    assert request.corpus is not None
    # A search that resumes in its last training does not run trials again.
    over = trials.work / _CONTEST_OVER
    until = began + (0 if over.is_file() else 60 * minutes * (_LABELLING + _TRYING))
    ranked = trials.contest(planned.tried, planned.timetable, until=until)
    trials.work.mkdir(parents=True, exist_ok=True)
    over.touch()
    times = planned.timetable

    def seconds(best: _Tried) -> float:
        # A candidate that was not tried still needs the teacher's vectors and its linear map.
        if not times.trains:
            return 0.0
        ahead = 0.0 if best.distances else times.labelling + times.mapping
        return _time_left(minutes, time.monotonic() - began + ahead, times.closing)

    deadline = began + 60 * minutes - times.closing
    run, ranked = trials.finish_best(ranked, seconds, deadline)
    _mark_written(trials.work, request.target)
    outcome = replace(planned, tried=tuple(ranked), chosen=ranked[0], run=run)
    outcome = replace(outcome, proof_texts=request.measured_texts, parameters=run.after.parameters)
    planning = request.target / PLANNING_FILE
    write_atomic(planning, outcome.record().as_text())  # the export may fail; the trained model is complete
    made: dict[str, Any] = {"bytes": weight_bytes(request.target)}
    if prospects.makes_graphs:
        best, target, limits = ranked[0].candidate, request.target, outcome.budget
        made = _ship(best, target, request.corpus, limits=limits, speeds=speeds, progress=request.progress)
        if any(target.rglob("*.onnx")):
            if run.fidelity is not None or best.untouched:
                graph = Encoder(target).embedder("result")
                limited = replace(request, measured_seconds=60.0)  # on the CPU, also where a GPU trains
                made["run"] = run = replace(run, fidelity=compare_held_out(run.teacher, graph, limited))
            whole = None if planned.before is None else planned.before.file_bytes
            _add_graph_to_card(target, made["bytes"], whole, run.fidelity)
        made["before_milliseconds"] = prospects.source_milliseconds()
    outcome = replace(outcome, **made, spent=trials.watch.count())
    write_atomic(planning, outcome.record().as_text())
    if training.rows is not None:
        student = run.result if outcome.milliseconds is None else Encoder(request.target).embedder()
        check = training.check(replace(student, name=str(request.target)), request)
        outcome = replace(outcome, check=check)
        write_atomic(planning, outcome.record().as_text())
    run.settle()
    return outcome
