"""The page: header, overview of size, quality and speed, and the other sections, in one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from trundle.report.comparing import (
    _extreme_texts,
    _projections,
    _recipes,
    _searches,
    _shortened_vectors,
    _task_scores,
    _usage,
)
from trundle.report.contents import _Quality, _Report, _RunRecord
from trundle.report.making import (
    _layer_curve,
    _layer_curves,
    _planning,
    _pruned_weights,
    _training_curves,
    _vocabulary_coverage,
)
from trundle.report.markup import (
    _NOTHING,
    _choice,
    _count,
    _figure,
    _megabytes,
    _milliseconds,
    _one_line,
    _paragraph,
    _percent,
    _Section,
    _short,
    _side_by_side,
    _table,
    _thousandths,
    _tick_bytes,
    _times,
)
from trundle.report.plot import _around, _around_log, _Axis, _colour, _Plot

_Figure = Callable[[_Report, _RunRecord | None], float | None]
"""Returns a figure of a run, or of the teacher for None."""


def _cost(name: str) -> _Figure:
    def get(report: _Report, run: _RunRecord | None) -> float | None:
        return getattr(report.teacher if run is None else run, name, None) or None

    return get


def _speed(name: str) -> _Figure:
    def get(report: _Report, run: _RunRecord | None) -> float | None:
        found = report.teacher if run is None else report.of(run)
        return getattr(found and found.speed, name, None)

    return get


def _quality(name: str, of_teacher: float = 1.0) -> _Figure:
    def get(report: _Report, run: _RunRecord | None) -> float | None:
        return of_teacher if run is None else getattr(report.quality(run), name, None)

    return get


def _size(report: _Report, run: _RunRecord | None) -> float | None:
    return _cost("bytes")(report, None) if run is None else run.form.bytes


def _time(report: _Report, run: _RunRecord | None) -> float | None:
    """Return the time of a query, measured now or else by the search that made the run."""
    if (now := _speed("milliseconds")(report, run)) is not None:
        return now
    if run is not None:
        return run.planning.measured.get("milliseconds") if run.planning else None
    return next((run.planning.teacher.get("milliseconds") for run in report.runs if run.planning), None)


_ROWS: tuple[tuple[str, _Figure, Callable[[float | None], str], bool], ...] = (
    ("weights", _size, _megabytes, True),
    ("parameters", _cost("parameters"), _count, True),
    ("layers", _cost("layers"), _count, False),
    ("width", _cost("width"), _count, False),
    ("one query", _speed("milliseconds"), _milliseconds, True),
    (
        "long texts per second",
        _speed("texts_per_second"),
        lambda v: _NOTHING if v is None else _short(v),
        False,
    ),
    ("agreement, teacher's index", _quality("agreement_asymmetric"), _percent, False),
    ("agreement, own index", _quality("agreement_standard"), _percent, False),
    ("cosine to the teacher", _quality("cosine"), _thousandths, False),
    ("ℓ2 distance to the teacher", _quality("distance", 0.0), _thousandths, False),
    ("share of task scores, own index", _quality("share_standard"), _percent, False),
    ("share of task scores, teacher's index", _quality("share_asymmetric"), _percent, False),
)
"""Label, figure, format, and whether to show the ratio to the teacher."""

_METRICS = (
    ("agreement@10, teacher's index", _quality("agreement_asymmetric")),
    ("share of the teacher's task mean, own index", _quality("share_standard")),
    ("share of the teacher's task mean, teacher's index", _quality("share_asymmetric")),
    ("agreement@10, own index", _quality("agreement_standard")),
)
_NAME = 22
_FINE = 0.96
"""If the quality axis begins above this share, its ticks need a decimal."""


def _overview(report: _Report) -> _Section:
    """Plot each metric of quality against size and against speed, above a table of all figures."""
    blocks = []
    for label, quality in _METRICS:
        plots = [
            _figure(plot, heading=f"Quality against {what}")
            for what, across in (("size", _size), ("time for one query", _time))
            if (plot := _scatter(report, label, quality, across)) is not None
        ]
        if any(quality(report, run) is not None for run in report.runs):
            blocks.append((label, _side_by_side(plots) if len(plots) > 1 else "".join(plots)))
    pictures = _choice("Quality", blocks) if blocks else ""
    figures = _figures(report) + _notes(report)
    two_plots = any(_time(report, run) for run in report.runs)
    body = pictures + figures if two_plots else _side_by_side([pictures, f"<div>{figures}</div>"])
    return _Section(key="overview", heading="Size, quality, speed", body=body)


def _figures(report: _Report) -> str:
    """List all figures; rows without a figure of any run are left out."""
    teacher = [report.teacher.name] if report.teacher else []
    rows: list[tuple[str, ...]] = [("", *teacher, *(run.name for run in report.runs))]
    for label, get, write, with_ratio in _ROWS:
        found = [get(report, run) for run in report.runs]
        if any(value is not None for value in found):
            theirs = get(report, None)
            cells = [write(value) + (_ratio(theirs, value) if with_ratio else "") for value in found]
            rows.append((label, *([write(theirs)] if teacher else []), *cells))
    colours = ["", *("" for _ in teacher), *(_colour(number) for number in range(len(report.runs)))]
    return _table(rows, colours=colours if len(report.runs) > 1 else ())


def _ratio(large: float | None, small: float | None) -> str:
    if not large or not small:
        return ""
    return f"\n× {_short(small / large)}" if small > large else f"\n÷ {_short(large / small)}"


def _notes(report: _Report) -> str:
    """Say how the figures were measured."""
    notes = []
    qualities = _qualities(report)
    if qualities:
        on = sorted({quality.measured for quality in qualities})
        notes.append(f"Quality was measured on {'; or on '.join(on)}.")
    if any(quality.agreement_asymmetric is not None for quality in qualities):
        k = qualities[0].k
        notes.append(f"Agreement: the share of the teacher's top {k} documents that are also retrieved.")
    if report.machine:
        notes.append(f"Time: the median of one short query at a time, {report.machine}.")
    engines = sorted({run.form.engine for run in report.runs})
    if engines != ["torch"]:
        notes.append(f"Each run is measured in its fastest form here: {', '.join(engines)}.")
    notes += report.notes
    return _paragraph(" ".join(notes), "note") if notes else ""


def _qualities(report: _Report) -> list[_Quality]:
    return [quality for run in report.runs if (quality := report.quality(run)) is not None]


@dataclass(frozen=True, kw_only=True)
class _ModelMark:
    """A model in the plot."""

    name: str
    across: float
    up: float
    kind: str
    says: str


def _scatter(report: _Report, label: str, quality: _Figure, across: _Figure) -> str | None:
    """Plot the runs and the teacher, with the budgets; None if no run has both figures."""
    by_size = across is _size
    write = _megabytes if by_size else _milliseconds
    marks = []
    for number, run in enumerate(report.runs):
        cost, up = across(report, run), quality(report, run)
        if up is not None and cost:
            form = f"{write(cost)} ({run.form.engine}), {_count(run.parameters)} parameters"
            name, says = _one_line(run.name, _NAME), f"{run.name}: {_percent(up)} at {form}"
            marks.append(_ModelMark(name=name, across=cost, up=up, kind=_colour(number), says=says))
    if not marks:
        return None
    if teacher := across(report, None):
        says = f"{report.teacher.name if report.teacher else ''}, the teacher: {write(teacher)}"
        marks.append(_ModelMark(name="teacher", across=teacher, up=1.0, kind="teacher", says=says))
    unit = "bytes" if by_size else "milliseconds"
    limits = [value for run in report.runs if run.planning and (value := run.planning.budget.get(unit))]
    low, high = _around_log([*(mark.across for mark in marks), *limits])
    bottom = max(0.0, _around([*(mark.up for mark in marks), 1.0], room=0.12, least=0.05)[0])
    top = max(1.0, *(mark.up for mark in marks))
    plot = _Plot(
        title=f"{label}, against {'size' if by_size else 'time'}",
        across=_Axis(
            label=f"{'size of the weights' if by_size else 'time for one query'} (log scale)",
            low=low,
            high=high,
            log=True,
            write=_tick_bytes if by_size else lambda value: f"{value:g} ms",
        ),
        up=_Axis(
            label=label,
            low=bottom,
            high=top + 0.06 * (top - bottom),
            write=lambda v: f"{100 * v:.{0 if bottom < _FINE else 1}f}%",
        ),
    )
    plot.level(1.0, "whole")
    best = _frontier([(mark.across, mark.up) for mark in marks])
    if len(best) > 1:
        plot.line(best, "frontier")
    for mark in marks:
        plot.dot((mark.across, mark.up), mark.kind, size=7, says=mark.says)
    for limit in dict.fromkeys(limits):
        plot.upright(limit, f"budget {write(limit)}")
    for mark in marks:
        plot.name((mark.across, mark.up), mark.name, mark.kind, size=7)
    return plot.svg()


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that are not dominated by one further left and higher up."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


_TEXTS = "Pass --data TEXTS"
_SECTIONS: tuple[tuple[Callable[[_Report], _Section | None], str, str], ...] = (
    (_overview, "", ""),
    (_planning, "Compress with --budget", "the candidates of the search"),
    (_task_scores, "Pass --tasks FOLDER", "scores on labelled tasks"),
    (_layer_curves, "Use depth: {pick: small} in the recipe", "the layer curve"),
    (_vocabulary_coverage, "Use vocabulary in the recipe", "the coverage curve"),
    (_pruned_weights, "Use weights in the recipe", "the share of each matrix that is kept"),
    (_training_curves, "Use align or contrast in the recipe", "training curves"),
    (_shortened_vectors, _TEXTS, "scores with truncated and quantised vectors"),
    (_projections, _TEXTS, "both models' vectors in two dimensions"),
    (_extreme_texts, _TEXTS, "the texts with the largest and smallest distance to the teacher"),
    (_searches, _TEXTS, "search results compared"),
    (_recipes, "", ""),
    (_usage, "", ""),
)
"""What draws a section, and for a section without content: how to get it, and what it shows."""


def _page(report: _Report) -> str:
    """Return the report as one HTML file."""
    sections, absent = [], {}
    for draw, remedy, shows in _SECTIONS:
        if (section := draw(report)) is not None:
            sections.append(section)
        else:
            absent.setdefault(remedy, []).append(shows)
    contents = "".join(f'<a href="#{section.key}">{escape(section.heading)}</a>' for section in sections)
    body = "".join(
        f'<section id="{section.key}"><h2>{escape(section.heading)}</h2>{section.body}</section>'
        for section in sections
    )
    made = ", ".join(run.name for run in report.runs)
    return _document(
        f"{report.teacher.name} → {made}" if report.teacher else made,
        "trundle report",
        _headline(report),
        f'<nav aria-label="Sections">{contents}</nav><main>{body}{_absent(absent)}</main>',
    )


def _marked_curve(losses: Sequence[float], marks: Mapping[int, str], title: str) -> str:
    """Draw the layer curve with a line between the two halves of the layers."""
    plot = _layer_curve(
        losses, {layer: f"{name}: {layer}" for layer, name in marks.items()}, title, _colour(0)
    )
    if len(losses) > 1:
        middle = len(losses) // 2 + 0.5
        plot.link((middle, plot.up.low), (middle, plot.up.high), "whole")
    return plot.svg()


def curve_page(
    losses: Sequence[float],
    marks: Mapping[int, str],
    title: str,
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
) -> str:
    """Return an HTML file with the layer curve, a table and notes.

    `marks` are names by layer, `rows` the table with its heading.
    """
    body = (
        _figure(_marked_curve(losses, marks, title))
        + _table(rows, texts=(0, 1))
        + "".join(map(_paragraph, notes))
    )
    return _document(title, "trundle inspect", "", f"<main>{body}</main>")


def curve_svg(losses: Sequence[float], marks: Mapping[int, str], title: str) -> str:
    """Return the layer curve as an SVG file; `marks` are names by layer."""
    drawn = _marked_curve(losses, marks, title)
    frame = f'<style>{escape(_packaged("page.css"))}</style><rect class="paper" width="100%" height="100%"/>'
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace(">", f">{frame}", 1)


def _document(title: str, brand: str, headline: str, content: str) -> str:
    """Return an HTML file that loads nothing else; `title` is plain text."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_packaged('page.css')}</style></head><body>"
        f"<header><p class=brand>{brand}</p><h1>{escape(title)}</h1>{headline}</header>{content}"
        f'<div id="tip" role="tooltip" hidden></div><script>{_packaged("page.js")}</script></body></html>\n'
    )


