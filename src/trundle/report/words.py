"""What is read rather than seen: texts, searches, the recipe, and how to use the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from trundle.report.markup import _choice, _code, _count, _one_line, _paragraph, _Section, _table
from trundle.report.records import _Apart, _Found, _Report, _Run, _Search

_WAYS = (
    ("teacher", "teacher", "its queries, its index"),
    ("asymmetric", "student → teacher", "small queries, the teacher's index"),
    ("student", "student alone", "its queries, its own index"),
)
_OPTION = 90
_SHOWN_VALUE = 160


def _extreme_texts(report: _Report) -> _Section | None:
    """The texts a student gets most wrong and most right."""
    blocks = [(run.name, _extremes(report, run)) for run in report.runs if report.of(run).farthest]
    if not blocks:
        return None
    return _Section(key="texts", heading="Worst and best texts", body=_choice("Run", blocks))


def _extremes(report: _Report, run: _Run) -> str:
    found = report.of(run)
    return (
        '<div class="grid"><div><h3>Farthest from the teacher</h3>'
        f"{_listed(found.farthest)}</div><div><h3>Nearest to the teacher</h3>{_listed(found.nearest)}</div></div>"
    )


def _listed(texts: Sequence[_Apart]) -> str:
    items = "".join(
        f'<li><span class="figure">{one.cosine:.2f}</span><span>{escape(one.text)}</span></li>'
        for one in texts
    )
    return f'<ul class="texts"><li class="head"><span class="figure">cosine</span><span>text</span></li>{items}</ul>'


def _searches(report: _Report) -> _Section | None:
    """The first ten of three ways to search, for one query at a time."""
    blocks = [
        (run.name, _choice("Query", _numbered([(_option(one), _search(report, one)) for one in found])))
        for run in report.runs
        if (found := report.of(run).searches)
    ]
    if not blocks:
        return None
    lead = "✓ marks what the teacher has among its first ten as well, with the teacher's rank of it; the figure is the cosine."
    return _Section(
        key="searches", heading="Searches side by side", body=_paragraph(lead) + _choice("Run", blocks)
    )


def _numbered(blocks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(f"{number}. {name}", body) for number, (name, body) in enumerate(blocks, start=1)]


def _shared(one: _Search, found: _Found) -> int:
    return len(set(one.teacher.documents) & set(found.documents))


def _option(one: _Search) -> str:
    of = len(one.teacher.documents)
    return f"{_one_line(one.query, _OPTION)} ({_shared(one, one.asymmetric)}/{of})"


def _search(report: _Report, one: _Search) -> str:
    columns = []
    for key, name, about in _WAYS:
        found: _Found = getattr(one, key)
        same = "" if key == "teacher" else f" · {_shared(one, found)} of {len(one.teacher.documents)}"
        items = []
        for place, cosine in zip(found.documents, found.cosines, strict=True):
            theirs = one.teacher.documents.index(place) + 1 if place in one.teacher.documents else 0
            mark = "" if key == "teacher" else f"✓{theirs}" if theirs else "·"
            kind = "shared" if theirs else "other"
            items.append(
                f'<li class="{kind}"><span class="figure">{cosine:.2f}<b>{mark}</b></span>'
                f"<span>{escape(report.documents[place])}</span></li>"
            )
        columns.append(
            f'<div><h4>{name}{same}</h4><p class="note">{about}</p><ol class="found">{"".join(items)}</ol></div>'
        )
    return f'<blockquote>{escape(one.query)}</blockquote><div class="three">{"".join(columns)}</div>'


def _recipes(report: _Report) -> _Section:
    """How each model came to be."""
    blocks = [(run.name, _recipe(run)) for run in report.runs]
    return _Section(key="recipe", heading="Recipe and lineage", body=_choice("Run", blocks))


def _recipe(run: _Run) -> str:
    items, before = [], None
    for step in run.steps:
        begins = f'<li class="model">{escape(step.begins_from)}</li>' if step.begins_from != before else ""
        before = step.begins_from
        facts = _said(step.facts)
        below = f'<span class="note">{escape(facts)}</span>' if facts else ""
        items.append(f"{begins}<li><b>{escape(step.step)}</b> <span>{escape(step.says)}</span>{below}</li>")
    items.append(f'<li class="model">{escape(run.name)}</li>')
    learned = [
        (str(one.get("source", "")), f"{int(one.get('texts', 0)):,}", str(one.get("fingerprint", "")))
        for one in run.data
    ]
    data = (
        _paragraph("Learned from") + _table([("source", "texts", "fingerprint"), *learned], texts=(0, 2))
        if learned
        else ""
    )
    parts = ", ".join(f"{part} {_count(value)}" for part, value in run.parts.items() if value)
    made = ", ".join(f"{package} {version}" for package, version in run.versions.items())
    scores = ""
    if run.scores:
        rows = [(name, f"{value:.4f}") for name, value in run.scores.items()]
        scores = _paragraph("Scores kept with the model") + _table([("measure", ""), *rows])
    steps = [{step.step: dict(step.options)} for step in run.steps if step.step != "pair"]
    yaml_text = yaml.safe_dump({"steps": json.loads(json.dumps(steps))}, sort_keys=False, allow_unicode=True)
    return (
        f'<ol class="lineage">{"".join(items)}</ol>'
        + (_paragraph(f"Parameters by part: {parts}.", "note") if parts else "")
        + f"<details><summary>Recipe as YAML</summary>{_code(yaml_text)}</details>"
        + f"<details><summary>Data, scores, versions</summary>{data}{scores}{_paragraph(f'Seed {run.seed}. Made with {made}.', 'note')}</details>"
    )


def _said(facts: Mapping[str, Any]) -> str:
    parts = []
    for key, value in facts.items():
        shown = (
            f"{value:,.4g}"
            if isinstance(value, float)
            else f"{value:,}"
            if isinstance(value, int)
            else str(value)
        )
        if value not in (None, "", [], {}):
            parts.append(f"{key.replace('_', ' ')} {_one_line(shown, _SHOWN_VALUE)}")
    return ", ".join(parts)


def _usage(report: _Report) -> _Section:
    """Lines to copy."""
    return _Section(
        key="use",
        heading="Use it",
        body=_choice("Run", [(run.name, _use(report, run)) for run in report.runs]),
    )


def _use(report: _Report, run: _Run) -> str:
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
    body = _code(plain)
    graphs = [form.engine for form in run.forms if form.engine != "torch"]
    if graphs:
        body += _paragraph("Without torch:") + _code(
            f'from trundle import Encoder\n\nEncoder({run.folder!r}).encode_query(["how do I undo a commit?"])\n'
        )
    elif not run.needs_trundle:
        body += _paragraph("As one graph that runs without torch:") + _code(
            f"trundle export {_quoted(run.folder)} --to onnx --int8 --calibrate texts.txt\n"
        )
    return body


def _quoted(path: str) -> str:
    return f"'{path}'" if " " in path else path
