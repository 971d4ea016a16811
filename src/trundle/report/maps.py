"""Pictures of many small marks: which weights are left, and where both models put the same texts."""

from __future__ import annotations

from html import escape

from trundle.records import NEUTRAL, GradientAlignment, PrunedMatrix
from trundle.report.axes import _around, _Axis, _colour, _Plot, _svg
from trundle.report.markup import _choice, _figure, _paragraph, _percent, _Section, _side_by_side
from trundle.report.records import _Projection, _Report, _Run

_CELL_WIDTH, _CELL_HEIGHT = 78, 24
_LEFT, _LINE = 60, 14
_SHARED, _CONFLICTING, _SPECIFIC = _colour(0), _colour(1), "quiet"
_EDGE = 1e-9
_DARK = 0.55
"""From this share on, a cell is so full that its text is light."""


def _sparsity_map(report: _Report) -> _Section | None:
    """The share of each matrix that is left."""
    blocks = [(run.name, _left(run)) for run in report.runs if run.pruned]
    if not blocks:
        return None
    return _Section(key="sparsity", heading="What is left of the weights", body=_choice("Run", blocks))


def _left(run: _Run) -> str:
    weights, kept = sum(one.weights for one in run.pruned), sum(one.kept for one in run.pruned)
    lead = f"{_percent(kept / weights)} of {weights:,} weights in these matrices are left. The fuller a cell, the more of it."
    drawn = _paragraph(lead) + _figure(f'<div class="wide map" tabindex="0">{_heat(run.pruned)}</div>')
    if run.alignment is None:
        return drawn
    asked = (
        "Do the domain's gradients and the general ones pull the same way? Weights by the cosine of the two:"
    )
    return drawn + _paragraph(asked) + _figure(_agreement(run.alignment))


def _agreement(found: GradientAlignment) -> str:
    """How many weights lie in rows of each cosine between the two sides' mean gradients."""
    bins, total = len(found.counts), sum(found.counts) or 1
    shares = [count / total for count in found.counts]
    plot = _Plot(
        title="weights by how far the two sides' gradients agree",
        across=_Axis(label="cosine of the domain's and the general gradient", low=-1.0, high=1.0),
        up=_Axis(label="share of the weights", low=0.0, high=max(shares) or 1.0, write=_percent),
    )
    for place, share in enumerate(shares):
        low, high = -1 + 2 * place / bins, -1 + 2 * (place + 1) / bins
        kind = _SHARED if low >= NEUTRAL - _EDGE else _CONFLICTING if high <= -NEUTRAL + _EDGE else _SPECIFIC
        says = f"cosine {low:.2f} to {high:.2f}: {found.counts[place]:,} weights"
        plot.bar(low, high, share, kind, says=says)
    told = (
        ("shared", found.shared, _SHARED),
        ("specific to one side", found.specific, _SPECIFIC),
        ("conflicting", found.conflicting, _CONFLICTING),
    )
    words = (f'<b class="own {kind}">{name}</b> {_percent(count / total)}' for name, count, kind in told)
    return f"{plot.svg()}<p>{', '.join(words)}</p>"


def _heat(pruned: tuple[PrunedMatrix, ...]) -> str:
    """One row a layer, one column a matrix."""
    names = list(dict.fromkeys(one.matrix for one in pruned))
    layers = sorted({one.layer for one in pruned})
    parts = []
    deepest = max((len(_words(name)) for name in names), default=1)
    top = 8 + _LINE * deepest
    for place, name in enumerate(names):
        x = _LEFT + _CELL_WIDTH * (place + 0.5)
        for line, word in enumerate(reversed(_words(name))):
            above = top - 7 - _LINE * line
            parts.append(
                f'<text class="tick small" text-anchor="middle" x="{x:g}" y="{above}">{escape(word)}</text>'
            )
    for place, layer in enumerate(layers):
        y = top + _CELL_HEIGHT * (place + 0.5) + 5
        parts.append(f'<text class="tick" text-anchor="end" x="{_LEFT - 8}" y="{y:g}">layer {layer}</text>')
    for one in pruned:
        x, y = _LEFT + _CELL_WIDTH * names.index(one.matrix), top + _CELL_HEIGHT * layers.index(one.layer)
        share = one.kept / one.weights if one.weights else 0.0
        box = f'x="{x + 1}" y="{y + 1}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" rx="3"'
        says = f"layer {one.layer}, {one.matrix}: {one.kept:,} of {one.weights:,} weights are left"
        parts.append(f'<rect class="cell" {box}/>')
        parts.append(
            f'<rect class="mark heat" {box} fill-opacity="{share:.3f}"><title>{escape(says)}</title></rect>'
        )
        ink = "over" if share > _DARK else "ink"
        parts.append(
            f'<text class="{ink} cell-text" text-anchor="middle" x="{x + _CELL_WIDTH / 2:g}" y="{y + _CELL_HEIGHT / 2 + 5:g}">{100 * share:.0f}%</text>'
        )
    width, height = _LEFT + _CELL_WIDTH * len(names) + 8, top + _CELL_HEIGHT * len(layers) + 8
    return _svg(width, height, "share of the weights that are left, by layer and matrix", parts)


def _words(name: str) -> list[str]:
    """The parts of a matrix's name, one a line."""
    return name.removesuffix(".weight").split(".")


def _projection(report: _Report) -> _Section | None:
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
        f"the two. Point at a dot to read its text. {len(first.texts)} texts; the two directions hold {_percent(first.shown)} of "
        "the variance of the teacher's vectors, so what looks near here can be far in the whole space."
    )
    body = _paragraph(lead) + _side_by_side(planes)
    return _Section(key="projection", heading="The shared space", body=body)


def _plane(number: int, name: str, found: _Projection) -> str:
    both = [*found.teacher, *found.student]
    left, right = _around([x for x, _ in both], room=0.04)
    low, high = _around([y for _, y in both], room=0.04)
    plot = _Plot(
        title=f"{name}: vectors of {len(found.texts)} texts by teacher and student",
        across=_Axis(label="first principal direction of the teacher's vectors", low=left, high=right),
        up=_Axis(label="second principal direction", low=low, high=high),
        height=400,
    )
    for theirs, ours in zip(found.teacher, found.student, strict=True):
        plot.link(theirs, ours, f"link {_colour(number)}")
    for theirs, ours, text in zip(found.teacher, found.student, found.texts, strict=True):
        plot.dot(theirs, "ring", size=3.2)
        plot.dot(ours, f"{_colour(number)} fine", size=3.2, says=text, stop=False)
    return _figure(plot.svg(), heading=name)
