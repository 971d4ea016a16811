"""Sections that compare runs with their teacher, and sections with their recipes and how to use them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from trundle.report.contents import (
    _ComparedText,
    _Projection,
    _Report,
    _RunRecord,
    _SampleSearch,
    _Shortened,
    _TopDocuments,
)
from trundle.report.markup import (
    _choice,
    _code,
    _count,
    _figure,
    _one_line,
    _paragraph,
    _percent,
    _Section,
    _side_by_side,
    _table,
)
from trundle.report.plot import _around, _Axis, _colour, _Plot, _room_for

_WHO = {"teacher": "teacher", "asymmetric": "student → teacher", "student": "student"}
_PRECISIONS = ("float32", "int8", "binary")


def _task_scores(report: _Report) -> _Section | None:
    """List each labelled task with the scores of the teacher and of each run in both modes."""
    runs = [run for run in report.runs if report.of(run).tasks]
    if not runs:
        return None
    both = {run.name: any(task.asymmetric is not None for task in report.of(run).tasks) for run in runs}
    heading = ["task", "metric", report.teacher.name if report.teacher else "teacher"]
    for run in runs:
        heading += [run.name, "share"]
        heading += [f"{run.name} → teacher", "share"] if both[run.name] else []
    rows: list[tuple[str, ...]] = [tuple(heading)]
    for place, first in enumerate(report.of(runs[0]).tasks):
        line = [first.task, first.measure, f"{100 * first.teacher:.1f}"]
        for run in runs:
            task = report.of(run).tasks[place]
            scores = [task.standard]
            if both[run.name]:
                scores.append(task.standard if task.asymmetric is None else task.asymmetric)
            for score in scores:
                line += [f"{100 * score:.1f}", _percent(score / task.teacher if task.teacher else None)]
        rows.append(tuple(line))
    note = "Share: of the teacher's own score."
    if any(both.values()):
        note = f"“→ teacher”: queries by the run, documents by the teacher, as in an existing index. {note}"
    body = _table(rows, texts=(0, 1)) + _paragraph(note, "note")
    return _Section(key="tasks", heading="Labelled tasks", body=body)


def _shortened_vectors(report: _Report) -> _Section | None:
    """Plot the scores of teacher and student with truncated and quantised vectors."""
    several = any(len(report.of(run).shortened) > 1 for run in report.runs)
    blocks = [
        (f"{run.name}, by {one.measure}" if several else run.name, _precisions(number, run.name, one))
        for number, run in enumerate(report.runs)
        for one in sorted(report.of(run).shortened, key=lambda one: not one.measure.startswith("agreement"))
    ]
    if not blocks:
        return None
    lead = (
        "Both models' vectors, truncated to their first dimensions and stored in fewer bits, without further training. "
        "If the student's line follows its teacher's, the student tolerates truncation as well as its teacher."
    )
    body = _paragraph(lead) + _choice("Run", blocks)
    return _Section(key="shortened", heading="Truncation and quantisation", body=body)


def _precisions(number: int, name: str, found: _Shortened) -> str:
    figures = []
    low, high = _around([score for row in found.rows for score in row.scores.values()], room=0.06)
    sizes = sorted({row.dimensions for row in found.rows})
    kinds = {"teacher": "teacher", "asymmetric": f"{_colour(number)} dashed", "student": _colour(number)}
    if all(row.scores["asymmetric"] == row.scores["student"] for row in found.rows):
        del kinds["asymmetric"]  # without documents, both modes are the same
    for precision in _PRECISIONS:
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
            title=f"{name}: {found.measure}, {precision}",
            across=_Axis(
                label="dimensions kept (log scale)",
                low=sizes[0],
                high=sizes[-1],
                log=True,
                at=tuple(map(float, sizes)),
            ),
            up=_Axis(label="", low=max(0.0, low), high=min(high, 1.02), write=lambda v: f"{100 * v:.0f}"),
            right=_room_for([label for _, label, _ in ends]),
        )
        for who, kind in kinds.items():
            points = [(float(row.dimensions), row.scores[who]) for row in rows]
            plot.line(points, kind)
            for row, point in zip(rows, points, strict=True):
                size = f"{row.dimensions} dimensions, {row.bytes:,} bytes per vector"
                says = f"{_WHO[who]}, {size}: {100 * row.scores[who]:.1f}"
                plot.dot(point, kind.split()[0], size=3, says=says, stop=False)
        plot.names_at_the_end(ends)
        figures.append(_figure(plot.svg(), heading=precision))
    return _paragraph(f"Score: {found.measure}, in percent.", "note") + _side_by_side(figures)


def _projections(report: _Report) -> _Section | None:
    """Plot teacher and student vectors of the same texts, each pair joined by a line."""
    found = [
        (number, run.name, projection)
        for number, run in enumerate(report.runs)
        if (projection := report.of(run).projection) is not None
    ]
    if not found:
        return None
    first = found[0][2]
    lead = (
        "Vectors of the same texts by teacher (ring) and student (dot), joined by a line: the shorter the lines, the "
        f"closer the two. Point at a dot to read its text. {len(first.texts)} texts; the two dimensions show "
        f"{_percent(first.shown)} of the variance of the teacher's vectors, so vectors that are close here can be "
        "distant in the full space."
    )
    body = _paragraph(lead) + _side_by_side([_two_dimensions(*each) for each in found])
    return _Section(key="projection", heading="The shared space", body=body)


def _two_dimensions(number: int, name: str, found: _Projection) -> str:
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


def _extreme_texts(report: _Report) -> _Section | None:
    """List the texts with the largest and the smallest distance to the teacher."""

    def listed(heading: str, texts: Sequence[_ComparedText]) -> str:
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
            blocks.append((run.name, _side_by_side(lists)))
    if not blocks:
        return None
    return _Section(key="texts", heading="Worst and best texts", body=_choice("Run", blocks))


_OPTION = 90
"""The most characters of a query in the list to choose from."""
_MODES = (
    ("teacher", "teacher", "teacher's queries, teacher's index"),
    ("asymmetric", "student → teacher", "student's queries, teacher's index"),
    ("student", "student alone", "student's queries, student's index"),
)


def _searches(report: _Report) -> _Section | None:
    """Show the first ten documents of each query in three modes, one query at a time."""
    blocks = []
    for run in report.runs:
        queries = [
            (f"{number}. {_option(one)}", _search_results(report, one))
            for number, one in enumerate(report.of(run).searches, start=1)
        ]
        if queries:
            blocks.append((run.name, _choice("Query", queries)))
    if not blocks:
        return None
    lead = "✓ marks a document that is also in the teacher's top ten, with its rank there; the figure is the cosine."
    body = _paragraph(lead) + _choice("Run", blocks)
    return _Section(key="searches", heading="Search results compared", body=body)


def _shared(one: _SampleSearch, found: _TopDocuments) -> int:
    return len(set(one.teacher.documents) & set(found.documents))


def _option(one: _SampleSearch) -> str:
    of = len(one.teacher.documents)
    return f"{_one_line(one.query, _OPTION)} ({_shared(one, one.asymmetric)}/{of})"


def _search_results(report: _Report, one: _SampleSearch) -> str:
    columns = []
    for key, name, about in _MODES:
        found: _TopDocuments = getattr(one, key)
        same = "" if key == "teacher" else f" · {_shared(one, found)} of {len(one.teacher.documents)}"
        items = []
        for place, cosine in zip(found.documents, found.cosines, strict=True):
            rank = one.teacher.documents.index(place) + 1 if place in one.teacher.documents else 0
            mark = "" if key == "teacher" else f"✓{rank}" if rank else "·"
            items.append(
                f'<li class="{"shared" if rank else "other"}"><span class="figure">{cosine:.2f}<b>{mark}</b></span>'
                f"<span>{escape(report.documents[place])}</span></li>"
            )
        columns.append(
            f'<div><h4>{name}{same}</h4><p class="note">{about}</p><ol class="found">{"".join(items)}</ol></div>'
        )
    return f'<blockquote>{escape(one.query)}</blockquote><div class="three">{"".join(columns)}</div>'


def _recipes(report: _Report) -> _Section:
    """Show the methods, data and versions that made each run."""
    blocks = [(run.name, _recipe(run)) for run in report.runs]
    return _Section(key="recipe", heading="Recipe and lineage", body=_choice("Run", blocks))


def _recipe(run: _RunRecord) -> str:
    items, before = [], None
    for step in run.steps:
        begins = f'<li class="model">{escape(step.begins_from)}</li>' if step.begins_from != before else ""
        before = step.begins_from
        facts = _facts(step.facts)
        below = f'<span class="note">{escape(facts)}</span>' if facts else ""
        items.append(f"{begins}<li><b>{escape(step.step)}</b> <span>{escape(step.says)}</span>{below}</li>")
    items.append(f'<li class="model">{escape(run.name)}</li>')
    parts = ", ".join(f"{part} {_count(value)}" for part, value in run.parts.items() if value)
    steps = [{step.step: dict(step.options)} for step in run.steps if step.step != "pair"]
    yaml_text = yaml.safe_dump({"steps": json.loads(json.dumps(steps))}, sort_keys=False, allow_unicode=True)
    more = ""
    if run.data:
        rows = [
            (str(one.get("source", "")), f"{int(one.get('texts', 0)):,}", str(one.get("fingerprint", "")))
            for one in run.data
        ]
        more += _paragraph("Training data") + _table(
            [("source", "texts", "fingerprint"), *rows], texts=(0, 2)
        )
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


def _facts(facts: Mapping[str, Any]) -> str:
    parts = []
    for key, value in facts.items():
        number = "," if isinstance(value, int) else ",.4g"
        shown = f"{value:{number}}" if isinstance(value, int | float) else str(value)
        if value not in (None, "", [], {}):
            parts.append(f"{key.replace('_', ' ')} {_one_line(shown, 160)}")
    return ", ".join(parts)


def _usage(report: _Report) -> _Section:
    """Show code that uses each run."""
    blocks = [(run.name, _usage_of(report, run)) for run in report.runs]
    return _Section(key="use", heading="Use it", body=_choice("Run", blocks))


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
        code = _code(f"from trundle.runtime.encoder import Encoder\n\n{encoder}\n")
        return _code(plain) + _paragraph("Without torch:") + code
    if run.needs_trundle:
        return _code(plain)
    folder = f"'{run.folder}'" if " " in run.folder else run.folder
    code = _code(f"trundle export {folder} --to onnx --int8 --calibrate texts.txt\n")
    return _code(plain) + _paragraph("Export it as a graph that runs without torch:") + code
