"""Curves: the loss of each layer, the tokens that cover a text, trainings, and vectors cut short."""

from __future__ import annotations

from collections.abc import Sequence

from trundle.report.axes import _around, _Axis, _colour, _Plot, _room_for
from trundle.report.markup import (
    _choice,
    _figure,
    _numbered,
    _one_line,
    _paragraph,
    _percent,
    _plain,
    _Section,
    _side_by_side,
    _table,
)
from trundle.report.records import _Coverage, _Point, _Report, _Run, _Shortened, _TokenCurve

_NAME = 14
_LABELS = 12
_WHO = {"teacher": "teacher", "asymmetric": "student → teacher", "student": "student"}
_PRECISIONS = {"float32": "as float32", "int8": "as bytes (int8)", "binary": "as bits (binary)"}


def _layer_curve(report: _Report) -> _Section | None:
    """What the step depth saw."""
    runs = [(number, run) for number, run in enumerate(report.runs) if run.layer_losses]
    if not runs:
        return None
    figures = []
    for number, run in runs:
        seen = run.layer_losses
        assert seen is not None
        layers = len(seen.losses)
        low, high = _around(seen.losses, room=0.12)
        every = -(-layers // _LABELS)
        at = tuple(float(layer) for layer in range(1, layers + 1) if layer % every == 0 or layer == 1)
        plot = _Plot(
            title=f"{run.name}: loss of each layer as the last one",
            across=_Axis(label="layers kept", low=1, high=max(layers, 2), at=at),
            up=_Axis(label="loss before training", low=low, high=high),
        )
        points = [(float(layer), loss) for layer, loss in enumerate(seen.losses, start=1)]
        plot.line(points, _colour(number))
        for layer, loss in points:
            kept = layer == seen.kept
            plot.dot(
                (layer, loss),
                _colour(number),
                size=7 if kept else 3.5,
                says=f"{_numbered(int(layer), 'layer', 'layers')}: loss {loss:.3f}",
            )
        if seen.kept:
            plot.name(
                (float(seen.kept), seen.losses[seen.kept - 1]),
                f"{seen.pick}: {_numbered(seen.kept, 'layer', 'layers')}",
                "ink",
                beside=False,
            )
        figures.append(_figure(plot.svg(), heading=run.name if len(report.runs) > 1 else ""))
    lead = "How well the model would do if it ended after each of its layers, before any training; the low point of either half is where a cut costs least."
    return _Section(key="layers", heading="Layer curve", body=_paragraph(lead) + _side_by_side(figures))


def _coverage_curve(report: _Report) -> _Section | None:
    """How much of the texts the kept tokens are; a curve where there are texts to draw it from."""
    runs = [(number, run, run.coverage) for number, run in enumerate(report.runs) if run.coverage is not None]
    if not runs:
        return None
    rows = [(run.name, f"{kept.kept:,}", f"{kept.of:,}", _percent(kept.coverage)) for _, run, kept in runs]
    body = _table([("run", "tokens kept", "of", "of what occurs"), *rows])
    for _, run, kept in runs:
        if kept.lost:
            gone = "The most frequent tokens that are gone, and are read as pieces"
            body += _paragraph(f"{gone} ({run.name}): {' '.join(kept.lost)}", "note")
    if report.tokens is not None:
        body = _side_by_side([_covered(report.tokens, runs), f"<div>{body}</div>"])
    else:
        body += _paragraph("Give --data TEXTS to see the whole curve.", "note")
    return _Section(key="coverage", heading="Coverage of the vocabulary", body=body)


def _covered(curve: _TokenCurve, runs: Sequence[tuple[int, _Run, _Coverage]]) -> str:
    seen = [point for point in curve.points if point[1] < 1] or list(curve.points)
    least = min([seen[0][1], *(kept.coverage for _, _, kept in runs)])
    plot = _Plot(
        title="share of the texts that the most frequent tokens are",
        across=_Axis(
            label="tokens kept (log scale)",
            low=curve.points[0][0],
            high=max([curve.points[-1][0], *(kept.of for _, _, kept in runs)]),
            log=True,
        ),
        up=_Axis(
            label="share of all tokens in the texts", low=least, high=1.05, write=lambda v: f"{100 * v:.0f}%"
        ),
    )
    plot.line(curve.points, "quiet")
    for number, run, kept in runs:
        says = (
            f"{run.name} keeps {kept.kept:,} of {kept.of:,} tokens: {_percent(kept.coverage)} of what occurs"
        )
        plot.dot((kept.kept, kept.coverage), _colour(number), size=7, says=says)
    for number, run, kept in runs:
        plot.name((kept.kept, kept.coverage), _one_line(run.name, 28), _colour(number), beside=False)
    caption = (
        f"Line: the most frequent tokens of {curve.tokenizer} in {curve.texts:,} texts of this report. "
        "Dots: what each run kept, on the texts it was chosen by."
    )
    return _figure(plot.svg(), caption)


def _training_curves(report: _Report) -> _Section | None:
    """Loss and validation of each step that trains, all runs in one picture."""
    figures = []
    for step in ("align", "contrast"):
        found = [
            (number, run, training)
            for number, run in enumerate(report.runs)
            for training in run.trainings
            if training.step == step and training.loss
        ]
        if not found:
            continue
        lines = [(number, run, "validation", training.validation) for number, run, training in found]
        lines += [(number, run, "loss", training.loss) for number, run, training in found]
        drawn = [line for line in lines if line[3]]
        figures.append(
            _figure(
                _trained(f"{step}: loss", drawn),
                "Thin: training loss. Thick: validation.",
                heading=f"{step}: loss",
            )
        )
        for measure in sorted({name for *_, training in found for name in training.watched}):
            watched = [
                (n, run, "validation", training.watched.get(measure, ())) for n, run, training in found
            ]
            figures.append(
                _figure(
                    _trained(measure, [line for line in watched if line[3]]), heading=f"{step}: {measure}"
                )
            )
    if not figures:
        return None
    return _Section(key="training", heading="Training", body=_side_by_side(figures))


_Line = tuple[int, _Run, str, tuple[_Point, ...]]


def _trained(title: str, lines: Sequence[_Line]) -> str:
    values = [value for *_, points in lines for _, value in points]
    steps = [step for *_, points in lines for step, _ in points]
    low, high = _around(values)
    ends: dict[int, tuple[float, str, str]] = {}
    for number, run, kind, points in lines:
        if kind == "validation" or number not in ends:
            last = points[-1][1]
            ends[number] = (last, f"{_one_line(run.name, _NAME)} {last:.3f}", _colour(number))
    plot = _Plot(
        title=title,
        across=_Axis(label="steps", low=0, high=max(steps) or 1, write=lambda v: f"{v:,.0f}", whole=True),
        up=_Axis(label="", low=low, high=high),
        right=_room_for([says for _, says, _ in ends.values()]),
    )
    for number, run, kind, points in sorted(lines, key=lambda line: line[2]):
        thick = kind == "validation"
        plot.line(points, f"{_colour(number)} {'thick' if thick else 'thin'}")
        if thick:
            for step, value in points:
                says = f"{run.name}, step {step:,.0f}: {_plain(value)}"
                plot.dot((step, value), f"{_colour(number)} bare", size=2.6, says=says, stop=False)
    plot.names_at_the_end(list(ends.values()))
    return plot.svg()


def _shortened_vectors(report: _Report) -> _Section | None:
    """Teacher and student side by side when their vectors are cut and coarsened."""
    several = any(len(report.of(run).shortened) > 1 for run in report.runs)
    blocks = [
        (f"{run.name}, by {one.measure}" if several else run.name, _cut_short(number, run.name, one))
        for number, run in enumerate(report.runs)
        for one in sorted(report.of(run).shortened, key=lambda one: not one.measure.startswith("agreement"))
    ]
    if not blocks:
        return None
    lead = (
        "Both models' vectors cut to their first dimensions and kept in fewer bits; nothing is trained for it. Where the "
        "student's line runs along its teacher's, it inherits what the teacher can bear."
    )
    body = _paragraph(lead) + _choice("Run", blocks)
    return _Section(key="shortened", heading="Truncation and quantisation", body=body)


def _cut_short(number: int, name: str, found: _Shortened) -> str:
    figures = []
    values = [score for row in found.rows for score in row.scores.values()]
    low, high = _around(values, room=0.06)
    sizes = sorted({row.dimensions for row in found.rows})
    kinds = {"teacher": "teacher", "asymmetric": f"{_colour(number)} dashed", "student": _colour(number)}
    if all(row.scores["asymmetric"] == row.scores["student"] for row in found.rows):
        del kinds["asymmetric"]  # no documents apart from queries: both ways are one
    for precision, says in _PRECISIONS.items():
        rows = sorted(
            (row for row in found.rows if row.precision == precision), key=lambda row: row.dimensions
        )
        if not rows:
            continue
        ends = [
            (rows[-1].scores[who], f"{_WHO[who]} {100 * rows[-1].scores[who]:.0f}", kind.split()[0])
            for who, kind in kinds.items()
        ]
        plot = _Plot(
            title=f"{name}: {found.measure}, {says}",
            across=_Axis(
                label="dimensions kept (log scale)",
                low=sizes[0],
                high=sizes[-1],
                log=True,
                at=tuple(map(float, sizes)),
            ),
            up=_Axis(label="", low=max(0.0, low), high=min(high, 1.02), write=lambda v: f"{100 * v:.0f}"),
            right=_room_for([told for _, told, _ in ends]),
        )
        for who, kind in kinds.items():
            plot.line([(float(row.dimensions), row.scores[who]) for row in rows], kind)
            for row in rows:
                told = f"{_WHO[who]}, {row.dimensions} dimensions, {row.bytes:,} bytes a vector: {100 * row.scores[who]:.1f}"
                plot.dot(
                    (float(row.dimensions), row.scores[who]), kind.split()[0], size=3, says=told, stop=False
                )
        plot.names_at_the_end(ends)
        figures.append(_figure(plot.svg(), heading=says.removeprefix("as ").capitalize()))
    return _paragraph(f"Score: {found.measure}, in percent.", "note") + _side_by_side(figures)


def _tasks_table(report: _Report) -> _Section | None:
    """Each task with labels: the teacher, and each run in both modes."""
    runs = [run for run in report.runs if report.of(run).tasks]
    if not runs:
        return None
    heading = ["task", "measure", report.teacher.name if report.teacher else "teacher"]
    for run in runs:
        heading += [run.name, "share"]
        if any(task.asymmetric is not None for task in report.of(run).tasks):
            heading += [f"{run.name} → teacher", "share"]
    rows: list[tuple[str, ...]] = [tuple(heading)]
    for place, first in enumerate(report.of(runs[0]).tasks):
        line = [first.task, first.measure, f"{100 * first.teacher:.1f}"]
        for run in runs:
            task = report.of(run).tasks[place]
            scores = [task.standard]
            if any(one.asymmetric is not None for one in report.of(run).tasks):
                scores.append(task.standard if task.asymmetric is None else task.asymmetric)
            for score in scores:
                line += [f"{100 * score:.1f}", _percent(score / task.teacher if task.teacher else None)]
        rows.append(tuple(line))
    note = "Share: of the teacher's own score."
    if any(task.asymmetric is not None for run in runs for task in report.of(run).tasks):
        note = (
            f"“→ teacher”: queries by the run, documents by the teacher, as in an index that is there. {note}"
        )
    body = _table(rows, texts=(0, 1)) + _paragraph(note, "note")
    return _Section(key="tasks", heading="Tasks with labels", body=body)
