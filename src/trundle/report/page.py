"""The page: sections in order, each left out where there is nothing to show, in one file that needs no other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from trundle.report import budget, curves, maps, overview, words
from trundle.report.figures import count, megabytes, milliseconds, percent, times
from trundle.report.markup import Section, paragraph
from trundle.report.records import Report


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place for a section, and what would fill it where it is empty."""

    draw: Callable[[Report], Section | None]
    cause: str = ""
    shows: str = ""


TEXTS, TASKS = "Give --data TEXTS", "Give --tasks FOLDER"
PLACES = (
    Place(draw=overview.overview),
    Place(draw=budget.planning, cause="Compress with --budget", shows="the candidates that were weighed"),
    Place(draw=curves.tasks_table, cause=TASKS, shows="scores on tasks with labels"),
    Place(draw=curves.layer_curve, cause="Have depth: {pick: small} in the recipe", shows="the layer curve"),
    Place(draw=curves.coverage_curve, cause="Have vocabulary in the recipe", shows="the coverage curve"),
    Place(draw=maps.sparsity_map, cause="Have weights in the recipe", shows="which weights are left"),
    Place(draw=curves.training_curves, cause="Have align or contrast in the recipe", shows="training curves"),
    Place(draw=curves.shortened_vectors, cause=TEXTS, shows="both models' vectors cut short and quantised"),
    Place(draw=maps.projection, cause=TEXTS, shows="both models' vectors on one plane"),
    Place(
        draw=words.extreme_texts, cause=TEXTS, shows="the texts the student gets most wrong and most right"
    ),
    Place(draw=words.searches, cause=TEXTS, shows="searches side by side"),
    Place(draw=words.recipes),
    Place(draw=words.usage),
)


def page(report: Report) -> str:
    """One HTML file."""
    drawn = [(place, place.draw(report)) for place in PLACES]
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


def _title(report: Report) -> str:
    made = ", ".join(run.name for run in report.runs)
    return f"{report.teacher.name} → {made}" if report.teacher else made


def _headline(report: Report) -> str:
    """The few figures that matter: of the only run as tiles, of several as one sentence."""
    if len(report.runs) > 1:
        return paragraph(_in_short(report), "lead")
    run, teacher = report.runs[0], report.teacher
    tiles: list[tuple[str, str]] = []
    size = teacher.bytes if teacher else None
    now = run.form.bytes
    if size and now:
        larger = now > size  # as a pair is, which holds its teacher too
        ratio = times(now, size) if larger else times(size, now)
        tiles.append((ratio, f"{'larger' if larger else 'smaller'}: {megabytes(size)} → {megabytes(now)}"))
    else:
        tiles.append((megabytes(now), "weights"))
    speed, slow = report.of(run).speed, teacher.speed if teacher else None
    if speed and slow:
        slower = speed.milliseconds > slow.milliseconds
        pair = (speed, slow) if slower else (slow, speed)
        tiles.append(
            (
                times(*(one.milliseconds for one in pair)),
                f"{'slower' if slower else 'faster'} queries: {milliseconds(slow.milliseconds)} → {milliseconds(speed.milliseconds)}",
            )
        )
    quality = report.quality(run)
    if quality and quality.share_standard is not None:
        tiles.append((percent(quality.share_standard), "of the teacher's mean over tasks"))
    if quality and quality.agreement_asymmetric is not None:
        tiles.append(
            (
                percent(quality.agreement_asymmetric),
                f"of the teacher's top {quality.k} found on the teacher's index",
            )
        )
    tiles.append((count(run.parameters or None), "parameters"))
    return f'<ul class="tiles">{"".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)}</ul>'


def _in_short(report: Report) -> str:
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


def _absent(places: Sequence[Place]) -> str:
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
