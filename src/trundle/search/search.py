"""From a budget to a model: size and time every candidate, try the promising ones, train the best, export it, prove it.

Each trial is a folder in the cache, named by all that leads to it, so a search that was killed goes on where it was, be it in the
last training or behind it. Trials are
compared by the distance to the teacher on validation texts; nothing that is measured at the end is looked at before.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trundle.cache import cache_folder
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, UserError
from trundle.folders import check_free, own_folder, write_whole
from trundle.model.cost import Cost, cost
from trundle.model.load import load
from trundle.model.save import model_digest, weight_bytes
from trundle.pipeline.pair import pair_folder
from trundle.progress import SILENT, Progress
from trundle.records import PLANNING_FILE, versions
from trundle.search.budget import (
    _ENOUGH_TEXTS,
    _LABELLING,
    _NOTHING_TO_LEARN,
    _TRYING,
    _Budget,
    _parse_budget,
    _plan_time,
    _time_left,
)
from trundle.search.candidates import _Candidate, _Precision
from trundle.search.outcome import Outcome, _Tried
from trundle.search.prospects import _Prospects
from trundle.search.speed import _export_graph, _Speed, _time_queries
from trundle.search.trials import (
    _CONTEST_OVER,
    _RATE_FILE,
    _TRIALS,
    _any_wrote,
    _mark_written,
    _once,
    _Trials,
    _wrote,
)

_CALIBRATION_TEXTS = 400
_INSTEAD: Mapping[_Precision, tuple[_Precision, ...]] = {
    "float32": (),
    "int8": ("float32",),
    "int4": ("float32",),
    "int4+int8": ("int4", "float32"),
}
"""Graphs that multiply in float, for where one of this precision loses too much."""


def _ship(
    candidate: _Candidate,
    output: Path,
    corpus: Corpus,
    *,
    limits: _Budget,
    speeds: Mapping[tuple[str, _Precision], _Speed],
    progress: Progress,
) -> dict[str, Any]:
    """What an outcome says of the file that is shipped, in its real size and speed; the weights where no graph can be made.

    A graph that loses too much is not forced: one that multiplies in float takes its place where that fits, or none does.
    """
    if not speeds:
        return {"bytes": weight_bytes(output)}
    texts = _calibration_texts(corpus)
    try:
        return _graph(output, candidate.precision, texts, progress)
    except UserError as error:
        refused = f"there is no {candidate.precision} graph: {_cause(error)}"
    for precision in _INSTEAD[candidate.precision]:
        other = replace(candidate, precision=precision)
        fits = limits.allows(
            file_bytes=other.bytes,
            parameters=other.cost.parameters,
            milliseconds=speeds[candidate.base, "float32"].milliseconds(candidate.cost),
        )
        if fits:
            try:
                made = _graph(output, precision, texts, progress)
                return made | {
                    "no_graph": f"{refused}; the {precision} graph fits as well and is there instead"
                }
            except UserError as error:
                refused = f"{refused}; there is no {precision} graph: {_cause(error)}"
    left = "the weights are there without it; allow a larger --budget or more --minutes"
    return {"bytes": weight_bytes(output), "no_graph": f"{refused}; {left}"}


def _graph(output: Path, precision: _Precision, texts: list[str], progress: Progress) -> dict[str, Any]:
    weight = _export_graph(output, precision, calibrate=texts, progress=progress)
    return {"bytes": weight, "milliseconds": _time_queries([output])[0].milliseconds}


def _calibration_texts(corpus: Corpus) -> list[str]:
    """Of the validation texts, or of those learned from where they are few."""
    texts = [text.text for text in islice(corpus.validation(), _CALIBRATION_TEXTS)]
    if len(texts) == _CALIBRATION_TEXTS:
        return texts
    return [text.text for text in islice(corpus.train(), _CALIBRATION_TEXTS)]


def _cause(error: UserError) -> str:
    """What is wrong, without the mend behind the semicolon: that is a flag of `export`, and nobody called it."""
    return (str(error).rpartition("; ")[0] or str(error)).removesuffix(", so nothing was written")


MINUTES = 30.0


def compress_to_budget(
    source: str,
    budget: Sequence[str],
    *,
    output: str | Path | None,
    corpus: Corpus,
    minutes: float = MINUTES,
    students: Sequence[str] = (),
    seed: int = 0,
    dry_run: bool = False,
    replace_output: bool = False,
    fresh: bool = False,
    pair: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Outcome:
    """The best model within the budget that `minutes` can find; a dry run stops before the first trial."""
    began = time.monotonic()
    outputs = [] if output is None or dry_run else [output, *([pair_folder(output)] if pair else [])]

    def check_outputs(*, own: bool) -> None:
        for folder in outputs:
            check_free(folder, replace=replace_output or own, read=[source, *students])

    check_outputs(own=output is not None and _any_wrote(output))
    if not 0 < minutes < math.inf:
        raise BadInput(f"{minutes} minutes can't be planned with; give a number above 0")
    bases = {each: load(each, trust_remote_code=trust_remote_code) for each in (source, *students)}
    prospects = _Prospects(source=source, bases=bases, corpus=corpus, progress=progress)
    before = cost(bases[source])
    limits = _parse_budget(budget, whole_bytes=before.file_bytes)
    speeds = prospects.speeds()
    planned = _planned(prospects, limits, speeds, before=before)
    untouched = planned.chosen.candidate.untouched
    if pair and untouched:
        raise BadInput(
            f"{source} is within {limits} once it is {planned.chosen.candidate.precision}, so nothing is trained and a pair "
            "would hold the same model twice; leave --pair out, or ask for less"
        )
    if dry_run:
        return planned if untouched else _timed(planned, prospects, minutes, prospects.reading_rate())
    if output is None:
        raise BadInput("say where the result goes with -o FOLDER, or only look with --dry-run")
    models = [part for name, model in bases.items() for part in (name, model_digest(model))]
    known = [*models, *budget, str(minutes), str(seed), str(corpus.facts()), str(versions())]
    named = cache_folder() / _TRIALS / blake2b("\0".join(known).encode(), digest_size=16).hexdigest()

    def if_taken() -> None:
        progress.say("the same search is under way in another process; this one starts by itself")

    with own_folder(named, if_taken=if_taken) as work:
        goes_on = _wrote(work, output)
        check_outputs(own=goes_on)
        if fresh:
            shutil.rmtree(work, ignore_errors=True)
        if not untouched:
            rate = _once(work / _RATE_FILE, prospects.reading_rate)
            planned = _timed(planned, prospects, minutes, rate)
        trials = _Trials(
            source=source,
            corpus=corpus,
            texts=planned.timetable.texts,
            mapped=planned.timetable.mapped,
            proof_texts=planned.timetable.proved,
            work=work,
            seed=seed,
            trust_remote_code=trust_remote_code,
            fresh=fresh,
            progress=progress,
        )
        outcome = _carried_out(
            planned,
            trials,
            Path(output),
            speeds=speeds,
            began=began,
            minutes=minutes,
            replace_output=replace_output or goes_on,
            pair=pair,
        )
        shutil.rmtree(work, ignore_errors=True)
        return outcome


def _planned(
    prospects: _Prospects,
    limits: _Budget,
    speeds: Mapping[tuple[str, _Precision], _Speed],
    *,
    before: Cost,
) -> Outcome:
    """An outcome of which nothing is made yet, and no time is planned: what there is to choose from."""
    tried = [_Tried(candidate=each) for each in prospects.promising(limits, speeds, before=before)]
    return Outcome(
        budget=limits,
        before=before,
        before_milliseconds=prospects.slowest(speeds, before),
        tried=tuple(tried),
        chosen=tried[0],
        timetable=_NOTHING_TO_LEARN,
    )


def _timed(planned: Outcome, prospects: _Prospects, minutes: float, rate: float) -> Outcome:
    """The same with its times, told from how many texts the teacher reads in a second here.

    By itself, since a dry run asks the teacher, while a search that goes on has to plan as it did at first.
    """
    there = prospects.text_count()
    times = _plan_time(minutes, len(planned.tried), rate=rate, there=there, on_gpu=torch.cuda.is_available())
    if times.texts < min(_ENOUGH_TEXTS, there):
        prospects.progress.say(
            f"the model reads {rate:{',.0f' if rate >= 10 else '.2g'}} texts a second here, so {times.texts:,} have to do; more --minutes or a GPU teach from more"
        )
    return replace(planned, timetable=times)


def _carried_out(
    planned: Outcome,
    trials: _Trials,
    output: Path,
    *,
    speeds: Mapping[tuple[str, _Precision], _Speed],
    began: float,
    minutes: float,
    replace_output: bool,
    pair: bool,
) -> Outcome:
    """The plan made true: trials, the winner's training, its graph.

    What each leaves is on the disk before the next begins, so whatever stops the search costs only what comes after.
    """
    # A search that goes on in its last training does not reopen the contest.
    over = trials.work / _CONTEST_OVER
    until = began + (0 if over.is_file() else 60 * minutes * (_LABELLING + _TRYING))
    ranked = trials.contest(planned.tried, planned.timetable, until=until)
    trials.work.mkdir(parents=True, exist_ok=True)
    over.touch()
    times = planned.timetable

    def seconds(best: _Tried) -> float:
        """One that was not tried still has to be told the teacher's vectors and to read for its map."""
        ahead = 0.0 if best.distances else times.labelling + times.mapping
        return _time_left(minutes, time.monotonic() - began + ahead, times.closing)

    run, ranked = trials.finish_best(
        ranked,
        seconds,
        output,
        replace_output=replace_output,
        pair=pair,
    )
    _mark_written(trials.work, output)
    outcome = replace(
        planned,
        tried=tuple(ranked),
        chosen=ranked[0],
        run=run,
        proof_texts=trials.proof_texts,
        parameters=run.after.parameters,
    )
    _write(outcome, output)  # exporting may fail yet, and all that was learned is here
    best = outcome.chosen.candidate
    made = _ship(best, output, trials.corpus, limits=outcome.budget, speeds=speeds, progress=trials.progress)
    outcome = replace(outcome, **made)
    _write(outcome, output)
    run.settle()
    return outcome


def _write(outcome: Outcome, output: Path) -> None:
    write_whole(output / PLANNING_FILE, outcome.record().as_text())
