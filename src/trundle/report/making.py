"""Sections on how the runs were made: budget search, layers, vocabulary, pruned weights, training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate

from trundle.records import NEUTRAL, CandidateRecord, GradientAlignment, PlanningRecord, PrunedMatrix
from trundle.report.contents import _Coverage, _Point, _Report, _RunRecord, _TokenCurve
from trundle.report.markup import (
    _around,
    _Axis,
    _choice,
    _colour,
    _count,
    _figure,
    _grid,
    _megabytes,
    _milliseconds,
    _numbered,
    _one_line,
    _paragraph,
    _percent,
    _plain,
    _Plot,
    _room_for,
    _svg,
    _table,
    _thousandths,
)

_CANDIDATE_NAME, _RUN_NAME = 44, 14
"""The most characters of a name in a plot."""


def _planning(report: _Report) -> str:
    runs = enumerate(report.runs)
    return _choice("Run", [(run.name, _search(number, run.planning)) for number, run in runs if run.planning])


def _search(number: int, plan: PlanningRecord) -> str:
    size, parameters, time = (plan.budget.get(key) for key in ("bytes", "parameters", "milliseconds"))
    given = (size, _megabytes(size)), (parameters, f"{_count(parameters)} parameters")
    limits = [shown for limit, shown in (*given, (time, f"{_milliseconds(time)} per query")) if limit]
    tried = [one for one in plan.candidates if one.rungs]
    rungs = sum(len(one.rungs) for one in tried)
    candidates = _numbered(len(plan.candidates), "candidate was", "candidates were")
    lead = f"Budget: {' and '.join(limits)}. {candidates} compared by predicted size and speed; "
    if tried:
        trainings = _numbered(rungs, "short training", "short trainings")
        lead += f"{_numbered(len(tried), 'was', 'were')} tried in {trainings}; "
    picture = ""
    if len(tried) > 1:
        caption = "Each line is a candidate; it ends where the candidate was dropped. Hover or tab for names."
        picture = _figure(_halving(number, plan, tried), caption, heading="Successive halving")
    remarks = [f"{remark[:1].upper()}{remark[1:]}." for remark in plan.remarks]
    text = "".join(map(_paragraph, [f"{lead}{plan.chosen} was chosen.", *remarks]))
    return text + _grid([picture, f"<div>{_forecast(plan)}</div>"]) + _candidates(plan)


def _candidates(plan: PlanningRecord) -> str:
    """List the candidates that were tried, the chosen one first; the others can be unfolded."""

    def order(one: CandidateRecord) -> tuple[bool, int, float]:
        return one.name != plan.chosen, -len(one.rungs), one.rungs[-1].distance if one.rungs else 0

    def row(one: CandidateRecord) -> tuple[str, ...]:
        size, time = _megabytes(one.bytes), _milliseconds(one.milliseconds)
        return one.name, one.outcome, _count(one.parameters), size, time

    ordered = sorted(plan.candidates, key=order)
    shown = [one for one in ordered if one.rungs or one.name == plan.chosen]
    rest = [one for one in ordered if one not in shown]
    heading = ("candidate", "outcome", "parameters", "weights", "one query")
    distances = [_thousandths(one.rungs[-1].distance if one.rungs else None) for one in shown]
    rows = [(*row(one), str(len(one.rungs)), last) for one, last in zip(shown, distances, strict=True)]
    bold = [0] if shown and shown[0].name == plan.chosen else []
    tried = _table([(*heading, "short trainings", "distance"), *rows], texts=(0, 1), bold=bold)
    if not rest:
        return tried
    others = _table([heading, *map(row, rest)], texts=(0, 1))
    summary = _numbered(len(rest), "candidate that was", "candidates that were")
    return f"{tried}<details><summary>{summary} not tried</summary>{others}</details>"


def _halving(number: int, plan: PlanningRecord, tried: list[CandidateRecord]) -> str:
    longest = max(sum(rung.steps for rung in one.rungs) for one in tried)
    low, high = _around([rung.distance for one in tried for rung in one.rungs], room=0.16)
    plot = _Plot(
        "distance of each candidate to the teacher after each short training",
        _Axis("training steps, all rounds together", 0, longest * 1.04, write=lambda v: f"{v:,.0f}"),
        _Axis("distance to the teacher, validation texts (lower is better)", max(0.0, low), high),
    )
    for one in sorted(tried, key=lambda one: one.name == plan.chosen):
        chosen = one.name == plan.chosen
        kind = _colour(number) if chosen else "quiet"
        steps = accumulate(rung.steps for rung in one.rungs)
        points = [(spent, rung.distance) for spent, rung in zip(steps, one.rungs, strict=True)]
        if len(points) > 1:
            plot.line(points, f"{kind} {'thick' if chosen else ''}")
        for rung, point in zip(one.rungs, points, strict=True):
            says = f"{one.name}: a distance of {rung.distance:.3f} after {rung.steps:,} steps"
            plot.dot(point, kind, size=5 if chosen else 3.5, says=says)
        if chosen:
            plot.name(points[-1], _one_line(one.name, _CANDIDATE_NAME), kind, where=("above", "below"))
    return plot.svg()


def _forecast(plan: PlanningRecord) -> str:
    rows: list[tuple[str, ...]] = [("", "predicted", "measured", "off by")]
    for key, label, write in (("bytes", "weights", _megabytes), ("milliseconds", "one query", _milliseconds)):
        before, after = plan.predicted.get(key), plan.measured.get(key)
        if before and after:
            off = round(100 * (before - after) / after, 1) + 0.0  # no minus before a zero
            rows.append((label, write(before), write(after), f"{off:+.1f}%"))
    return f"<h3>Predicted and measured</h3>{_table(rows)}" if len(rows) > 1 else ""


def _layer_curves(report: _Report) -> str:
    figures = []
    for number, run in enumerate(report.runs):
        if (found := run.layer_losses) is not None:
            names = {found.kept: f"{found.pick}: {_numbered(found.kept, 'layer', 'layers')}"}
            title = f"{run.name}: loss of each layer as the last one"
            picture = _layer_curve(found.losses, names if found.kept else {}, title, _colour(number)).svg()
            figures.append(_figure(picture, heading=run.name if len(report.runs) > 1 else ""))
    lead = "The loss of the model if it ended after each layer, before any training."
    return _paragraph(lead) + _grid(figures) if figures else ""


def _layer_curve(losses: Sequence[float], names: Mapping[int, str], title: str, kind: str) -> _Plot:
    """Plot the loss of each layer as the last one; `names` are written at their layers."""
    low, high = _around(losses, room=0.16)
    layers = len(losses)
    every = -(-layers // 12)  # at most 12 ticks, and layer 1
    at = tuple(float(layer) for layer in range(1, layers + 1) if layer % every == 0 or layer == 1)
    across = _Axis("layers kept", 1, max(layers, 2), at=at)
    plot = _Plot(title, across, _Axis("loss before training", low, high))
    plot.line([(float(layer), loss) for layer, loss in enumerate(losses, start=1)], kind)
    for layer, loss in enumerate(losses, start=1):
        says = f"{_numbered(layer, 'layer', 'layers')}: loss {loss:.3f}"
        plot.dot((layer, loss), kind, size=7 if layer in names else 3.5, says=says)
    for layer, name in names.items():
        plot.name((layer, losses[layer - 1]), name, "ink", where=("below", "above"))
    return plot


def _coverage(report: _Report) -> str:
    runs = [(number, run, run.coverage) for number, run in enumerate(report.runs) if run.coverage is not None]
    if not runs:
        return ""
    rows = [(run.name, f"{kept.kept:,}", f"{kept.of:,}", _percent(kept.coverage)) for _, run, kept in runs]
    body = _table([("run", "tokens kept", "of", "share of the texts"), *rows])
    for _, run, kept in runs:
        if kept.lost:
            lead = f"Most frequent removed tokens, now split into subword pieces ({run.name})"
            body += _paragraph(f"{lead}: {' '.join(kept.lost)}", "note")
    if report.tokens is not None:
        return _grid([_coverage_curve(report.tokens, runs), f"<div>{body}</div>"])
    return body + _paragraph("Pass --data TEXTS to see the full curve.", "note")


def _coverage_curve(curve: _TokenCurve, runs: Sequence[tuple[int, _RunRecord, _Coverage]]) -> str:
    seen = [point for point in curve.points if point[1] < 1] or list(curve.points)
    lowest = min([seen[0][1], *(kept.coverage for _, _, kept in runs)])
    largest = max([curve.points[-1][0], *(kept.of for _, _, kept in runs)])
    plot = _Plot(
        "share of all tokens in the texts that the most frequent ones account for",
        _Axis("tokens kept (log scale)", curve.points[0][0], largest, log=True),
        _Axis("share of all tokens in the texts", lowest, 1.05, write=lambda v: f"{100 * v:.0f}%"),
    )
    plot.line(curve.points, "quiet")
    for number, run, kept in runs:
        tokens = f"{kept.kept:,} of {kept.of:,} tokens"
        says = f"{run.name} keeps {tokens}, {_percent(kept.coverage)} of all tokens in the texts"
        plot.dot((kept.kept, kept.coverage), _colour(number), size=7, says=says)
    for number, run, kept in runs:
        place, name = (kept.kept, kept.coverage), _one_line(run.name, 28)
        plot.name(place, name, _colour(number), where=("above", "below"))
    line = f"Line: the most frequent tokens of {curve.tokenizer} in {curve.texts:,} texts of this report."
    dots = "Dots: the vocabulary of each run, on the texts it was chosen with."
    return _figure(plot.svg(), f"{line} {dots}")


_CELL_WIDTH, _CELL_HEIGHT, _LEFT, _LINE = 78, 24, 60, 14
_LIGHT_TEXT = 0.55
"""From this share on, a cell is so dark that its text is light."""


def _pruned_weights(report: _Report) -> str:
    blocks = []
    for run in (run for run in report.runs if run.pruned):
        weights, kept = sum(one.weights for one in run.pruned), sum(one.kept for one in run.pruned)
        lead = f"{_percent(kept / weights)} of {weights:,} weights in these matrices are kept"
        picture = _figure(f'<div class="wide map" tabindex="0">{_kept_map(run.pruned)}</div>')
        bars = "" if run.alignment is None else _gradient_bars(run.alignment)
        blocks.append((run.name, _paragraph(f"{lead}; darker cells keep more.") + picture + bars))
    return _choice("Run", blocks)


def _gradient_bars(found: GradientAlignment) -> str:
    bins, total = len(found.counts), sum(found.counts) or 1
    shares = [count / total for count in found.counts]
    shared, conflicting, specific = _colour(0), _colour(1), "quiet"
    plot = _Plot(
        "weights by the cosine of their domain and general gradients",
        _Axis("cosine of the domain and the general gradient", -1.0, 1.0),
        _Axis("share of the weights", 0.0, max(shares) or 1.0, write=_percent),
    )
    border = NEUTRAL - 1e-9  # the ends of the intervals are rounded
    for place, share in enumerate(shares):
        low, high = -1 + 2 * place / bins, -1 + 2 * (place + 1) / bins
        kind = shared if low >= border else conflicting if high <= -border else specific
        says = f"cosine {low:.2f} to {high:.2f}: {found.counts[place]:,} weights"
        plot.bar(low, high, share, kind, says=says)
    groups = (
        ("shared", found.shared, shared),
        ("specific to one source", found.specific, specific),
        ("conflicting", found.conflicting, conflicting),
    )
    words = (f'<b class="own {kind}">{name}</b> {_percent(count / total)}' for name, count, kind in groups)
    question = "Do domain and general gradients have the same direction? Weights by the cosine of the two:"
    return _paragraph(question) + _figure(f"{plot.svg()}<p>{', '.join(words)}</p>")


def _kept_map(pruned: tuple[PrunedMatrix, ...]) -> str:
    """Draw the share that is kept, one row per layer and one column per matrix."""
    names = list(dict.fromkeys(one.matrix for one in pruned))
    lines = [name.removesuffix(".weight").split(".") for name in names]
    layers = sorted({one.layer for one in pruned})
    parts = []

    def write(kind: str, anchor: str, x: float, y: float, says: str) -> None:
        parts.append(f'<text class="{kind}" text-anchor="{anchor}" x="{x:g}" y="{y:g}">{escape(says)}</text>')

    top = 8 + _LINE * max(map(len, lines), default=1)
    for place, words in enumerate(lines):
        for line, word in enumerate(reversed(words)):
            write("tick small", "middle", _LEFT + _CELL_WIDTH * (place + 0.5), top - 7 - _LINE * line, word)
    for place, layer in enumerate(layers):
        write("tick", "end", _LEFT - 8, top + _CELL_HEIGHT * (place + 0.5) + 5, f"layer {layer}")
    for one in pruned:
        x, y = _LEFT + _CELL_WIDTH * names.index(one.matrix), top + _CELL_HEIGHT * layers.index(one.layer)
        share = one.kept / one.weights if one.weights else 0.0
        box = f'x="{x + 1}" y="{y + 1}" width="{_CELL_WIDTH - 2}" height="{_CELL_HEIGHT - 2}" rx="3"'
        says = escape(f"layer {one.layer}, {one.matrix}: {one.kept:,} of {one.weights:,} weights are kept")
        parts.append(f'<rect class="cell" {box}/>')
        parts.append(f'<rect class="mark heat" {box} fill-opacity="{share:.3f}"><title>{says}</title></rect>')
        ink = "over" if share > _LIGHT_TEXT else "ink"
        middle = x + _CELL_WIDTH / 2, y + _CELL_HEIGHT / 2 + 5
        write(f"{ink} cell-text", "middle", *middle, f"{100 * share:.0f}%")
    width, height = _LEFT + _CELL_WIDTH * len(names) + 8, top + _CELL_HEIGHT * len(layers) + 8
    return _svg(width, height, "share of the weights that are kept, by layer and matrix", parts)


def _training_curves(report: _Report) -> str:
    figures = []
    runs = [(number, run, one) for number, run in enumerate(report.runs) for one in run.trainings if one.loss]
    for step in ("align", "contrast"):
        found = [each for each in runs if each[2].step == step]
        if not found:
            continue
        lines = [(number, run, True, training.validation) for number, run, training in found]
        lines += [(number, run, False, training.loss) for number, run, training in found]
        caption = "Thin: training loss. Thick: validation."
        figures.append(_figure(_training(f"{step}: loss", lines), caption, heading=f"{step}: loss"))
        for measure in sorted({name for *_, training in found for name in training.watched}):
            watched = [(n, run, True, training.watched.get(measure, ())) for n, run, training in found]
            figures.append(_figure(_training(measure, watched), heading=f"{step}: {measure}"))
    return _grid(figures) if figures else ""


def _training(title: str, lines: Sequence[tuple[int, _RunRecord, bool, tuple[_Point, ...]]]) -> str:
    """Plot lines (number and run, whether it is a validation, points); validations are thick."""
    drawn = [line for line in lines if line[3]]
    steps = [step for *_, points in drawn for step, _ in points]
    low, high = _around([value for *_, points in drawn for _, value in points])
    ends: dict[int, tuple[float, str, str]] = {}
    for number, run, validation, points in drawn:
        if validation or number not in ends:
            last = points[-1][1]
            ends[number] = (last, f"{_one_line(run.name, _RUN_NAME)} {last:.3f}", _colour(number))
    across = _Axis("steps", 0, max(steps) or 1, write=lambda v: f"{v:,.0f}", whole=True)
    right = _room_for([says for _, says, _ in ends.values()])
    plot = _Plot(title, across, _Axis("", low, high), right=right)
    for number, run, validation, points in sorted(drawn, key=lambda line: line[2]):
        plot.line(points, f"{_colour(number)} {'thick' if validation else 'thin'}")
        for step, value in points if validation else ():
            says = f"{run.name}, step {step:,.0f}: {_plain(value)}"
            plot.dot((step, value), f"{_colour(number)} bare", size=2.6, says=says, stop=False)
    plot.names_at_the_end(list(ends.values()))
    return plot.svg()
