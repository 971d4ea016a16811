"""NML's tables in small: what sizes of one nested run keep of the whole model, and what it keeps of itself.

    python benchmarks/papers/nml_claims.py
    python benchmarks/papers/nml_claims.py --aligned RESULTS --labels RESULTS [NAME=RESULTS/ROW…]

Prints the section about this paper. `--aligned` and `--labels` take over folders that `benchmarks/width.py` wrote: with
`--objective align` the row `before` and all others that are there, with `--objective contrast` all rows. NAME=FOLDER is one
row under a name of its own, such as a run with one size.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import (
    Claim,
    Evidence,
    Table,
    add_origin,
    judged,
    markdown,
    read_measured,
    write_measured,
)

NAME = "nml"
BEFORE, ROW = "before", "nested-mlp"
WHOLE = "1"
TEACHER, NESTED_TEACHER = 81.55, 81.90
STUDENTS = {"1/2": ("0.3×", 62.22), "1/4": ("0.1×", 59.63)}
"""Table 2: after fine-tuning further, two sizes in one run."""
HARM = 0.5
NESTED, APART, ONE_SIZE = "select-consecutive", "base", "half-alone"
"""What is compared with like: the paper's selection, in one run, by itself, and in a run with no other size."""
ALIGNED_ROWS = {
    "nested-mlp": "nested with MLPs",
    "alone-mlp": "the same, each size by itself",
    "nested": "nested, MLPs as they were",
    "alone": "the same, each size by itself",
}
ALONE = {"nested": "alone", "nested-mlp": "alone-mlp"}
"""A nested run, and its sizes aligned by themselves."""
ROWS = {
    "tuned": "the whole model alone",
    "select-importance": "nested, by importance (ours)",
    "select-consecutive": "nested, consecutive (the paper's), λ 0.9",
    "lambda-0.5": "the same, λ 0.5",
    "lambda-1.0": "the same, λ 1: the whole model counts for nothing",
    "half-alone": "the same, λ 0.9, half the width only",
    "select-uniform": "nested, uniform",
    "select-rotary": "nested, rotary pairs",
    "further-importance": "nested by importance, then trained on",
    "base": "consecutive selection, then trained",
    "from-tuned": "the same from the trained model",
    "distil": "random start, distilled from the trained model",
    "random": "random start, trained",
}
Labelled = dict[str, dict[str, float]]
"""STS by row and size."""


def size_of(model: dict[str, Any]) -> str:
    return str(model["size"]).removeprefix("-").replace("-", "/") or WHOLE


def read_row(folder: Path) -> list[dict[str, Any]]:
    models: list[dict[str, Any]] = json.loads((folder / "result.json").read_text())["models"]
    return models


def joined_row(row: str) -> tuple[str, str | None]:
    """The name that rows of one size each share, and the size."""
    size = next((size for size in STUDENTS if row.endswith(f"-{size.replace('/', '-')}")), None)
    return (row, None) if size is None else (row.removesuffix(f"-{size.replace('/', '-')}"), size)


def search_of(model: dict[str, Any], mode: str) -> float:
    found = [one["score"] for one in model["scores"] if (one["kind"], one["mode"]) == ("retrieval", mode)]
    return 100 * statistics.fmean(found)


def read_aligned(folder: str) -> dict[str, Any]:
    """STS in points and shares of the model's own search, by row and size."""
    before = read_row(Path(folder) / BEFORE)[0]
    whole = search_of(before, "standard")
    steps = 0
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for file in sorted(Path(folder).glob("*/result.json")):
        if file.parent.name == BEFORE:
            continue
        row, ending = joined_row(file.parent.name)
        steps = json.loads(file.read_text())["facts"]["steps"]
        for model in read_row(file.parent):
            rows.setdefault(row, {})[ending or size_of(model)] = {
                "parameters": model["parameters"],
                "sts": round(model["sts"], 2),
                "own": round(100 * search_of(model, "standard") / whole, 2),
                "across": round(100 * search_of(model, "asymmetric") / whole, 2),
            }
    return {
        "steps": steps,
        "before": {"parameters": before["parameters"], "sts": round(before["sts"], 2)},
        "rows": rows,
    }


