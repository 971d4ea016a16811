"""Size against quality against speed: the picture at the top, and the table below it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trundle.report.axes import _around, _around_log, _Axis, _colour, _Plot
from trundle.report.markup import (
    _choice,
    _count,
    _figure,
    _megabytes,
    _milliseconds,
    _one_line,
    _paragraph,
    _percent,
    _rate,
    _Section,
    _short,
    _side_by_side,
    _table,
    _thousandths,
    _tick_bytes,
    _tick_milliseconds,
)
from trundle.report.records import _Quality, _Report, _Run


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One line of the table."""

    label: str
    of_run: Callable[[_Report, _Run], float | None]
    of_teacher: Callable[[_Report], float | None]
    write: Callable[[float | None], str]
    smaller: bool = False
    """Whether it is told how many times less than the teacher's it is."""


def _of_teacher(name: str) -> Callable[[_Report], float | None]:
    return lambda report: getattr(report.teacher, name, None)


def _of_its_speed(name: str) -> Callable[[_Report], float | None]:
    return lambda report: getattr(report.teacher and report.teacher.speed, name, None)


def _of_speed(name: str) -> Callable[[_Report, _Run], float | None]:
    return lambda report, run: getattr(report.of(run).speed, name, None)


def _of_quality(name: str) -> Callable[[_Report, _Run], float | None]:
    return lambda report, run: getattr(report.quality(run), name, None)


def _quality(label: str, name: str, whole: float, write: Callable[[float | None], str]) -> _Row:
    return _Row(label=label, of_run=_of_quality(name), of_teacher=lambda _: whole, write=write)


_ROWS = (
    _Row(
        label="weights",
        of_run=lambda _, run: run.form.bytes,
        of_teacher=_of_teacher("bytes"),
        write=_megabytes,
        smaller=True,
    ),
    _Row(
        label="parameters",
        of_run=lambda _, run: run.parameters or None,
        of_teacher=_of_teacher("parameters"),
        write=_count,
        smaller=True,
    ),
    _Row(
        label="layers",
        of_run=lambda _, run: run.layers or None,
        of_teacher=_of_teacher("layers"),
        write=_count,
    ),
    _Row(
        label="width", of_run=lambda _, run: run.width or None, of_teacher=_of_teacher("width"), write=_count
    ),
    _Row(
        label="one query",
        of_run=_of_speed("milliseconds"),
        of_teacher=_of_its_speed("milliseconds"),
        write=_milliseconds,
        smaller=True,
    ),
    _Row(
        label="long texts per second",
        of_run=_of_speed("texts_per_second"),
        of_teacher=_of_its_speed("texts_per_second"),
        write=_rate,
    ),
    _quality("agreement, teacher's index", "agreement_asymmetric", 1.0, _percent),
    _quality("agreement, own index", "agreement_standard", 1.0, _percent),
    _quality("cosine to the teacher", "cosine", 1.0, _thousandths),
    _quality("ℓ2 distance to the teacher", "distance", 0.0, _thousandths),
    _quality("share of task scores, own index", "share_standard", 1.0, _percent),
    _quality("share of task scores, its index", "share_asymmetric", 1.0, _percent),
)


def _facts(report: _Report) -> str:
    """The table; lines that no run has a figure for are left out."""
    teacher = [report.teacher.name] if report.teacher else []
    rows: list[tuple[str, ...]] = [("", *teacher, *(run.name for run in report.runs))]
    for row in _ROWS:
        found = [row.of_run(report, run) for run in report.runs]
        if any(value is not None for value in found):
            whole = row.of_teacher(report)
            cells = [row.write(value) + (_ratio(whole, value) if row.smaller else "") for value in found]
            rows.append((row.label, *([row.write(whole)] if teacher else []), *cells))
    colours = ["", *("" for _ in teacher), *(_colour(number) for number in range(len(report.runs)))]
    return _table(rows, colours=colours if len(report.runs) > 1 else ())


def _ratio(large: float | None, small: float | None) -> str:
    if not large or not small:
        return ""
    return f"\n× {_short(small / large)}" if small > large else f"\n÷ {_short(large / small)}"


def _notes(report: _Report) -> str:
    """What the figures were taken on."""
    said = []
    qualities = [quality for run in report.runs if (quality := report.quality(run)) is not None]
    if qualities:
        on = sorted({quality.measured for quality in qualities})
        said.append(f"Quality was measured on {'; or on '.join(on)}.")
    if any(quality.agreement_asymmetric is not None for quality in qualities):
        said.append(
            f"Agreement: the share of the teacher's {qualities[0].k} nearest documents that are found as well."
        )
    if report.machine:
        said.append(f"Time: the median of one short query at a time, {report.machine}.")
    engines = sorted({run.form.engine for run in report.runs})
    if engines != ["torch"]:
        said.append(f"Runs are taken in the form that is fastest here: {', '.join(engines)}.")
    return _paragraph(" ".join([*said, *report.notes]), "note") if said or report.notes else ""


