"""The page: header, overview of size, quality and speed, and the other sections, in one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    _coverage,
    _layer_curve,
    _layer_curves,
    _planning,
    _pruned_weights,
    _training_curves,
)
from trundle.report.markup import (
    _NOTHING,
    _around,
    _around_log,
    _Axis,
    _choice,
    _colour,
    _count,
    _figure,
    _grid,
    _megabytes,
    _milliseconds,
    _one_line,
    _paragraph,
    _percent,
    _Plot,
    _short,
    _table,
    _thousandths,
    _tick_bytes,
    _times,
)


def _value(report: _Report, run: _RunRecord | None, name: str) -> float | None:
    """Return a figure of a run, or of the teacher for None."""
    if run is None:
        places: tuple[object, ...] = (report.teacher, report.teacher and report.teacher.speed)
    else:
        places = (run, run.form, report.of(run).speed, report.quality(run))
    found = [getattr(place, name, None) for place in places]
    # A count of 0 is unknown.
    known = (value for value in found if value is not None and (value or isinstance(value, float)))
    return next(known, _IDEAL.get(name) if run is None else None)


def _time(report: _Report, run: _RunRecord | None) -> float | None:
    """Return the time of a query, measured now or else by the search that made the run."""
    if (now := _value(report, run, "milliseconds")) is not None:
        return now
    if run is not None:
        return run.planning.measured.get("milliseconds") if run.planning else None
    return next((run.planning.teacher.get("milliseconds") for run in report.runs if run.planning), None)


_ROWS: tuple[tuple[str, str, Callable[[float | None], str], bool], ...] = (
    ("weights", "bytes", _megabytes, True),
    ("parameters", "parameters", _count, True),
    ("layers", "layers", _count, False),
    ("width", "width", _count, False),
    ("one query", "milliseconds", _milliseconds, True),
    ("long texts per second", "texts_per_second", lambda v: _NOTHING if v is None else _short(v), False),
    ("agreement, teacher's index", "agreement_asymmetric", _percent, False),
    ("agreement, own index", "agreement_standard", _percent, False),
    ("cosine to the teacher", "cosine", _thousandths, False),
    ("ℓ2 distance to the teacher", "distance", _thousandths, False),
    ("share of task scores, own index", "share_standard", _percent, False),
    ("share of task scores, teacher's index", "share_asymmetric", _percent, False),
)
"""Label, name of the figure, format, and whether to show the ratio to the teacher."""

_METRICS = {
    "agreement_asymmetric": "agreement@10, teacher's index",
    "share_standard": "share of the teacher's task mean, own index",
    "share_asymmetric": "share of the teacher's task mean, teacher's index",
    "agreement_standard": "agreement@10, own index",
}
_IDEAL = dict.fromkeys(_METRICS, 1.0) | {"cosine": 1.0, "distance": 0.0}
"""The quality of the teacher itself."""
_NAME = 22
_FINE = 0.96
"""If the quality axis begins above this share, its ticks need a decimal."""


def _overview(report: _Report) -> str:
    """Plot each metric of quality against size and against speed, above a table of all figures."""
    blocks = []
    for metric, label in _METRICS.items():
        plots = [
            _figure(plot, heading=f"Quality against {what}")
            for what in ("size", "time for one query")
            if (plot := _scatter(report, metric, by_size=what == "size")) is not None
        ]
        if any(_value(report, run, metric) is not None for run in report.runs):
            blocks.append((label, _grid(plots) if len(plots) > 1 else "".join(plots)))
    pictures = _choice("Quality", blocks)
    figures = _figures(report) + _notes(report)
    two_plots = any(_time(report, run) for run in report.runs)
    return pictures + figures if two_plots else _grid([pictures, f"<div>{figures}</div>"])


def _figures(report: _Report) -> str:
    """List all figures; rows without a figure of any run are left out."""
    teacher = [report.teacher.name] if report.teacher else []
    rows: list[tuple[str, ...]] = [("", *teacher, *(run.name for run in report.runs))]
    for label, name, write, with_ratio in _ROWS:
        found = [_value(report, run, name) for run in report.runs]
        if any(value is not None for value in found):
            theirs = _value(report, None, name)
            cells = [write(value) + (_ratio(theirs, value) if with_ratio else "") for value in found]
            rows.append((label, *([write(theirs)] if teacher else []), *cells))
    colours = ["", *("" for _ in teacher), *(_colour(number) for number in range(len(report.runs)))]
    return _table(rows, colours=colours if len(report.runs) > 1 else ())


def _ratio(large: float | None, small: float | None) -> str:
    if not large or not small:
        return ""
    return f"\n× {_short(small / large)}" if small > large else f"\n÷ {_short(large / small)}"


def _notes(report: _Report) -> str:
    notes = []
    qualities = _qualities(report)
    if on := sorted({quality.measured for quality in qualities}):
        notes.append(f"Quality was measured on {'; or on '.join(on)}.")
    if any(quality.agreement_asymmetric is not None for quality in qualities):
        k = qualities[0].k
        notes.append(f"Agreement: the share of the teacher's top {k} documents that are also retrieved.")
    if report.machine:
        warning = f"; {report.busy}" if report.busy else ""
        notes.append(f"Time: the median of one short query at a time, {report.machine}{warning}.")
    engines = sorted({run.form.engine for run in report.runs})
    if engines != ["torch"]:
        notes.append(f"Each run is measured in its fastest form here: {', '.join(engines)}.")
    notes += report.notes
    return _paragraph(" ".join(notes), "note") if notes else ""


def _qualities(report: _Report) -> list[_Quality]:
    return [quality for run in report.runs if (quality := report.quality(run)) is not None]


def _scatter(report: _Report, metric: str, *, by_size: bool) -> str | None:
    """Plot the runs and the teacher, with the budgets; None if no run has both figures."""
    write = _megabytes if by_size else _milliseconds

    def across(run: _RunRecord | None) -> float | None:
        return _value(report, run, "bytes") if by_size else _time(report, run)

    marks: list[tuple[tuple[float, float], str, str, str]] = []  # place, class, name, tooltip
    for number, run in enumerate(report.runs):
        cost, up = across(run), _value(report, run, metric)
        if up is not None and cost:
            form = f"{write(cost)} ({run.form.engine}), {_count(run.parameters)} parameters"
            name, says = _one_line(run.name, _NAME), f"{run.name}: {_percent(up)} at {form}"
            marks.append(((cost, up), _colour(number), name, says))
    if not marks:
        return None
    if teacher := across(None):
        says = f"{report.teacher.name if report.teacher else ''}, the teacher: {write(teacher)}"
        marks.append(((teacher, 1.0), "teacher", "teacher", says))
    places = [place for place, *_ in marks]
    unit = "bytes" if by_size else "milliseconds"
    limits = [value for run in report.runs if run.planning and (value := run.planning.budget.get(unit))]
    low, high = _around_log([*(x for x, _ in places), *limits])
    bottom = max(0.0, _around([*(y for _, y in places), 1.0], room=0.12, least=0.05)[0])
    top = max(1.0, *(y for _, y in places))
    digits = 0 if bottom < _FINE else 1
    label = _METRICS[metric]
    name, write_tick = (
        ("size of the weights", _tick_bytes) if by_size else ("time for one query", "{:g} ms".format)
    )
    plot = _Plot(
        f"{label}, against {'size' if by_size else 'time'}",
        _Axis(f"{name} (log scale)", low, high, log=True, write=write_tick),
        _Axis(label, bottom, top + 0.06 * (top - bottom), write=lambda v: f"{100 * v:.{digits}f}%"),
    )
    plot.level(1.0, "whole")
    if len(best := _frontier(places)) > 1:
        plot.line(best, "frontier")
    for place, kind, _, says in marks:
        plot.dot(place, kind, size=7, says=says)
    for limit in dict.fromkeys(limits):
        plot.limit(limit, f"budget {write(limit)}")
    for place, kind, name, _ in marks:
        plot.name(place, name, kind, size=7)
    return plot.svg()


def _frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that are not dominated by one further left and higher up."""
    best: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or point[1] > best[-1][1]:
            best.append(point)
    return best