def read_labels(place: str) -> Labelled:
    """All rows of a folder, those that make one size each joined; or one row under its own name."""
    name, _, single = place.partition("=")
    folders = {name: Path(single)} if single else {one.name: one for one in Path(place).iterdir()}
    found: Labelled = {}
    for row, folder in folders.items():
        if not (folder / "result.json").is_file():
            continue
        joined, ending = joined_row(row)
        for model in read_row(folder):
            found.setdefault(joined, {})[ending or size_of(model)] = round(model["sts"], 2)
    return {row: sizes for row, sizes in found.items() if row in ROWS}


def shown(score: float | None, whole: float) -> str:
    return "" if score is None else f"{score:.1f} ({100 * score / whole:.1f}%)"


def versus(labelled: Labelled, row: str, other: str) -> str:
    """Both students of two rows."""
    return ", ".join(
        f"{labelled[row][size]:.1f} against {labelled[other][size]:.1f} ({size})" for size in STUDENTS
    )


def aligned_table(aligned: dict[str, Any]) -> Table:
    before, sizes = aligned["before"], aligned["rows"][ROW]
    return Table(
        title="Tables 2 and 3, mean of STS: Qwen1.5-0.5B by labels there, all-mpnet-base-v2 by `align` here, "
        f"{aligned['steps']} steps of 128 texts",
        columns=("model", "size, paper", "paper", "size, here", "here"),
        rows=(
            ("whole model, before", "", f"{TEACHER:.1f}", "1×", f"{before['sts']:.1f}"),
            ("whole model, nested", "1×", f"{NESTED_TEACHER:.1f}", "1×", f"{sizes[WHOLE]['sts']:.1f}"),
            *(
                (
                    f"width {size}, MLPs too",
                    smaller,
                    f"{score:.1f} ({100 * score / TEACHER:.0f}%)",
                    f"{sizes[size]['parameters'] / before['parameters']:.2f}×",
                    shown(sizes[size]["sts"], before["sts"]),
                )
                for size, (smaller, score) in STUDENTS.items()
            ),
        ),
    )


def together_table(aligned: dict[str, Any]) -> Table:
    before, rows = aligned["before"], aligned["rows"]
    return Table(
        title=f"all-mpnet-base-v2 by `align`, {aligned['steps']} steps of 128 texts for every row: STS, searches of the size's own index and "
        "of the model's, as shares of what the model had",
        columns=("", "size", "parameters", "STS", "own index", "model's index"),
        rows=tuple(
            (
                name,
                size,
                f"{one['parameters'] / before['parameters']:.2f}×",
                shown(one["sts"], before["sts"]),
                f"{one['own']:.1f}%",
                f"{one['across']:.1f}%",
            )
            for row, name in ALIGNED_ROWS.items()
            for size in (WHOLE, *STUDENTS)
            if (one := rows.get(row, {}).get(size))
        ),
    )


def labels_table(labelled: Labelled) -> Table:
    whole = labelled["tuned"][WHOLE]
    return Table(
        title="Table 1: SmolLM2-135M-Instruct by labels (SNLI), 400 steps of 64 tuples for every row, mean of STS and its share of the whole model alone",
        columns=("", "whole", "1/2 (0.45×)", "1/4 (0.21×)"),
        rows=tuple(
            (name, *(shown(labelled[row].get(size), whole) for size in (WHOLE, *STUDENTS)))
            for row, name in ROWS.items()
            if row in labelled
        ),
    )