_Get = Callable[[_Quality], float | None]
_Place = Callable[[_Report, "_Run | None"], float | None]
"""Where a run or (None) the teacher stands along the lower axis."""

_MEASURES: tuple[tuple[str, _Get], ...] = (
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
_NAME = 22
_FINE = 0.96
"""An axis that begins higher has ticks less than a per cent apart."""


@dataclass(frozen=True, kw_only=True)
class _Mark:
    """A model in the picture."""

    name: str
    across: float
    up: float
    kind: str
    size: float
    says: str


def _overview(report: _Report) -> _Section | None:
    """One picture for each measure of quality, with a picture of speed beside it where speeds are known."""
    blocks = []
    for label, get in _MEASURES:
        known = [quality for run in report.runs if (quality := report.quality(run)) is not None]
        if any(get(quality) is not None for quality in known):
            blocks.append((label, _pictures(report, label, get)))
    pictures = _choice("Quality", blocks) if blocks else ""
    figures = _facts(report) + _notes(report)
    body = pictures + figures if _has_speeds(report) else _side_by_side([pictures, f"<div>{figures}</div>"])
    return _Section(key="overview", heading="Size, quality, speed", body=body)


def _has_speeds(report: _Report) -> bool:
    return any(_time_of(report, run) for run in report.runs)


def _pictures(report: _Report, label: str, get: _Get) -> str:
    pictures = [
        _figure(picture, heading=f"Quality against {what}")
        for what, place in (("size", _bytes_of), ("time for one query", _time_of))
        if (picture := _scatter(report, label, get, place)) is not None
    ]
    return _side_by_side(pictures) if len(pictures) > 1 else "".join(pictures)


def _bytes_of(report: _Report, what: _Run | None) -> float | None:
    if what is None:
        return report.teacher.bytes if report.teacher else None
    return what.form.bytes


def _time_of(report: _Report, what: _Run | None) -> float | None:
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


def _scatter(report: _Report, label: str, get: _Get, place: _Place) -> str | None:
    """Runs and the teacher, with the budget where there is one."""
    by_size = place is _bytes_of
    write = _megabytes if by_size else _milliseconds
    marks = _marks(report, get, place, write)
    if not marks:
        return None
    teacher = place(report, None)
    everyone = [*marks]
    if teacher:
        says = f"{report.teacher.name if report.teacher else ''}, the teacher: {write(teacher)}"
        everyone.append(_Mark(name="teacher", across=teacher, up=1.0, kind="teacher", size=7, says=says))
    limits = _limits(report, "bytes" if by_size else "milliseconds")
    low, high = _around_log([*(mark.across for mark in everyone), *limits])
    bottom, _ = _around([*(mark.up for mark in everyone), 1.0], room=0.12, least=0.05)
    bottom = max(0.0, bottom)
    top = max(1.0, *(mark.up for mark in everyone))
    plot = _Plot(
        title=f"{label}, against {'size' if by_size else 'time'}",
        across=_Axis(
            label="size of the weights (log scale)" if by_size else "time for one query (log scale)",
            low=low,
            high=high,
            log=True,
            write=_tick_bytes if by_size else _tick_milliseconds,
        ),
        up=_Axis(
            label=label,
            low=bottom,
            high=top + 0.06 * (top - bottom),
            write=lambda v: f"{100 * v:.{0 if bottom < _FINE else 1}f}%",
        ),
    )
    plot.level(1.0, "whole")
    best = _frontier([(mark.across, mark.up) for mark in everyone])
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
    report: _Report,
    get: _Get,
    place: _Place,
    write: Callable[[float | None], str],
) -> list[_Mark]:
    marks = []
    for number, run in enumerate(report.runs):
        quality, across = report.quality(run), place(report, run)
        up = None if quality is None else get(quality)
        if up is not None and across:
            says = f"{run.name}: {_percent(up)} at {write(across)} ({run.form.engine}), {_count(run.parameters)} parameters"
            name = _one_line(run.name, _NAME)
            marks.append(_Mark(name=name, across=across, up=up, kind=_colour(number), size=7, says=says))
    return marks


def _limits(report: _Report, unit: str) -> list[float]:
    return [value for run in report.runs if run.planning and (value := run.planning.budget.get(unit))]


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those that no other beats in both: less across and more up."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best
