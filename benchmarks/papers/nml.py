"""NML: what sizes of one nested training run keep of the full model, and what the full model keeps."""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence import (
    Figure,
    Figures,
    Row,
    Verdict,
    all_above,
    figure,
    judged,
    merge,
    points,
    read_results,
    table,
)

ROW, FULL, STUDENTS = "nested-mlp", "1", ("1/2", "1/4")
NESTED, BASE, ONE_SIZE, TUNED = "select-consecutive", "base", "half-alone", "tuned"
TEACHER = 81.55
PAPER_SIZES = {"1/2": "0.4×", "1/4": "0.2×"}
Scores = dict[str, dict[str, Figure]]
"""A score by row and size."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add folders of `benchmarks/students.py width`.

    `aligned` and `labels` are output folders; any other name is the folder of one row, kept under that name.
    """
    seed = {"seed": options.seed}
    results = read_results(place if what in ("aligned", "labels") else Path(place).parent)
    if what not in ("aligned", "labels"):
        results = {what: results[Path(place).name]}
    if what == "aligned" and "before" in results:
        before = results.pop("before")["models"][0]
        row = {"parameters": before["parameters"], "sts": round(points(before, "sts"), 2)}
        merge(figures["before"], [row | {"search": points(before, "retrieval")}], ())
    known = {row["row"] for row in figures["label_rows"]}
    for name, content in results.items():
        joined, size = _joined(name)
        for model in content["models"]:
            row = {"row": joined, "size": size or model["size"].strip("-").replace("-", "/") or FULL} | seed
            row["sts"] = round(points(model, "sts"), 2)
            if what == "aligned":
                whole = figures["before"][0]["search"]
                figures["before"][0]["steps"] = content["facts"]["steps"]
                row |= {"parameters": model["parameters"]}
                for key, mode in (("own", "standard"), ("across", "asymmetric")):
                    row[key] = round(100 * points(model, "retrieval", mode) / whole, 2)
                merge(figures["aligned"], [row], ("row", "size", "seed"))
            elif joined in known:
                merge(figures["labels"], [row], ("row", "size", "seed"))


def _joined(name: str) -> tuple[str, str | None]:
    """Split a row that makes one size into the name that such rows share, and the size."""
    for size in STUDENTS:
        if name.endswith(ending := f"-{size.replace('/', '-')}"):
            return name.removesuffix(ending), size
    return name, None