def aligned_claims(aligned: dict[str, Any]) -> tuple[Claim, Claim]:
    before, sizes = aligned["before"], aligned["rows"][ROW]
    shares = {size: 100 * sizes[size]["sts"] / before["sts"] for size in STUDENTS}
    theirs = {size: 100 * score / TEACHER for size, (_, score) in STUDENTS.items()}
    return Claim(
        says="narrow models out of one run are good models",
        theirs="; ".join(f"{theirs[size]:.0f}% at {STUDENTS[size][0]}" for size in STUDENTS),
        ours="; ".join(
            f"{shares[size]:.1f}% at {sizes[size]['parameters'] / before['parameters']:.2f}×"
            for size in STUDENTS
        ),
        verdict=judged(all(shares[size] >= theirs[size] for size in STUDENTS)),
        remark="imitating the whole model's vectors keeps far more than learning by labels, and every size searches its index",
    ), Claim(
        says="nesting does the whole model no harm",
        theirs=f"{TEACHER:.1f} → {NESTED_TEACHER:.1f}",
        ours=f"{before['sts']:.1f} → {sizes[WHOLE]['sts']:.1f}",
        verdict=judged(sizes[WHOLE]["sts"] >= before["sts"] - HARM),
    )


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    labelled: Labelled = measured["labels"]
    aligned: Labelled = {
        row: {size: one["sts"] for size, one in sizes.items()}
        for row, sizes in measured["aligned"]["rows"].items()
    }
    alone, among = labelled[ONE_SIZE]["1/2"], labelled[NESTED]["1/2"]
    claims = (
        *aligned_claims(measured["aligned"]),
        Claim(
            says="it does as well as cutting first and training each size by itself",
            theirs="62.5 against 63.5 (0.4×), 54.2 against 50.7 (0.2×)",
            ours=f"{versus(labelled, NESTED, APART)}; by `align` "
            + "; ".join(versus(aligned, row, other) for row, other in ALONE.items()),
            verdict=judged(
                all(
                    scores[row][size] >= scores[other][size] - HARM
                    for scores, row, other in (
                        (labelled, NESTED, APART),
                        *((aligned, row, other) for row, other in ALONE.items()),
                    )
                    for size in STUDENTS
                )
            ),
        ),
        Claim(
            says="and better than what starts at random",
            theirs="62.5 against 49.1 (0.4×), 54.2 against 46.3 (0.2×); distilled 62.5 against 49.4 (0.4×)",
            ours=f"{versus(labelled, NESTED, 'random')}; distilled {versus(labelled, NESTED, 'distil')}",
            verdict=judged(
                all(
                    labelled[NESTED][size] > labelled[other][size]
                    for size in STUDENTS
                    for other in ("random", "distil")
                )
            ),
            remark="at half the width it is; at a quarter, after so few steps, a random start is ahead",
        ),
        Claim(
            says="consecutive selection is better than uniform",
            theirs="62.5 against 61.6 (0.4×)",
            ours=versus(labelled, NESTED, "select-uniform"),
            verdict=judged(
                all(labelled[NESTED][size] > labelled["select-uniform"][size] for size in STUDENTS)
            ),
            remark="at half the width it is; importance is far ahead of both there, and far behind at a quarter",
        ),
        Claim(
            says="fewer sizes in a run are slightly better for each",
            theirs="63.1 for one, 62.5 for two",
            ours=f"{alone:.1f} for one, {among:.1f} for two (1/2)",
            verdict="can't tell" if abs(alone - among) < 1 else judged(alone > among),
            remark="one seed",
        ),
    )
    return Evidence(
        paper="Multi-Scale Model Compression via Nested Matrix Learning",
        method="Nested models: width",
        commands=(
            "python benchmarks/width.py all-mpnet-base-v2 --data texts --tasks . --objective align --batch-size 128 --steps 900 "
            """--options '{"learning_rate":3e-4,"warmup":100,"augment":"sentences,spans,joins","texts":400000}' --rows 'nested*,alone*' -o results""",
            "python benchmarks/width.py SmolLM2-135M-Instruct --data snli --tasks . --objective contrast --steps 400 "
            """--options '{"learning_rate":5e-5,"warmup":40,"max_length":48}' -o labels""",
            "python benchmarks/width.py … --widths 1/2 --rows select-consecutive -o one",
            "python benchmarks/papers/nml_claims.py --aligned results --labels labels half-alone=one/select-consecutive --hardware … --versions …",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=1,
        claims=claims,
        tables=(
            aligned_table(measured["aligned"]),
            together_table(measured["aligned"]),
            labels_table(labelled),
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aligned", metavar="FOLDER")
    parser.add_argument("--labels", nargs="+", default=[], metavar="FOLDER")
    add_origin(parser)
    options = parser.parse_args()
    if options.aligned or options.labels:
        measured = read_measured(NAME)
        if options.aligned:
            measured["aligned"] = read_aligned(options.aligned)
        for place in options.labels:
            measured["labels"] |= read_labels(place)
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()