_TEXTS = "Pass --data TEXTS"
_SECTIONS: tuple[tuple[str, str, Callable[[_Report], str], str, str], ...] = (
    ("overview", "Size, quality, speed", _overview, "", ""),
    ("budget", "How the budget was met", _planning, "Compress with --budget", "the candidates of the search"),
    ("tasks", "Labelled tasks", _task_scores, "Pass --tasks FOLDER", "scores on labelled tasks"),
    ("layers", "Layer curve", _layer_curves, "Use depth: {pick: small} in the recipe", "the layer curve"),
    ("coverage", "Coverage of the vocabulary", _coverage, "Use vocabulary in the recipe", "its coverage"),
    ("sparsity", "Pruned weights", _pruned_weights, "Use weights in the recipe", "the weights that are kept"),
    ("training", "Training", _training_curves, "Use align or contrast in the recipe", "training curves"),
    ("shortened", "Truncation and quantisation", _shortened_vectors, _TEXTS, "truncation and quantisation"),
    ("projection", "The shared space", _projections, _TEXTS, "both models' vectors in two dimensions"),
    ("texts", "Worst and best texts", _extreme_texts, _TEXTS, "the worst and best texts"),
    ("searches", "Search results compared", _searches, _TEXTS, "search results compared"),
    ("recipe", "Recipe and lineage", _recipes, "", ""),
    ("use", "Use it", _usage, "", ""),
)
"""Anchor, heading and content of a section; for one without content, how to get it and what it shows."""