def scores(rows: list[Row], key: str = "sts") -> Scores:
    """Summarise a column over seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["row"], {}).setdefault(row["size"], []).append(row[key])
    return {name: {size: figure(seeds) for size, seeds in sizes.items()} for name, sizes in found.items()}


def versus(found: Scores, row: str, other: str) -> str:
    """Show both sizes of two rows."""
    return ", ".join(f"{found[row][size]} against {found[other][size]} ({size})" for size in STUDENTS)


def shown(score: Figure | None, whole: float) -> str:
    """Show a score and its share."""
    return "" if score is None else f"{score} ({100 * score.mean / whole:.1f}%)"


def values(figures: Figures) -> dict[str, str]:
    """Compute every placeholder of the section."""
    labels = scores(figures["labels"])
    aligned, own = (scores(figures["aligned"], key) for key in ("sts", "own"))
    before, whole = figures["before"][0], labels[TUNED][FULL].mean
    theirs = {row["row"]: row["paper"] for row in figures["label_rows"]}
    smallest = {row["size"]: row for row in figures["paper"]}
    parameters = {
        (row["row"], row["size"]): row["parameters"] / before["parameters"] for row in figures["aligned"]
    }
    kept = {size: 100 * labels[NESTED][size].mean / whole for size in STUDENTS}
    goals = {size: 100 * theirs[NESTED][size] / TEACHER for size in STUDENTS}
    theirs_align = {size: 100 * smallest[size]["sts"] / TEACHER for size in STUDENTS}
    shares = {size: 100 * aligned[ROW][size].mean / before["sts"] for size in STUDENTS}
    picked = [f"{100 * labels['select-importance'][size].mean / whole:.0f}%" for size in STUDENTS]

    def better(row: str, *others: str) -> Verdict:
        return all_above((labels[row][size], labels[other][size]) for other in others for size in STUDENTS)

    def paper(row: str, other: str) -> str:
        both = [size for size in STUDENTS if size in theirs[row] and size in theirs[other]]
        pairs = ((theirs[row][size], theirs[other][size], PAPER_SIZES[size]) for size in both)
        return ", ".join(f"{one:.1f} against {two:.1f} ({name})" for one, two, name in pairs)

    found: dict[str, str] = {}
    for name, row in (
        ("base", BASE),
        ("random", "random"),
        ("distil", "distil"),
        ("uniform", "select-uniform"),
    ):
        found |= {f"{name}.here": versus(labels, NESTED, row), f"{name}.paper": paper(NESTED, row)}
    return found | {
        "labels.paper": f"{goals['1/2']:.0f}% at 0.4×; {goals['1/4']:.0f}% at 0.2×",
        "labels.here": f"{kept['1/2']:.0f}% at 0.45×; {kept['1/4']:.0f}% at 0.21×",
        "importance": " and ".join(picked),
        "align.paper": "; ".join(
            f"{theirs_align[one]:.0f}% at {smallest[one]['smaller']}" for one in STUDENTS
        ),
        "align.here": "; ".join(f"{shares[size]:.1f}% at {parameters[ROW, size]:.2f}×" for size in STUDENTS),
        "harm.labels": f"{labels[TUNED][FULL]} → {labels[NESTED][FULL]}",
        "harm.align": f"{before['sts']:.1f} → {aligned[ROW][FULL].mean:.1f}",
        "alone.align": versus(aligned, "nested", "alone") + "; " + versus(aligned, "nested-mlp", "alone-mlp"),
        "alone.own": f"{own['nested-mlp']['1/2']}% against {own['alone-mlp']['1/2']}%",
        "one.here": f"{labels[ONE_SIZE]['1/2']} for one, {labels[NESTED]['1/2']} for two (1/2)",
        "verdict.labels": judged(all(kept[size] >= goals[size] for size in STUDENTS)),
        "verdict.align": judged(all(shares[size] >= theirs_align[size] for size in STUDENTS)),
        "verdict.harm": judged(not labels[TUNED][FULL].above(labels[NESTED][FULL])),
        "verdict.alone": judged(not any(labels[BASE][size].above(labels[NESTED][size]) for size in STUDENTS)),
        "verdict.random": better(NESTED, "random", "distil"),
        "verdict.uniform": better(NESTED, "select-uniform"),
        "verdict.one": all_above([(labels[ONE_SIZE]["1/2"], labels[NESTED]["1/2"])]),
        "before": f"{before['sts']:.1f}",
        "nested": str(aligned[ROW][FULL]),
        "sizes": "\n".join(
            f"| width {size}, MLPs too | {row['smaller']} | {row['sts']:.1f} "
            f"({100 * row['sts'] / TEACHER:.0f}%) "
            f"| {parameters[ROW, size]:.2f}× | {shown(aligned[ROW][size], before['sts'])} |"
            for size, row in smallest.items()
        ),
        "steps": str(before["steps"]),
        "together": _together(figures, parameters),
        "by_labels": _by_labels(figures, labels, whole),
        "seeds": str(max(one.seeds for sizes in labels.values() for one in sizes.values())),
    }


def _together(figures: Figures, parameters: dict[tuple[str, str], float]) -> str:
    sts, own, across = (scores(figures["aligned"], key) for key in ("sts", "own", "across"))
    before = figures["before"][0]["sts"]
    rows = []
    for row, label in ((one["row"], one["label"]) for one in figures["aligned_rows"]):
        for size in (FULL, *STUDENTS):
            if score := sts[row].get(size):
                cells = f"{shown(score, before)} | {own[row][size]}% | {across[row][size]}%"
                rows.append(f"{label} | {size} | {parameters[row, size]:.2f}× | {cells}")
    return table(" | size | parameters | STS | own index | model's index", rows)


def _by_labels(figures: Figures, labels: Scores, whole: float) -> str:
    sizes = (FULL, *STUDENTS)
    rows = []
    for row in figures["label_rows"]:
        ours = [shown(labels.get(row["row"], {}).get(size), whole) for size in sizes]
        paper = [f"{row['paper'][size]:.1f}" if size in row["paper"] else "" for size in sizes]
        rows.append(" | ".join([row["label"], *ours, *paper]))
    return table(" | full | 1/2 (0.45×) | 1/4 (0.21×) | paper, full | paper, 0.4× | paper, 0.2×", rows)
