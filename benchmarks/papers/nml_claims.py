"""NML's tables in small: what sizes of one nested run keep of the whole model, and what it keeps of itself.

    python benchmarks/papers/nml_claims.py ALIGNED BY_LABELS --hardware "one H200" --versions torch=2.11.0 transformers=5.17.0

Reads the folders that `benchmarks/width.py` wrote: with `--objective align` the rows `before` and `nested-mlp`, with
`--objective contrast` all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, add_origin, judged, markdown

ROW = "nested-mlp"
TEACHER, NESTED_TEACHER = 81.55, 81.90
STUDENTS = {"-1-2": ("0.3×", 62.22), "-1-4": ("0.1×", 59.63)}
"""Table 2: after fine-tuning further, two sizes in one run."""
HARM = 0.5
NESTED, APART = "select-consecutive", "base"
"""What is compared with like: the paper's selection, in one run and by itself."""
ROWS = {
    "tuned": "the whole model alone",
    "nested": "nested, by importance (ours)",
    "select-consecutive": "nested, consecutive (the paper's)",
    "select-uniform": "nested, uniform",
    "select-rotary": "nested, rotary pairs",
    "further": "nested by importance, then trained on",
    "base": "consecutive selection, then trained",
    "from-tuned": "the same from the trained model",
    "distil": "random start, distilled from the trained model",
    "random": "random start, trained",
}


def read_models(folder: str, row: str) -> dict[str, dict[str, Any]]:
    """The models of a row by size; the whole one has no name."""
    content = json.loads((Path(folder) / row / "result.json").read_text())
    return {model["size"]: model for model in content["models"]}


def shown(score: float | None, whole: float) -> str:
    return "" if score is None else f"{score:.1f} ({100 * score / whole:.1f}%)"


def versus(labelled: dict[str, dict[str, float]], row: str, other: str) -> str:
    """Both students of two rows."""
    names = {size: size[1:].replace("-", "/") for size in STUDENTS}
    return ", ".join(
        f"{labelled[row][size]:.1f} against {labelled[other][size]:.1f} ({names[size]})" for size in STUDENTS
    )


def by_labels(folder: str) -> dict[str, dict[str, float]]:
    """STS by row and size; rows that make one size each are joined."""
    found: dict[str, dict[str, float]] = {}
    for row in ROWS:
        if (Path(folder) / row).is_dir():
            found[row] = {size: model["sts"] for size, model in read_models(folder, row).items()}
        else:
            found[row] = {size: read_models(folder, row + size)[""]["sts"] for size in STUDENTS}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("aligned")
    parser.add_argument("by_labels")
    add_origin(parser)
    options = parser.parse_args()
    before, nested = read_models(options.aligned, "before")[""], read_models(options.aligned, ROW)
    labelled = by_labels(options.by_labels)
    steps = json.loads((Path(options.aligned) / ROW / "result.json").read_text())["facts"]["steps"]
    shares = {size: 100 * nested[size]["sts"] / before["sts"] for size in STUDENTS}
    theirs = {size: 100 * score / TEACHER for size, (_, score) in STUDENTS.items()}
    sizes = {size: f"{nested[size]['parameters'] / before['parameters']:.2f}×" for size in STUDENTS}
    rows = (
        ("whole model, before", "", f"{TEACHER:.1f}", "1×", f"{before['sts']:.1f}"),
        ("whole model, nested", "1×", f"{NESTED_TEACHER:.1f}", "1×", f"{nested['']['sts']:.1f}"),
        *(
            (
                f"width {size[1:].replace('-', '/')}, MLPs too",
                STUDENTS[size][0],
                f"{STUDENTS[size][1]:.1f} ({theirs[size]:.0f}%)",
                sizes[size],
                f"{nested[size]['sts']:.1f} ({shares[size]:.1f}%)",
            )
            for size in STUDENTS
        ),
    )
    table = Table(
        title=f"Tables 2 and 3, mean of STS: Qwen1.5-0.5B by labels there, all-mpnet-base-v2 by `align` here, {steps} steps of 128 texts",
        columns=("model", "size, paper", "paper", "size, here", "here"),
        rows=rows,
    )
    whole = labelled["tuned"][""]
    compared = Table(
        title="Table 1: SmolLM2-135M-Instruct by labels (SNLI), 400 steps of 64 tuples for every row, mean of STS and its share of the whole model alone",
        columns=("", "whole", "1/2 (0.45×)", "1/4 (0.21×)"),
        rows=tuple(
            (ROWS[row], *(shown(sizes_of.get(size), whole) for size in ("", *STUDENTS)))
            for row, sizes_of in labelled.items()
        ),
    )
    claims = (
        Claim(
            says="narrow models out of one run are good models",
            theirs="; ".join(f"{theirs[size]:.0f}% at {STUDENTS[size][0]}" for size in STUDENTS),
            ours="; ".join(f"{shares[size]:.1f}% at {sizes[size]}" for size in STUDENTS),
            verdict=judged(all(shares[size] >= theirs[size] for size in STUDENTS)),
            remark="imitating the whole model's vectors keeps far more than learning by labels, and every size searches its index",
        ),
        Claim(
            says="nesting does the whole model no harm",
            theirs=f"{TEACHER:.1f} → {NESTED_TEACHER:.1f}",
            ours=f"{before['sts']:.1f} → {nested['']['sts']:.1f}",
            verdict=judged(nested[""]["sts"] >= before["sts"] - HARM),
        ),
        Claim(
            says="it does as well as cutting first and training each size by itself",
            theirs="62.5 against 63.5 (0.4×), 54.2 against 50.7 (0.2×)",
            ours=versus(labelled, NESTED, APART),
            verdict=judged(all(labelled[NESTED][size] >= labelled[APART][size] - HARM for size in STUDENTS)),
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
        Claim(says="fewer sizes in a run are slightly better for each", theirs="63.1 for one, 62.5 for two"),
    )
    evidence = Evidence(
        paper="Multi-Scale Model Compression via Nested Matrix Learning",
        method="Nested models: width",
        commands=(
            "python benchmarks/width.py all-mpnet-base-v2 --data texts --tasks . --objective align --batch-size 128 --minutes 4 "
            """--options '{"learning_rate":3e-4,"warmup":200}' --rows nested-mlp -o results""",
            "python benchmarks/width.py SmolLM2-135M-Instruct --data snli --tasks . --objective contrast --steps 400 "
            """--options '{"learning_rate":5e-5,"warmup":40,"max_length":48}' -o labels""",
            "python benchmarks/papers/nml_claims.py results labels --hardware … --versions …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=1,
        claims=claims,
        tables=(table, compared),
    )
    evidence.keep("nml")
    print(markdown(evidence))


if __name__ == "__main__":
    main()
