"""Every figure of the runs in one table, the teacher's first, and what the figures were taken on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trundle.report.axes import colour
from trundle.report.figures import count, megabytes, milliseconds, percent, rate, short, thousandths
from trundle.report.markup import paragraph, table
from trundle.report.records import Report, Run


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    label: str
    of_run: Callable[[Report, Run], float | None]
    of_teacher: Callable[[Report], float | None]
    write: Callable[[float | None], str]
    smaller: bool = False
    """Whether it is told how many times less than the teacher's it is."""


def _of_teacher(name: str) -> Callable[[Report], float | None]:
    return lambda report: getattr(report.teacher, name, None)


def _of_its_speed(name: str) -> Callable[[Report], float | None]:
    return lambda report: getattr(report.teacher and report.teacher.speed, name, None)


def _of_speed(name: str) -> Callable[[Report, Run], float | None]:
    return lambda report, run: getattr(report.of(run).speed, name, None)


def _of_quality(name: str) -> Callable[[Report, Run], float | None]:
    return lambda report, run: getattr(report.quality(run), name, None)


def _quality(label: str, name: str, whole: float, write: Callable[[float | None], str]) -> Row:
    return Row(label=label, of_run=_of_quality(name), of_teacher=lambda _: whole, write=write)


ROWS = (
    Row(
        label="weights",
        of_run=lambda _, run: run.form.bytes,
        of_teacher=_of_teacher("bytes"),
        write=megabytes,
        smaller=True,
    ),
    Row(
        label="parameters",
        of_run=lambda _, run: run.parameters or None,
        of_teacher=_of_teacher("parameters"),
        write=count,
        smaller=True,
    ),
    Row(
        label="layers",
        of_run=lambda _, run: run.layers or None,
        of_teacher=_of_teacher("layers"),
        write=count,
    ),
    Row(label="width", of_run=lambda _, run: run.width or None, of_teacher=_of_teacher("width"), write=count),
    Row(
        label="one query",
        of_run=_of_speed("milliseconds"),
        of_teacher=_of_its_speed("milliseconds"),
        write=milliseconds,
        smaller=True,
    ),
    Row(
        label="long texts per second",
        of_run=_of_speed("texts_per_second"),
        of_teacher=_of_its_speed("texts_per_second"),
        write=rate,
    ),
    _quality("agreement, teacher's index", "agreement_asymmetric", 1.0, percent),
    _quality("agreement, own index", "agreement_standard", 1.0, percent),
    _quality("cosine to the teacher", "cosine", 1.0, thousandths),
    _quality("ℓ2 distance to the teacher", "distance", 0.0, thousandths),
    _quality("share of task scores, own index", "share_standard", 1.0, percent),
    _quality("share of task scores, its index", "share_asymmetric", 1.0, percent),
)


def facts(report: Report) -> str:
    """The table; lines that no run has a figure for are left out."""
    teacher = [report.teacher.name] if report.teacher else []
    rows: list[tuple[str, ...]] = [("", *teacher, *(run.name for run in report.runs))]
    for row in ROWS:
        found = [row.of_run(report, run) for run in report.runs]
        if any(value is not None for value in found):
            whole = row.of_teacher(report)
            cells = [row.write(value) + (_ratio(whole, value) if row.smaller else "") for value in found]
            rows.append((row.label, *([row.write(whole)] if teacher else []), *cells))
    colours = ["", *("" for _ in teacher), *(colour(number) for number in range(len(report.runs)))]
    return table(rows, colours=colours if len(report.runs) > 1 else ())


def _ratio(large: float | None, small: float | None) -> str:
    if not large or not small:
        return ""
    return f"\n× {short(small / large)}" if small > large else f"\n÷ {short(large / small)}"


def notes(report: Report) -> str:
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
    return paragraph(" ".join([*said, *report.notes]), "note") if said or report.notes else ""