def _packaged(name: str) -> str:
    return files("trundle.report").joinpath(name).read_text(encoding="utf-8")


def _headline(report: _Report) -> str:
    """Show the most important figures: of a single run as tiles, of several as one sentence."""
    if len(report.runs) > 1:
        return _paragraph(_summary(report), "lead")
    run, teacher = report.runs[0], report.teacher
    tiles: list[tuple[str, str]] = []
    size = teacher.bytes if teacher else None
    now = run.form.bytes
    if size and now:
        larger = now > size  # a pair also contains its teacher
        ratio = _times(now, size) if larger else _times(size, now)
        tiles.append((ratio, f"{'larger' if larger else 'smaller'}: {_megabytes(size)} → {_megabytes(now)}"))
    else:
        tiles.append((_megabytes(now), "weights"))
    speed = _speed("milliseconds")
    before, after = speed(report, None), speed(report, run)
    if before and after:
        slower = after > before
        ratio = _times(after, before) if slower else _times(before, after)
        change = f"{_milliseconds(before)} → {_milliseconds(after)}"
        tiles.append((ratio, f"{'slower' if slower else 'faster'} queries: {change}"))
    quality = report.quality(run)
    if quality and quality.share_standard is not None:
        tiles.append((_percent(quality.share_standard), "of the teacher's mean over tasks"))
    if quality and quality.agreement_asymmetric is not None:
        found = f"of the teacher's top {quality.k} retrieved from the teacher's index"
        tiles.append((_percent(quality.agreement_asymmetric), found))
    tiles.append((_count(run.parameters or None), "parameters"))
    items = "".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _summary(report: _Report) -> str:
    """Return the ranges of the figures of several runs."""
    if report.teacher is None:
        return f"{len(report.runs)} runs compared."

    def spread(values: Sequence[float], unit: str) -> str:
        ends = [f"{value:.1f}" for value in (min(values), max(values))]
        return f"{ends[0]}{unit}" if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}{unit}"

    parts = []
    if size := report.teacher.bytes:
        sizes = [size / run.form.bytes for run in report.runs if run.form.bytes]
        parts.append(f"{spread(sizes, '×')} smaller")
    slow = report.teacher.speed
    speeds = [speed.milliseconds for run in report.runs if (speed := report.of(run).speed)]
    if slow and speeds:
        parts.append(f"{spread([slow.milliseconds / speed for speed in speeds], '×')} faster")
    found = _qualities(report)
    shares = [100 * one.agreement_asymmetric for one in found if one.agreement_asymmetric is not None]
    if shares:
        parts.append(f"{spread(shares, '%')} of its top {found[0].k} retrieved from its index")
    figures = f": {', '.join(parts)}" if parts else ""
    return f"{len(report.runs)} runs compared with their teacher {report.teacher.name}{figures}."


def _absent(absent: Mapping[str, Sequence[str]]) -> str:
    """List the sections without content, and how to get them."""
    if not absent:
        return ""

    def joined(words: Sequence[str]) -> str:
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"

    items = "".join(
        f"<li>{escape(remedy)} to see {escape(joined(shows))}.</li>" for remedy, shows in absent.items()
    )
    return f'<footer class="note"><p>Not in this report:</p><ul>{items}</ul></footer>'