def _page(report: _Report) -> str:
    contents = body = ""
    absent: dict[str, str] = {}
    for key, heading, draw, remedy, shows in _SECTIONS:
        if content := draw(report):
            contents += f'<a href="#{key}">{escape(heading)}</a>'
            body += f'<section id="{key}"><h2>{escape(heading)}</h2>{content}</section>'
        else:
            absent[remedy] = f"{absent[remedy]}, {shows}" if remedy in absent else shows
    items = "".join(f"<li>{escape(how)} to see {escape(shows)}.</li>" for how, shows in absent.items())
    footer = f'<footer class="note"><p>Not in this report:</p><ul>{items}</ul></footer>' if items else ""
    made = ", ".join(run.name for run in report.runs)
    return _document(
        f"{report.teacher.name} → {made}" if report.teacher else made,
        "trundle report",
        _headline(report),
        f'<nav aria-label="Sections">{contents}</nav><main>{body}{footer}</main>',
    )


def _marked_curve(losses: Sequence[float], marks: Mapping[int, str], title: str) -> str:
    """Draw the layer curve with a line between the two halves of the layers."""
    names = {layer: f"{name}: {layer}" for layer, name in marks.items()}
    plot = _layer_curve(losses, names, title, _colour(0))
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
    body = _figure(_marked_curve(losses, marks, title)) + _table(rows, texts=(0, 1))
    return _document(title, "trundle inspect", "", f"<main>{body}{''.join(map(_paragraph, notes))}</main>")


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
    run, quality = report.runs[0], report.quality(report.runs[0])
    tiles: list[tuple[str, str]] = []

    def change(name: str, less: str, more: str, write: Callable[[float | None], str]) -> None:
        before, after = (_value(report, one, name) for one in (None, run))
        if before and after:
            word = more if after > before else less
            both = f"{write(before)} → {write(after)}"
            tiles.append((_times(max(before, after), min(before, after)), f"{word}: {both}"))

    change("bytes", "smaller", "larger", _megabytes)
    if not tiles:
        tiles.append((_megabytes(run.form.bytes), "weights"))
    cores = _cores(report)
    change("milliseconds", f"faster queries{cores}", f"slower queries{cores}", _milliseconds)
    if quality and quality.share_standard is not None:
        tiles.append((_percent(quality.share_standard), "of the teacher's mean over tasks"))
    if quality and quality.agreement_asymmetric is not None:
        found = f"of the teacher's top {quality.k} retrieved from the teacher's index"
        tiles.append((_percent(quality.agreement_asymmetric), found))
    tiles.append((_count(run.parameters or None), "parameters"))
    items = "".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _cores(report: _Report) -> str:
    return " on busy cores" if report.busy else ""


def _summary(report: _Report) -> str:
    runs, parts = report.runs, []
    if report.teacher is None:
        return f"{len(runs)} runs compared."

    def add(values: Sequence[float], unit: str, what: str) -> None:
        if values:
            ends = dict.fromkeys(f"{value:.1f}" for value in (min(values), max(values)))
            parts.append(f"{'–'.join(ends)}{unit} {what}")

    for name, what in (("bytes", "smaller"), ("milliseconds", f"faster{_cores(report)}")):
        theirs, ours = _value(report, None, name), [_value(report, run, name) for run in runs]
        add([theirs / value for value in ours if value] if theirs else [], "×", what)
    found = _qualities(report)
    shares = [100 * one.agreement_asymmetric for one in found if one.agreement_asymmetric is not None]
    add(shares, "%", f"of its top {found[0].k} retrieved from its index" if found else "")
    figures = f": {', '.join(parts)}" if parts else ""
    return f"{len(runs)} runs compared with their teacher {report.teacher.name}{figures}."
