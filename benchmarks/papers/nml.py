"""NML: what sizes of one nested training run keep of the full model, and what the full model keeps."""

from __future__ import annotations

import argparse
from pathlib import Path

from evidence import Claim, Figure, Figures, Gap, Row, figure, gap, merge, pick, points, read_results

ROW, FULL, STUDENTS = "nested-mlp", "1", ("1/2", "1/4")
FURTHER = "further-consecutive"
BEFORE, NESTED, BASE, ONE_SIZE = "before", "select-consecutive", "base", "half-alone"
TUNED, HEALED = "tuned", "healed"
SMOL, MINI = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
NAMES = {SMOL: "SmolLM2 135M", MINI: "MiniLM 23M"}
TEACHER = 81.55
PAPER_SIZES = {"1/2": "0.4×", "1/4": "0.2×"}
SIMILAR = 0.5
"""A loss in points that counts as none."""
BY_LABELS = "SmolLM2 135M; 400 steps of 64 tuples of SNLI, 2,024 of 9,563 with a negative"
Scores = dict[str, dict[str, Figure]]
"""A score by row and size."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add folders of `benchmarks/students.py width`.

    `aligned`, `labels` and `all` (all triplets) are output folders; any other name is the folder of one row,
    kept under that name.
    """
    seed = {"seed": options.seed}
    if what == "all":
        if options.model not in NAMES:
            raise SystemExit(f"pass --model with one of {', '.join(NAMES)}")
        _take_all(figures, options.model, read_results(place), options.seed)
        return
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


def _take_all(figures: Figures, model_name: str, results: dict[str, Row], seed: int) -> None:
    for name, content in results.items():
        joined, size = _joined(name)
        batch = [
            step["batch_size"] for one in content["steps"] for step in one.values() if "batch_size" in step
        ]
        for model in content["models"]:
            row = {
                "model": model_name,
                "batch": batch[-1] if batch else None,
                "row": joined,
                "seed": seed,
                "sts": round(points(model, "sts"), 2),
            }
            row["size"] = size or model["size"].strip("-").replace("-", "/") or FULL
            row["steps"] = content["facts"].get("steps")
            merge(figures["all"], [row], ("model", "row", "size", "seed"))


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


def gaps(found: Scores, row: str, other: str, *, of: str = "", margin: float = 0.0) -> list[Gap]:
    """Return the differences of a row to another at both sizes."""
    return [
        gap(found[row][size], found[other][size], f"{of} {size}:".lstrip(), margin=margin)
        for size in STUDENTS
    ]


def shown(score: Figure | None, whole: float) -> str:
    """Show a score and its share."""
    return "" if score is None else f"{score} ({100 * score.mean / whole:.1f}%)"


