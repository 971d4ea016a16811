"""Sections that compare runs with their teacher, and sections with their recipes and how to use them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trundle.evaluate.fidelity import TextError
from trundle.report.contents import _Report, _RunRecord, _SampleSearch, _TopDocuments
from trundle.report.markup import (
    _around,
    _Axis,
    _choice,
    _code,
    _colour,
    _count,
    _figure,
    _grid,
    _one_line,
    _paragraph,
    _percent,
    _Plot,
    _room_for,
    _table,
)

if TYPE_CHECKING:
    from trundle.evaluate.shortening import Inheritance

_MODES = {
    "teacher": ("teacher", "teacher's queries, teacher's index"),
    "asymmetric": ("student → teacher", "student's queries, teacher's index"),
    "student": ("student", "student's queries, student's index"),
}
"""The name of each mode of search, and what it uses."""
_PRECISIONS = ("float32", "int8", "binary")


def _task_scores(report: _Report) -> str:
    runs = [run for run in report.runs if report.of(run).tasks]
    if not runs:
        return ""
    both = {run.name: any(task.asymmetric is not None for task in report.of(run).tasks) for run in runs}
    heading = ["task", "metric", report.teacher.name if report.teacher else "teacher"]
    for run in runs:
        heading += [run.name, "share"]
        heading += [f"{run.name} → teacher", "share"] if both[run.name] else []
    rows: list[tuple[str, ...]] = [tuple(heading)]
    for first, *others in zip(*(report.of(run).tasks for run in runs), strict=True):
        line = [first.task, first.measure, f"{100 * first.teacher:.1f}"]
        for run, task in zip(runs, [first, *others], strict=True):
            there = task.standard if task.asymmetric is None else task.asymmetric
            for score in (task.standard, there)[: 1 + both[run.name]]:
                line += [f"{100 * score:.1f}", _percent(score / task.teacher if task.teacher else None)]
        rows.append(tuple(line))
    note = "Share: of the teacher's own score."
    if any(both.values()):
        note = f"“→ teacher”: queries by the run, documents by the teacher, as in an existing index. {note}"
    return _table(rows, texts=(0, 1)) + _paragraph(note, "note")


def _shortened_vectors(report: _Report) -> str:
    several = any(len(report.of(run).shortened) > 1 for run in report.runs)
    blocks = [
        (f"{run.name}, by {one.measure}" if several else run.name, _precisions(number, run.name, one))
        for number, run in enumerate(report.runs)
        for one in sorted(report.of(run).shortened, key=lambda one: not one.measure.startswith("agreement"))
    ]
    lead = "Both models' vectors, truncated to their first dimensions and stored in fewer bits."
    return _paragraph(lead) + _choice("Run", blocks) if blocks else ""


def _precisions(number: int, name: str, found: Inheritance) -> str:
    figures = []
    low, high = _around([score for row in found.rows for score in row.scores.values()], room=0.06)
    sizes = sorted({float(row.dimensions) for row in found.rows})
    across = _Axis("dimensions kept (log scale)", sizes[0], sizes[-1], log=True, at=tuple(sizes))
    up = _Axis("", max(0.0, low), min(high, 1.02), write=lambda v: f"{100 * v:.0f}")
    kinds = {"teacher": "teacher", "asymmetric": f"{_colour(number)} dashed", "student": _colour(number)}
    if all(row.scores["asymmetric"] == row.scores["student"] for row in found.rows):
        del kinds["asymmetric"]  # without documents, both modes are the same
    for precision in _PRECISIONS:
        matching = (row for row in found.rows if row.precision == precision)
        rows = sorted(matching, key=lambda row: row.dimensions)
        if not rows:
            continue
        ends = [
            (rows[-1].scores[who], f"{_MODES[who][0]} {100 * rows[-1].scores[who]:.0f}", kind.split()[0])
            for who, kind in kinds.items()
        ]
        right = _room_for([says for _, says, _ in ends])
        plot = _Plot(f"{name}: {found.measure}, {precision}", across, up, right=right)
        for who, kind in kinds.items():
            points = [(float(row.dimensions), row.scores[who]) for row in rows]
            plot.line(points, kind)
            for row, point in zip(rows, points, strict=True):
                size = f"{row.dimensions} dimensions, {row.bytes:,} bytes per vector"
                says = f"{_MODES[who][0]}, {size}: {100 * row.scores[who]:.1f}"
                plot.dot(point, kind.split()[0], size=3, says=says, stop=False)
        plot.names_at_the_end(ends)
        figures.append(_figure(plot.svg(), heading=precision))
    return _paragraph(f"Score: {found.measure}, in percent.", "note") + _grid(figures)


def _projections(report: _Report) -> str:
    shown = [found for run in report.runs if (found := report.of(run).projection) is not None]
    if not shown:
        return ""
    first = shown[0]
    lead = (
        "Vectors of the same texts by teacher (ring) and student (dot), joined by a line. Point at a dot to "
        f"read its text. {len(first.texts)} texts; the two dimensions show {_percent(first.shown)} of the "
        "variance of the teacher's vectors, so close vectors here can be distant in the full space."
    )
    figures = []
    for number, run in enumerate(report.runs):
        if (found := report.of(run).projection) is None:
            continue
        ends = [_around(values, room=0.04) for values in zip(*found.teacher, *found.student, strict=True)]
        plot = _Plot(
            f"{run.name}: vectors of {len(found.texts)} texts by teacher and student",
            _Axis("first principal direction of the teacher's vectors", *ends[0]),
            _Axis("second principal direction", *ends[1]),
            height=400,
        )
        for theirs, ours in zip(found.teacher, found.student, strict=True):
            plot.link(theirs, ours, f"link {_colour(number)}")
        for theirs, ours, text in zip(found.teacher, found.student, found.texts, strict=True):
            plot.dot(theirs, "ring", size=3.2)
            plot.dot(ours, f"{_colour(number)} fine", size=3.2, says=text, stop=False)
        figures.append(_figure(plot.svg(), heading=run.name))
    return _paragraph(lead) + _grid(figures)


def _extreme_texts(report: _Report) -> str:
    def listed(heading: str, texts: Sequence[TextError]) -> str:
        items = "".join(
            f'<li><span class="figure">{one.cosine:.2f}</span><span>{escape(one.text)}</span></li>'
            for one in texts
        )
        head = '<li class="head"><span class="figure">cosine</span><span>text</span></li>'
        return f'<div><h3>{heading}</h3><ul class="texts">{head}{items}</ul></div>'

    blocks = []
    for run in report.runs:
        found = report.of(run)
        if found.farthest:
            lists = listed("Largest distance", found.farthest), listed("Smallest distance", found.nearest)
            blocks.append((run.name, _grid(lists)))
    return _choice("Run", blocks)


def _searches(report: _Report) -> str:
    blocks = []
    for run in report.runs:
        found = enumerate(report.of(run).searches, start=1)
        if queries := [_search_results(report, number, one) for number, one in found]:
            blocks.append((run.name, _choice("Query", queries)))
    lead = "✓ marks a document in the teacher's top ten, with its rank there; the figure is the cosine."
    return _paragraph(lead) + _choice("Run", blocks) if blocks else ""


def _search_results(report: _Report, number: int, one: _SampleSearch) -> tuple[str, str]:
    columns, best = [], len(one.teacher.documents)
    shared = {key: len({*one.teacher.documents} & {*getattr(one, key).documents}) for key in _MODES}
    for key, (name, about) in _MODES.items():
        found: _TopDocuments = getattr(one, key)
        same = "" if key == "teacher" else f" · {shared[key]} of {best}"
        items = []
        for place, cosine in zip(found.documents, found.cosines, strict=True):
            rank = one.teacher.documents.index(place) + 1 if place in one.teacher.documents else 0
            mark = "" if key == "teacher" else f"✓{rank}" if rank else "·"
            figure = f'<span class="figure">{cosine:.2f}<b>{mark}</b></span>'
            text = f"<span>{escape(report.documents[place])}</span>"
            items.append(f'<li class="{"shared" if rank else "other"}">{figure}{text}</li>')
        heading = f'<h4>{name}{same}</h4><p class="note">{about}</p>'
        columns.append(f'<div>{heading}<ol class="found">{"".join(items)}</ol></div>')
    name = f"{number}. {_one_line(one.query, 90)} ({shared['asymmetric']}/{best})"
    return name, f'<blockquote>{escape(one.query)}</blockquote><div class="three">{"".join(columns)}</div>'


def _recipes(report: _Report) -> str:
    return _choice("Run", [(run.name, _recipe(run)) for run in report.runs])


def _recipe(run: _RunRecord) -> str:
    items, before = [], None
    for step in run.steps:
        begins = f'<li class="model">{escape(step.begins_from)}</li>' if step.begins_from != before else ""
        before = step.begins_from
        facts = [
            f"{key.replace('_', ' ')} {_one_line(shown, 160)}"
            for key, value in step.facts.items()
            if (shown := _fact(value))
        ]
        below = f'<span class="note">{escape(", ".join(facts))}</span>' if facts else ""
        items.append(f"{begins}<li><b>{escape(step.step)}</b> <span>{escape(step.says)}</span>{below}</li>")
    items.append(f'<li class="model">{escape(run.name)}</li>')
    parts = ", ".join(f"{part} {_count(value)}" for part, value in run.parts.items() if value)
    steps = [{step.step: dict(step.options)} for step in run.steps if step.step != "pair"]
    yaml_text = yaml.safe_dump({"steps": json.loads(json.dumps(steps))}, sort_keys=False, allow_unicode=True)
    more = ""
    if run.data:
        rows = [("source", "texts", "fingerprint")]
        for one in run.data:
            source, fingerprint = str(one.get("source", "")), str(one.get("fingerprint", ""))
            rows.append((source, f"{int(one.get('texts', 0)):,}", fingerprint))
        more += _paragraph("Training data") + _table(rows, texts=(0, 2))
    if run.scores:
        scores = [(name, f"{value:.4f}") for name, value in run.scores.items()]
        more += _paragraph("Scores stored with the model") + _table([("metric", ""), *scores])
    versions = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    more += _paragraph(f"Seed {run.seed}. Made with {versions}.", "note")
    return (
        f'<ol class="lineage">{"".join(items)}</ol>'
        + (_paragraph(f"Parameters by part: {parts}.", "note") if parts else "")
        + f"<details><summary>Recipe as YAML</summary>{_code(yaml_text)}</details>"
        + f"<details><summary>Data, scores, versions</summary>{more}</details>"
    )


def _fact(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return str(value) if value not in (None, "", [], {}) else ""


def _usage(report: _Report) -> str:
    return _choice("Run", [(run.name, _usage_of(report, run)) for run in report.runs])


def _usage_of(report: _Report, run: _RunRecord) -> str:
    teacher = report.teacher.path if report.teacher else run.teacher
    extra = ", trust_remote_code=True" if run.needs_trundle else ""
    plain = (
        "from sentence_transformers import SentenceTransformer\n\n"
        f"model = SentenceTransformer({run.folder!r}{extra})\n"
        'queries = model.encode_query(["how do I undo a commit?"])\n'
    )
    if run.pair:
        plain += 'documents = model.encode_document(["a text", "another"])  # by the teacher\n'
    elif run.teacher != run.source or any(step.step == "align" for step in run.steps):
        plain += (
            f"\n# search the index that {Path(teacher).name} built: both models share one vector space\n"
            f"teacher = SentenceTransformer({teacher!r})\n"
            'documents = teacher.encode_document(["a text", "another"])\n'
            "print(model.similarity(queries, documents))\n"
        )
    if any(form.engine != "torch" for form in run.forms):
        encoder = f'Encoder({run.folder!r}).encode_query(["how do I undo a commit?"])'
        code = _code(f"from trundle import Encoder\n\n{encoder}\n")
        return _code(plain) + _paragraph("Without torch:") + code
    if run.needs_trundle:
        return _code(plain)
    folder = f"'{run.folder}'" if " " in run.folder else run.folder
    code = _code(f"trundle export {folder} --to onnx --int8 --data texts.txt\n")
    return _code(plain) + _paragraph("Export it as a graph that runs without torch:") + code
