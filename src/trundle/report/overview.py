"""Size against quality against speed: the picture at the top, and the table below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trundle.report.axes import Axis, Plot, around, around_log, colour
from trundle.report.facts import facts, notes
from trundle.report.figures import (
    count,
    megabytes,
    milliseconds,
    one_line,
    percent,
    tick_bytes,
    tick_milliseconds,
)
from trundle.report.markup import Section, choice, figure, side_by_side
from trundle.report.records import Quality, Report, Run

Get = Callable[[Quality], float | None]
Place = Callable[[Report, "Run | None"], float | None]
"""Where a run or (None) the teacher stands along the lower axis."""

MEASURES: tuple[tuple[str, Get], ...] = (
    (
        "agreement@10, teacher's index",
        lambda quality: quality.agreement_asymmetric,
    ),
    ("share of the teacher's task mean, own index", lambda quality: quality.share_standard),
    (
        "share of the teacher's task mean, its index",
        lambda quality: quality.share_asymmetric,
    ),
    ("agreement@10, own index", lambda quality: quality.agreement_standard),
)
NAME = 22
FINE = 0.96
"""An axis that begins higher has ticks less than a per cent apart."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A model in the picture."""

    name: str
    across: float
    up: float
    kind: str
    size: float
    says: str


def overview(report: Report) -> Section | None:
    """One picture for each measure of quality, with a picture of speed beside it where speeds are known."""
    blocks = []
    for label, get in MEASURES:
        known = [quality for run in report.runs if (quality := report.quality(run)) is not None]
        if any(get(quality) is not None for quality in known):
            blocks.append((label, _pictures(report, label, get)))
    pictures = choice("Quality", blocks) if blocks else ""
    figures = facts(report) + notes(report)
    body = pictures + figures if _has_speeds(report) else side_by_side([pictures, f"<div>{figures}</div>"])
    return Section(key="overview", heading="Size, quality, speed", body=body)


def _has_speeds(report: Report) -> bool:
    return any(_time_of(report, run) for run in report.runs)


def _pictures(report: Report, label: str, get: Get) -> str:
    pictures = [
        figure(picture, heading=f"Quality against {what}")
        for what, place in (("size", _bytes_of), ("time for one query", _time_of))
        if (picture := _scatter(report, label, get, place)) is not None
    ]
    return side_by_side(pictures) if len(pictures) > 1 else "".join(pictures)


def _bytes_of(report: Report, what: Run | None) -> float | None:
    if what is None:
        return report.teacher.bytes if report.teacher else None
    return what.form.bytes


def _time_of(report: Report, what: Run | None) -> float | None:
    if what is None:
        speed = report.teacher.speed if report.teacher else None
        if speed is None:
            told = [run.planning.teacher.get("milliseconds") for run in report.runs if run.planning]
            return told[0] if told else None
    else:
        speed = report.of(what).speed
        if speed is None and what.planning is not None:
            return what.planning.measured.get("milliseconds")
    return None if speed is None else speed.milliseconds


def _scatter(report: Report, label: str, get: Get, place: Place) -> str | None:
    """Runs and the teacher, with the budget where there is one."""
    by_size = place is _bytes_of
    write = megabytes if by_size else milliseconds
    marks = _marks(report, get, place, write)
    if not marks:
        return None
    teacher = place(report, None)
    everyone = [*marks]
    if teacher:
        says = f"{report.teacher.name if report.teacher else ''}, the teacher: {write(teacher)}"
        everyone.append(Mark(name="teacher", across=teacher, up=1.0, kind="teacher", size=7, says=says))
    limits = _limits(report, "bytes" if by_size else "milliseconds")
    low, high = around_log([*(mark.across for mark in everyone), *limits])
    bottom, _ = around([*(mark.up for mark in everyone), 1.0], room=0.12, least=0.05)
    bottom = max(0.0, bottom)
    top = max(1.0, *(mark.up for mark in everyone))
    plot = Plot(
        title=f"{label}, against {'size' if by_size else 'time'}",
        across=Axis(
            label="size of the weights (log scale)" if by_size else "time for one query (log scale)",
            low=low,
            high=high,
            log=True,
            write=tick_bytes if by_size else tick_milliseconds,
        ),
        up=Axis(
            label=label,
            low=bottom,
            high=top + 0.06 * (top - bottom),
            write=lambda v: f"{100 * v:.{0 if bottom < FINE else 1}f}%",
        ),
    )
    plot.level(1.0, "whole")
    best = frontier([(mark.across, mark.up) for mark in everyone])
    if len(best) > 1:
        plot.line(best, "frontier")
    for mark in everyone:
        plot.dot((mark.across, mark.up), mark.kind, size=mark.size, says=mark.says)
    for limit in dict.fromkeys(limits):
        plot.upright(limit, f"budget {write(limit)}")
    for mark in everyone:
        plot.name((mark.across, mark.up), mark.name, mark.kind, size=mark.size)
    return plot.svg()


def _marks(
    report: Report,
    get: Get,
    place: Place,
    write: Callable[[float | None], str],
) -> list[Mark]:
    marks = []
    for number, run in enumerate(report.runs):
        quality, across = report.quality(run), place(report, run)
        up = None if quality is None else get(quality)
        if up is not None and across:
            says = f"{run.name}: {percent(up)} at {write(across)} ({run.form.engine}), {count(run.parameters)} parameters"
            name = one_line(run.name, NAME)
            marks.append(Mark(name=name, across=across, up=up, kind=colour(number), size=7, says=says))
    return marks


def _limits(report: Report, unit: str) -> list[float]:
    return [value for run in report.runs if run.planning and (value := run.planning.budget.get(unit))]


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both: less across and more up."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best
