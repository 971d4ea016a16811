"""Pictures of many small marks: which weights are left, and where both models put the same texts."""

from __future__ import annotations

from html import escape

from trundle.measure.pruned_matrix import NEUTRAL, Alignment, PrunedMatrix
from trundle.report.axes import Axis, Plot, around, colour, svg
from trundle.report.figures import percent
from trundle.report.markup import Section, choice, figure, paragraph, side_by_side
from trundle.report.records import Projection, Report, Run

CELL_WIDTH, CELL_HEIGHT = 78, 24
LEFT, LINE = 60, 14
SHARED, CONFLICTING, SPECIFIC = colour(0), colour(1), "quiet"
EDGE = 1e-9
DARK = 0.55
"""From this share on, a cell is so full that its text is light."""


def sparsity_map(report: Report) -> Section | None:
    """The share of each matrix that is left."""
    blocks = [(run.name, _left(run)) for run in report.runs if run.pruned]
    if not blocks:
        return None
    return Section(key="sparsity", heading="What is left of the weights", body=choice("Run", blocks))


def _left(run: Run) -> str:
    weights, kept = sum(one.weights for one in run.pruned), sum(one.kept for one in run.pruned)
    lead = f"{percent(kept / weights)} of {weights:,} weights in these matrices are left. The fuller a cell, the more of it."
    drawn = paragraph(lead) + figure(f'<div class="wide map" tabindex="0">{heat(run.pruned)}</div>')
    if run.alignment is None:
        return drawn
    asked = (
        "Do the domain's gradients and the general ones pull the same way? Weights by the cosine of the two:"
    )
    return drawn + paragraph(asked) + figure(agreement(run.alignment))


def agreement(found: Alignment) -> str:
    """How many weights lie in rows of each cosine between the two sides' mean gradients."""
    bins, total = len(found.counts), sum(found.counts) or 1
    shares = [count / total for count in found.counts]
    plot = Plot(
        title="weights by how far the two sides' gradients agree",
        across=Axis(label="cosine of the domain's and the general gradient", low=-1.0, high=1.0),
        up=Axis(label="share of the weights", low=0.0, high=max(shares) or 1.0, write=percent),
    )
    for place, share in enumerate(shares):
        low, high = -1 + 2 * place / bins, -1 + 2 * (place + 1) / bins
        kind = SHARED if low >= NEUTRAL - EDGE else CONFLICTING if high <= -NEUTRAL + EDGE else SPECIFIC
        says = f"cosine {low:.2f} to {high:.2f}: {found.counts[place]:,} weights"
        plot.bar(low, high, share, kind, says=says)
    told = (
        ("shared", found.shared, SHARED),
        ("specific to one side", found.specific, SPECIFIC),
        ("conflicting", found.conflicting, CONFLICTING),
    )
    words = (f'<b class="own {kind}">{name}</b> {percent(count / total)}' for name, count, kind in told)
    return f"{plot.svg()}<p>{', '.join(words)}</p>"


def heat(pruned: tuple[PrunedMatrix, ...]) -> str:
    """One row a layer, one column a matrix."""
    names = list(dict.fromkeys(one.matrix for one in pruned))
    layers = sorted({one.layer for one in pruned})
    parts = []
    deepest = max((len(_words(name)) for name in names), default=1)
    top = 8 + LINE * deepest
    for place, name in enumerate(names):
        x = LEFT + CELL_WIDTH * (place + 0.5)
        for line, word in enumerate(reversed(_words(name))):
            above = top - 7 - LINE * line
            parts.append(
                f'<text class="tick small" text-anchor="middle" x="{x:g}" y="{above}">{escape(word)}</text>'
            )
    for place, layer in enumerate(layers):
        y = top + CELL_HEIGHT * (place + 0.5) + 5
        parts.append(f'<text class="tick" text-anchor="end" x="{LEFT - 8}" y="{y:g}">layer {layer}</text>')
    for one in pruned:
        x, y = LEFT + CELL_WIDTH * names.index(one.matrix), top + CELL_HEIGHT * layers.index(one.layer)
        share = one.kept / one.weights if one.weights else 0.0
        box = f'x="{x + 1}" y="{y + 1}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" rx="3"'
        says = f"layer {one.layer}, {one.matrix}: {one.kept:,} of {one.weights:,} weights are left"
        parts.append(f'<rect class="cell" {box}/>')
        parts.append(
            f'<rect class="mark heat" {box} fill-opacity="{share:.3f}"><title>{escape(says)}</title></rect>'
        )
        ink = "over" if share > DARK else "ink"
        parts.append(
            f'<text class="{ink} cell-text" text-anchor="middle" x="{x + CELL_WIDTH / 2:g}" y="{y + CELL_HEIGHT / 2 + 5:g}">{100 * share:.0f}%</text>'
        )
    width, height = LEFT + CELL_WIDTH * len(names) + 8, top + CELL_HEIGHT * len(layers) + 8
    return svg(width, height, "share of the weights that are left, by layer and matrix", parts)


def _words(name: str) -> list[str]:
    """The parts of a matrix's name, one a line."""
    return name.removesuffix(".weight").split(".")


def projection(report: Report) -> Section | None:
    """Teacher and student vectors of the same texts, each pair joined by a line."""
    planes = [
        _plane(number, run.name, found)
        for number, run in enumerate(report.runs)
        if (found := report.of(run).projection) is not None
    ]
    if not planes:
        return None
    first = next(found for run in report.runs if (found := report.of(run).projection) is not None)
    lead = (
        "Vectors of the same texts by teacher (ring) and student (dot), joined by a line: the shorter the lines, the nearer "
        f"the two. Point at a dot to read its text. {len(first.texts)} texts; the two directions hold {percent(first.shown)} of "
        "the variance of the teacher's vectors, so what looks near here can be far in the whole space."
    )
    body = paragraph(lead) + side_by_side(planes)
    return Section(key="projection", heading="The shared space", body=body)


def _plane(number: int, name: str, found: Projection) -> str:
    both = [*found.teacher, *found.student]
    left, right = around([x for x, _ in both], room=0.04)
    low, high = around([y for _, y in both], room=0.04)
    plot = Plot(
        title=f"{name}: vectors of {len(found.texts)} texts by teacher and student",
        across=Axis(label="first principal direction of the teacher's vectors", low=left, high=right),
        up=Axis(label="second principal direction", low=low, high=high),
        height=400,
    )
    for theirs, ours in zip(found.teacher, found.student, strict=True):
        plot.link(theirs, ours, f"link {colour(number)}")
    for theirs, ours, text in zip(found.teacher, found.student, found.texts, strict=True):
        plot.dot(theirs, "ring", size=3.2)
        plot.dot(ours, f"{colour(number)} fine", size=3.2, says=text, stop=False)
    return figure(plot.svg(), heading=name)