def claims(figures: Figures) -> list[Claim]:
    """Return the rows of the paper's table."""
    labels, aligned = scores(figures["labels"]), scores(figures["aligned"])
    every, mini = (scores(pick(figures["all"], model=model)) for model in NAMES)
    by_all, full = _scale(figures, SMOL), every[TUNED][FULL]
    both = f"{by_all}; {_scale(figures, MINI)}"
    before = figures["before"][0]["sts"]
    theirs = {row["row"]: row["paper"] for row in figures["label_rows"]}
    smallest = {row["size"]: row for row in figures["paper"]}

    def paper(row: str, other: str) -> str:
        both = [size for size in STUDENTS if size in theirs[row] and size in theirs[other]]
        pairs = ((theirs[row][size], theirs[other][size], PAPER_SIZES[size]) for size in both)
        return ", ".join(f"{one:.1f} against {two:.1f} ({name})" for one, two, name in pairs)

    def labelled(says: str, other: str) -> Claim:
        return Claim(
            says=says,
            paper=paper(NESTED, other),
            here=versus(labels, NESTED, other),
            scale=BY_LABELS,
            gaps=gaps(labels, NESTED, other),
            command="B",
        )

    goals = {size: theirs[NESTED][size] / TEACHER for size in STUDENTS}
    shares = "; ".join(f"{100 * goals[size]:.0f}% at {PAPER_SIZES[size]}" for size in STUDENTS)
    whole = mini[BEFORE][FULL]
    one, two = labels[ONE_SIZE]["1/2"], labels[NESTED]["1/2"]
    return [
        Claim(
            says="narrow models from one run keep the paper's share of the full model",
            paper=shares,
            here="; ".join(f"{shown(every[NESTED][size], full.mean)} at {size}" for size in STUDENTS),
            scale=by_all,
            gaps=[gap(every[NESTED][size], goals[size] * full.mean, f"{size}:") for size in STUDENTS],
            command="D",
        ),
        Claim(
            says="the same for a model that is an embedder already",
            paper=shares,
            here="; ".join(f"{shown(mini[NESTED][size], whole.mean)} at {size}" for size in STUDENTS),
            scale=_scale(figures, MINI),
            gaps=[gap(mini[NESTED][size], goals[size] * whole.mean, f"{size}:") for size in STUDENTS],
            command="E",
        ),
        Claim(
            says="the same with `align`, MLPs narrowed too (ours)",
            paper="; ".join(f"{row['sts'] / TEACHER:.0%} at {row['smaller']}" for row in smallest.values()),
            here="; ".join(f"{shown(aligned[ROW][size], before)} at {size}" for size in STUDENTS),
            scale="all-mpnet-base-v2 109M; 900 steps of 128 texts",
            gaps=[
                gap(aligned[ROW][size], before * smallest[size]["sts"] / TEACHER, f"{size}:")
                for size in STUDENTS
            ],
            command="A",
        ),
        Claim(
            says="nesting costs the full model at most 0.5 points",
            paper="81.5 → 81.9",
            here=f"{full} → {every[NESTED][FULL]}; with `align` {before:.1f} → {aligned[ROW][FULL]}",
            scale=by_all,
            gaps=[gap(every[NESTED][FULL], full, margin=SIMILAR)],
            command="D, A",
        ),
        Claim(
            says="nested sizes lose at most 0.5 points to sizes cut, healed and trained alone (ours)",
            paper="–",
            here=versus(every, NESTED, HEALED),
            scale=by_all,
            gaps=gaps(every, NESTED, HEALED, margin=SIMILAR),
            command="D",
        ),
        Claim(
            says="nested sizes lose at most 0.5 points to sizes cut and trained alone",
            paper=paper(NESTED, BASE),
            here=f"SmolLM2 {versus(every, NESTED, BASE)}; MiniLM {versus(mini, NESTED, BASE)}",
            scale=both,
            gaps=[
                *gaps(every, NESTED, BASE, of="SmolLM2", margin=SIMILAR),
                *gaps(mini, NESTED, BASE, of="MiniLM", margin=SIMILAR),
            ],
            command="D, E",
        ),
        labelled("it is better than a random start", "random"),
        labelled("it is better than distilling into a random start", "distil"),
        labelled("consecutive selection is better than uniform", "select-uniform"),
        Claim(
            says="one size in a run is better than two",
            paper="63.1 against 62.5 (0.4×)",
            here=f"{one} against {two} (1/2)",
            scale=BY_LABELS,
            gaps=[gap(one, two)],
            command="B, C",
        ),
        Claim(
            says="nested, then trained further, is the best start",
            paper=paper(FURTHER, BASE),
            here=versus(mini, FURTHER, BASE),
            scale=f"{_scale(figures, MINI)}; nested ones as many more",
            gaps=gaps(mini, FURTHER, BASE),
            command="E",
        ),
    ]


def _scale(figures: Figures, model: str) -> str:
    """Show how long the rows of `all` were trained, and on what."""
    rows = pick(figures["all"], model=model)
    steps, batch = (max(row[key] for row in rows if row[key]) for key in ("steps", "batch"))
    return f"{NAMES[model]}; {steps} steps of {batch} of all 98,603 tuples"
