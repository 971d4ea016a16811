"""Students beside their teacher, as rows of tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trundle.cli.figures import Rows

if TYPE_CHECKING:
    from trundle.evaluate import Comparison, Fidelity, Result
    from trundle.evaluate.comparison import Share
    from trundle.evaluate.inheritance import Inheritance

SHOWN_CHARACTERS = 90
NOTHING = "–"


def scores(found: Comparison, names: Sequence[str]) -> Rows:
    """Tasks down; across: the teacher, then each student on its own index and on the teacher's, each with its share.

    `names` are the headings of the teacher and of the students.
    """
    teacher, *students = found.results
    searches = [any(result.mode == "asymmetric" for result in row) for row in students]
    heading = ["task", "measure", names[0]]
    for name, both in zip(names[1:], searches, strict=True):
        heading += [name, "share", *([f"{name} → {names[0]}", "share"] if both else [])]
    rows: Rows = [tuple(heading)]
    for theirs in teacher:
        line = [theirs.task, theirs.main, points(theirs.score)]
        for row, both in zip(students, searches, strict=True):
            line += _both_modes(theirs, row, both=both)
        rows.append(tuple(line))
    if len(teacher) > 1:
        rows += [
            _means(found, over, searches) for over in dict.fromkeys(share.over for share in found.shares)
        ]
    return rows


def _both_modes(theirs: Result, row: Sequence[Result], *, both: bool) -> list[str]:
    """A student's figures on one task; where there are no documents apart, both modes are one."""
    cells = []
    for mode in ("standard", "asymmetric") if both else ("standard",):
        same = [r for r in row if (r.kind, r.task, r.mode) == (theirs.kind, theirs.task, mode)]
        if same:
            cells += [points(same[0].score), percent(same[0].score / theirs.score if theirs.score else None)]
        else:
            cells += ["same", ""]
    return cells


def _means(found: Comparison, over: str, searches: Sequence[bool]) -> tuple[str, ...]:
    chosen = [share for share in found.shares if share.over == over]
    what = "tasks" if over == "all" else "with documents"
    line = [f"mean of {chosen[0].tasks} {what}", "", points(chosen[0].teacher_mean)]
    by_model: dict[tuple[str, str], Share] = {(share.model, share.mode): share for share in chosen}
    for model, both in zip(found.models, searches, strict=True):
        for mode in ("standard", "asymmetric") if both else ("standard",):
            share = by_model.get((model, mode))
            line += [points(share.mean), percent(share.share)] if share else [NOTHING, ""]
    return tuple(line)


def fidelities(found: Sequence[Fidelity], names: Sequence[str], teacher: str) -> Rows:
    """How near each student is to the teacher on plain texts."""
    first = found[0]
    title = f"against {teacher}, {first.queries:,} queries × {first.documents:,} documents"
    return [
        (title, *names),
        ("cosine", *(f"{one.cosine:.4f}" for one in found)),
        ("ℓ2 distance", *(f"{one.distance:.4f}" for one in found)),
        (f"agreement@{first.k}, searching its index", *(percent(one.agreement_asymmetric) for one in found)),
        (f"agreement@{first.k}, own index", *(percent(one.agreement_standard) for one in found)),
    ]


def text_errors(found: Fidelity, name: str) -> Rows:
    """The texts a student gets most wrong and most right."""
    rows: Rows = [("ℓ2", "cosine", f"farthest from the teacher, {name}")]
    for heading, errors in ((None, found.farthest), ("nearest to the teacher", found.closest)):
        if heading:
            rows.append(("", "", heading))
        rows += [(f"{error.distance:.3f}", f"{error.cosine:.3f}", shortened(error.text)) for error in errors]
    return rows


def inheritance(found: Inheritance, teacher: str, student: str) -> Rows:
    """What is left of shortened vectors: each score with its share of the same model's own with whole vectors."""
    heading = ["dimensions", "kept as", "bytes"]
    for name in (teacher, f"{student} → {teacher}", student):
        heading += [name, "left"]
    rows: Rows = [tuple(heading)]
    for row in found.rows:
        line = [str(row.dimensions), row.precision, f"{row.bytes:,}"]
        for who, score in row.scores.items():
            line += [points(score), percent(row.kept[who])]
        rows.append(tuple(line))
    return rows


def shortened(text: str) -> str:
    """One line of a text."""
    line = " ".join(text.split())
    return line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…"


def points(score: float) -> str:
    """A score of 1 as 100."""
    return f"{100 * score:.2f}"


def percent(share: float | None) -> str:
    """A share, or a dash where there is none."""
    return NOTHING if share is None else f"{share:.1%}"
