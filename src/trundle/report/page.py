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
    brings: str = ""


PLACES = (
    Place(draw=overview.overview),
    Place(draw=budget.planning, brings="Compress with --budget to see the candidates that were weighed against each other."),
    Place(draw=curves.tasks_table, brings="Give --tasks FOLDER to see scores on tasks with labels beside the teacher's."),
    Place(draw=curves.layer_curve, brings="A recipe with depth: {pick: small} or {pick: large} leaves a layer curve."),
    Place(draw=curves.coverage_curve, brings="A recipe with the step vocabulary leaves a coverage curve."),
    Place(draw=maps.sparsity_map, brings="A recipe with the step weights leaves a map of the weights that are left."),
    Place(draw=curves.training_curves, brings="A recipe with align or contrast leaves training curves."),
    Place(draw=curves.shortened_vectors, brings="Give --data TEXTS to see both models' vectors cut short and quantised."),
    Place(draw=maps.projection, brings="Give --data TEXTS to see both models' vectors on one plane."),
    Place(draw=words.extreme_texts, brings="Give --data TEXTS to see the texts the student gets most wrong and most right."),
    Place(draw=words.searches, brings="Give --data TEXTS to see searches side by side."),
    Place(draw=words.recipes),
    Place(draw=words.usage),
)


def page(report: Report) -> str:
    """One HTML file."""
    drawn = [(place, place.draw(report)) for place in PLACES]
    sections = [section for _, section in drawn if section is not None]
    absent = [place.brings for place, section in drawn if section is None]
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
    names = [run.name for run in report.runs]
    made = names[0] if len(names) == 1 else f"{len(names)} runs: {', '.join(names)}"
    return f"{report.teacher.name} → {made}" if report.teacher and len(names) == 1 else made


def _headline(report: Report) -> str:
    """The few figures that matter, of the only run or of the smallest one."""
    if len(report.runs) > 1:
        teacher = f", beside their teacher {report.teacher.name}" if report.teacher else ""
        return paragraph(f"{len(report.runs)} runs compared{teacher}.", "lead")
    run, teacher = report.runs[0], report.teacher
    tiles: list[tuple[str, str]] = []
    size = teacher.bytes if teacher else None
    ratio = times(size, run.form.bytes)
    tiles.append((ratio, f"smaller: {megabytes(size)} → {megabytes(run.form.bytes)}") if size else (megabytes(run.form.bytes), "weights"))
    speed, slow = report.of(run).speed, teacher.speed if teacher else None
    if speed and slow:
        tiles.append(
            (times(slow.milliseconds, speed.milliseconds), f"faster queries: {milliseconds(slow.milliseconds)} → {milliseconds(speed.milliseconds)}")
        )
    quality = report.quality(run)
    if quality and quality.share_standard is not None:
        tiles.append((percent(quality.share_standard), "of the teacher's mean over tasks"))
    if quality and quality.agreement_asymmetric is not None:
        tiles.append((percent(quality.agreement_asymmetric), f"of the teacher's top {quality.k} found in its own index"))
    tiles.append((count(run.parameters or None), "parameters"))
    return f'<ul class="tiles">{"".join(f"<li><b>{escape(big)}</b><span>{escape(small)}</span></li>" for big, small in tiles)}</ul>'


def _absent(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return f'<footer>{paragraph(" ".join(dict.fromkeys(sentences)), "note")}</footer>'
