"""`compress --budget`: what could be had, what was tried, what came of it, in a person's words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trundle.cli import console
from trundle.cli.common import _show_pair
from trundle.cli.console import _calm_libraries, _show_json, _show_table, _terminal
from trundle.cli.tables import _count, _fidelity, _megabytes
from trundle.errors import BadInput, UserError

if TYPE_CHECKING:
    from trundle.progress import Progress
    from trundle.search.outcome import Outcome

_REPORT = "report.html"
_SHOWN = 12
"""Candidates worth a line."""


def _carry_out(
    model: str,
    budget: list[str],
    *,
    output: Path | None,
    data: list[str] | None,
    minutes: float | None,
    students: list[str],
    seed: int,
    dry_run: bool,
    force: bool,
    fresh: bool,
    pair: bool,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    trust: bool,
    changes: list[str] | None,
) -> None:
    """Search, and show what came of it."""
    if changes:
        raise BadInput("--set changes a recipe, and a budget makes its own; leave one of them out")
    if output is None and not dry_run:
        raise BadInput("say where the result goes with -o FOLDER, or only look with --dry-run")
    if not data:
        raise BadInput("the small model learns from texts like yours; say where they are with --data")
    _calm_libraries(verbose=verbose)
    from trundle.data.corpus import read_corpus
    from trundle.pipeline.run import Request
    from trundle.search.search import MINUTES, compress_to_budget

    progress = _terminal(quiet=quiet or as_json)
    request = Request(
        source=model,
        output=output,
        corpus=read_corpus(data, seed=seed, progress=progress),
        seed=seed,
        dry_run=dry_run,
        replace=force,
        fresh=fresh,
        pair=pair,
        trust_remote_code=trust,
        progress=progress,
    )
    outcome = compress_to_budget(request, budget, minutes=minutes or MINUTES, students=students)
    if outcome.run is not None and output is not None:
        _report(output, model, data, texts=outcome.proof_texts, trust=trust, progress=progress)
    if as_json:
        _show_json(outcome.record().as_json() | {"run": outcome.run.as_json() if outcome.run else None})
        return
    _show(outcome)


def _report(
    output: Path, model: str, data: list[str], *, texts: int, trust: bool, progress: Progress
) -> None:
    """A page beside the model. Where texts are too few to compare by, it is without: the model is made and stays."""
    from trundle.report.report import make_report, write_report

    try:
        made = make_report(
            [output], teacher=model, data=data, texts=texts, trust_remote_code=trust, progress=progress
        )
    except UserError as problem:
        progress.say(f"the report has no comparison: {problem}")
        made = make_report([output], teacher=model, trust_remote_code=trust, progress=progress)
    write_report(made, output / _REPORT)


def _show(outcome: Outcome) -> None:
    """The candidates, and where the chosen one stands beside what was asked."""
    from trundle.pipeline.card import how_to_open

    _show_table(_candidates(outcome), title=f"Within {outcome.budget}", texts=(0, 1))
    hidden = len(outcome.tried) - _SHOWN
    if hidden > 0:
        console._show(f"and {hidden} more that fit")
    if outcome.run is None:
        console._show()
        console._show(_timetable(outcome))
        return
    console._show()
    _show_table(_result(outcome))
    for remark in outcome.remarks:
        console._show(f"{remark[0].upper()}{remark[1:]}.")
    if outcome.run.fidelity is not None:
        console._show()
        _show_table(_fidelity(outcome.run.fidelity))
    console._show()
    opens = how_to_open(str(outcome.run.output), needs_trundle=outcome.run.needs_trundle)
    console._show(f"Written to {outcome.run.output}: {opens} opens it.")
    _show_pair(outcome.run)
    if outcome.milliseconds is not None:
        console._show(f"Without torch: trundle.Encoder({str(outcome.run.output)!r}).encode([...])")
    console._show(f"All of it to look at: {outcome.run.output}/{_REPORT}")


def _candidates(outcome: Outcome) -> list[tuple[str, ...]]:
    """What fits, most promising first, or best first where they were tried."""
    bases = {each.candidate.base for each in outcome.tried}
    rows: list[tuple[str, ...]] = [
        ("candidate", "of" if len(bases) > 1 else "", "parameters", "file", "query", "distance", "")
    ]
    for each in outcome.tried[:_SHOWN]:
        what = each.candidate
        rows.append(
            (
                what.name,
                Path(what.base).name if len(bases) > 1 else "",
                _count(what.cost.parameters),
                _megabytes(what.bytes),
                "" if what.milliseconds is None else f"{what.milliseconds:.2f} ms",
                " → ".join(f"{distance:.3f}" for distance in each.distances),
                "" if outcome.run is None else each.outcome,
            )
        )
    return rows


def _timetable(outcome: Outcome) -> str:
    """How the time would be used."""
    times = outcome.timetable
    if outcome.chosen.candidate.untouched:
        return (
            "Nothing was made. There is nothing to learn: the model itself fits, once its graph is smaller."
        )
    rounds = ", ".join(f"{rung.candidates} × {_minutes(rung.seconds)}" for rung in times.rungs)
    if rounds:
        tried = f"trials {rounds}; "
    elif len(outcome.tried) == 1:
        tried = "no trials, for only one fits; "
    else:
        tried = "no time for trials, the first would be trained at once; "
    return f"Nothing was made. The time: the teacher's vectors {_minutes(times.labelling)} at most; {tried}the best one {_minutes(times.finishing)}."


def _result(outcome: Outcome) -> list[tuple[str, ...]]:
    """Before, predicted, measured."""
    best = outcome.chosen.candidate
    rows: list[tuple[str, ...]] = [("", "parameters", "file", "query")]
    before = outcome.before
    rows.append(
        (
            "before",
            _count(before.parameters),
            _megabytes(before.file_bytes),
            _query(outcome.before_milliseconds),
        )
    )
    rows.append(
        ("predicted", _count(best.cost.parameters), _megabytes(best.bytes), _query(best.milliseconds))
    )
    size = outcome.bytes or best.bytes
    rows.append(
        (
            "measured",
            _count(outcome.parameters or best.cost.parameters),
            _megabytes(size),
            _query(outcome.milliseconds),
        )
    )
    ratio = f"{before.file_bytes / size:.1f}×"
    faster = (
        ""
        if outcome.milliseconds is None or outcome.before_milliseconds is None
        else f"{outcome.before_milliseconds / outcome.milliseconds:.1f}×"
    )
    rows.append(("ratio", f"{before.parameters / best.cost.parameters:.1f}×", ratio, faster))
    return rows


def _query(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.2f} ms"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds >= 60 else f"{seconds:.0f} s"
