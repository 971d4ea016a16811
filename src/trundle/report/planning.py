"""How a budget was met: every candidate, how far it was tried, and whether the forecast held."""

from __future__ import annotations

from trundle.records import CandidateRecord, PlanningRecord
from trundle.report.axes import _around, _Axis, _colour, _Plot
from trundle.report.markup import (
    _choice,
    _count,
    _figure,
    _megabytes,
    _milliseconds,
    _numbered,
    _one_line,
    _paragraph,
    _Section,
    _side_by_side,
    _table,
    _thousandths,
)
from trundle.report.records import _Report

_NAME = 44


def _planning(report: _Report) -> _Section | None:
    """One block for each run that was made to a budget."""
    blocks = [
        (run.name, _block(number, run.planning)) for number, run in enumerate(report.runs) if run.planning
    ]
    if not blocks:
        return None
    return _Section(key="budget", heading="How the budget was met", body=_choice("Run", blocks))


def _block(number: int, plan: PlanningRecord) -> str:
    budget = plan.budget
    wanted = [
        says
        for value, says in (
            (budget.get("bytes"), _megabytes(budget.get("bytes"))),
            (budget.get("parameters"), f"{_count(budget.get('parameters'))} parameters"),
            (budget.get("milliseconds"), f"{_milliseconds(budget.get('milliseconds'))} a query"),
        )
        if value
    ]
    tried = [one for one in plan.candidates if one.rungs]
    rungs = sum(len(one.rungs) for one in tried)
    trials = (
        f"{_numbered(len(tried), 'was', 'were')} tried in {_numbered(rungs, 'short training', 'short trainings')}, and "
        if tried
        else ""
    )
    lead = (
        f"Budget: {' and '.join(wanted)}. {_numbered(len(plan.candidates), 'candidate was', 'candidates were')} weighed by arithmetic, "
        f"{trials}{plan.chosen} was chosen."
    )
    picture = (
        _figure(
            _halving(number, plan, tried),
            "Each line is a candidate; it ends where it was given up. Hover or tab for names.",
            heading="Successive halving",
        )
        if len(tried) > 1  # one alone raced against nothing
        else ""
    )
    lines = [lead, *(f"{remark[:1].upper()}{remark[1:]}." for remark in plan.remarks)]
    return (
        "".join(map(_paragraph, lines))
        + _side_by_side([picture, f"<div>{_forecast(plan)}</div>"])
        + _candidates(plan)
    )


def _candidates(plan: PlanningRecord) -> str:
    """Those that were tried, the chosen one first; the others can be unfolded."""
    ordered = sorted(
        plan.candidates,
        key=lambda one: (
            one.name != plan.chosen,
            -len(one.rungs),
            one.rungs[-1].distance if one.rungs else 0,
        ),
    )
    shown = [one for one in ordered if one.rungs or one.name == plan.chosen]
    rest = [one for one in ordered if one not in shown]
    heading = ("candidate", "outcome", "parameters", "weights", "one query")
    tried = _table(
        [(*heading, "short trainings", "distance"), *(_row(one) + _tries(one) for one in shown)],
        texts=(0, 1),
        bold=[0] if shown and shown[0].name == plan.chosen else [],
    )
    if not rest:
        return tried
    others = _table([heading, *map(_row, rest)], texts=(0, 1))
    return f"{tried}<details><summary>{_numbered(len(rest), 'candidate that was', 'candidates that were')} not tried</summary>{others}</details>"


def _row(one: CandidateRecord) -> tuple[str, ...]:
    size, time = _megabytes(one.bytes), _milliseconds(one.milliseconds)
    return one.name, one.outcome, _count(one.parameters), size, time


def _tries(one: CandidateRecord) -> tuple[str, ...]:
    last = one.rungs[-1] if one.rungs else None
    return str(len(one.rungs)), _thousandths(last.distance if last else None)


def _halving(number: int, plan: PlanningRecord, tried: list[CandidateRecord]) -> str:
    longest = max(sum(rung.steps for rung in one.rungs) for one in tried)
    low, high = _around([rung.distance for one in tried for rung in one.rungs], room=0.16)
    plot = _Plot(
        title="distance of each candidate to the teacher after each short training",
        across=_Axis(
            label="steps of training, all rounds together",
            low=0,
            high=longest * 1.04,
            write=lambda v: f"{v:,.0f}",
        ),
        up=_Axis(
            label="distance to the teacher, validation texts (lower is nearer)",
            low=max(0.0, low),
            high=high,
        ),
    )
    for one in sorted(tried, key=lambda one: one.name == plan.chosen):
        chosen = one.name == plan.chosen
        kind = _colour(number) if chosen else "quiet"
        spent, points = 0, []
        for rung in one.rungs:
            spent += rung.steps
            points.append((spent, rung.distance))
        if len(points) > 1:
            plot.line(points, f"{kind} {'thick' if chosen else ''}")
        for rung, point in zip(one.rungs, points, strict=True):
            says = f"{one.name}: a distance of {rung.distance:.3f} after {rung.steps:,} steps"
            plot.dot(point, kind, size=5 if chosen else 3.5, says=says)
        if chosen:
            plot.name(points[-1], _one_line(one.name, _NAME), kind, beside=False)
    return plot.svg()


def _forecast(plan: PlanningRecord) -> str:
    rows: list[tuple[str, ...]] = [("", "forecast", "measured", "off by")]
    for key, label, write in (("bytes", "weights", _megabytes), ("milliseconds", "one query", _milliseconds)):
        before, after = plan.predicted.get(key), plan.measured.get(key)
        if before and after:
            off = round(100 * (before - after) / after, 1) + 0.0  # no minus before a zero
            rows.append((label, write(before), write(after), f"{off:+.1f}%"))
    return f"<h3>Forecast and outcome</h3>{_table(rows)}" if len(rows) > 1 else ""
