"""The page: sections in order, each left out where there is nothing to show, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from trundle.report.curves import (
    _coverage_curve,
    _layer_curve,
    _shortened_vectors,
    _tasks_table,
    _training_curves,
)
from trundle.report.maps import _projection, _sparsity_map
from trundle.report.markup import _count, _megabytes, _milliseconds, _paragraph, _percent, _Section, _times
from trundle.report.overview import _overview
from trundle.report.planning import _planning
from trundle.report.records import _Report
from trundle.report.words import _extreme_texts, _recipes, _searches, _usage


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A place for a section, and what would fill it where it is empty."""

    draw: Callable[[_Report], _Section | None]
    cause: str = ""
    shows: str = ""


_TEXTS, _TASKS = "Give --data TEXTS", "Give --tasks FOLDER"
_PLACES = (
    _Place(draw=_overview),
    _Place(draw=_planning, cause="Compress with --budget", shows="the candidates that were weighed"),
    _Place(draw=_tasks_table, cause=_TASKS, shows="scores on tasks with labels"),
    _Place(draw=_layer_curve, cause="Have depth: {pick: small} in the recipe", shows="the layer curve"),
    _Place(draw=_coverage_curve, cause="Have vocabulary in the recipe", shows="the coverage curve"),
    _Place(draw=_sparsity_map, cause="Have weights in the recipe", shows="which weights are left"),
    _Place(draw=_training_curves, cause="Have align or contrast in the recipe", shows="training curves"),
    _Place(draw=_shortened_vectors, cause=_TEXTS, shows="both models' vectors cut short and quantised"),
    _Place(draw=_projection, cause=_TEXTS, shows="both models' vectors on one plane"),
    _Place(draw=_extreme_texts, cause=_TEXTS, shows="the texts the student gets most wrong and most right"),
    _Place(draw=_searches, cause=_TEXTS, shows="searches side by side"),
    _Place(draw=_recipes),
    _Place(draw=_usage),
)


def _page(report: _Report) -> str:
    """One HTML file."""
    drawn = [(place, place.draw(report)) for place in _PLACES]
    sections = [section for _, section in drawn if section is not None]
    absent = [place for place, section in drawn if section is None]
    contents = "".join(f'<a href="#{section.key}">{escape(section.heading)}</a>' for section in sections)
    body = "".join(
        f'<section id="{section.key}"><h2>{escape(section.heading)}</h2>{section.body}</section>'
        for section in sections
    )
    title = _title(report)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{_packaged('page.css')}</style></head><body>"
        f"<header><p class=brand>trundle report</p><h1>{escape(title)}</h1>{_headline(report)}</header>"
        f'<nav aria-label="Sections">{contents}</nav><main>{body}{_absent(absent)}</main>'
        f'<div id="tip" role="tooltip" hidden></div><script>{_packaged("page.js")}</script></body></html>\n'
    )


def _packaged(name: str) -> str:
    return files("trundle.report").joinpath(name).read_text(encoding="utf-8")


def _title(report: _Report) -> str:
    made = ", ".join(run.name for run in report.runs)
    return f"{report.teacher.name} → {made}" if report.teacher else made


def _headline(report: _Report) -> str:
    """The few figures that matter: of the only run as tiles, of several as one sentence."""
    if len(report.runs) > 1:
        return _paragraph(_in_short(report), "lead")
    run, teacher = report.runs[0], report.teacher
    tiles: list[tuple[str, str]] = []
    size = teacher.bytes if teacher else None
    now = run.form.bytes
    if size and now:
        larger = now > size  # as a pair is, which holds its teacher too
        ratio = _times(now, size) if larger else _times(size, now)
        tiles.append((ratio, f"{'larger' if larger else 'smaller'}: {_megabytes(size)} → {_megabytes(now)}"))
    else:
        tiles.append((_megabytes(now), "weights"))
    speed, slow = report.of(run).speed, teacher.speed if teacher else None
    if speed and slow:
        slower = speed.milliseconds > slow.milliseconds
        pair = (speed, slow) if slower else (slow, speed)
        tiles.append(
            (
                _times(*(one.milliseconds for one in pair)),
                f"{'slower' if slower else 'faster'} queries: {_milliseconds(slow.milliseconds)} → {_milliseconds(speed.milliseconds)}",
            )
        )
    quality = report.quality(run)
    if quality and quality.share_standard is not None:
        tiles.append((_percent(quality.share_standard), "of the teacher's mean over tasks"))
    if quality and quality.agreement_asymmetric is not None:
        tiles.append(
            (
                _percent(quality.agreement_asymmetric),
                f"of the teacher's top {quality.k} found on the teacher's index",
            )
        )
    tiles.append((_count(run.parameters or None), "parameters"))
    return f'<ul class="tiles">{"".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)}</ul>'


def _in_short(report: _Report) -> str:
    """How far several runs reach from one another."""
    if report.teacher is None:
        return f"{len(report.runs)} runs side by side."
    said = []
    if size := report.teacher.bytes:
        said.append(
            f"{_from_to([size / run.form.bytes for run in report.runs if run.form.bytes], '×')} smaller"
        )
    slow = report.teacher.speed
    speeds = [speed.milliseconds for run in report.runs if (speed := report.of(run).speed)]
    if slow and speeds:
        said.append(f"{_from_to([slow.milliseconds / speed for speed in speeds], '×')} faster")
    found = [quality for run in report.runs if (quality := report.quality(run))]
    shares = [
        100 * quality.agreement_asymmetric for quality in found if quality.agreement_asymmetric is not None
    ]
    if shares:
        said.append(f"{_from_to(shares, '%')} of its top {found[0].k} found on its index")
    facts = f": {', '.join(said)}" if said else ""
    return f"{len(report.runs)} runs beside their teacher {report.teacher.name}{facts}."


def _from_to(values: Sequence[float], unit: str) -> str:
    ends = [f"{value:.1f}" for value in (min(values), max(values))]
    return f"{ends[0]}{unit}" if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}{unit}"


def _absent(places: Sequence[_Place]) -> str:
    """What is not on the page, and what would bring it."""
    if not places:
        return ""
    by_cause: dict[str, list[str]] = {}
    for place in places:
        by_cause.setdefault(place.cause, []).append(place.shows)
    items = "".join(
        f"<li>{escape(cause)} to see {escape(_and(shows))}.</li>" for cause, shows in by_cause.items()
    )
    return f'<footer class="note"><p>Not on this page:</p><ul>{items}</ul></footer>'


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
