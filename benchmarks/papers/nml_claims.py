"""NML's tables in small: what sizes of one nested run keep of the whole model, and what it keeps of itself.

    python benchmarks/papers/nml_claims.py RESULTS --hardware "one H200" --versions torch=2.11.0 transformers=5.17.0

Reads the folder that `benchmarks/width.py --objective align` wrote: the rows `before` and `nested-mlp`.
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


def read_models(folder: str, row: str) -> dict[str, dict[str, Any]]:
    """The models of a row by size; the whole one has no name."""
    content = json.loads((Path(folder) / row / "result.json").read_text())
    return {model["size"]: model for model in content["models"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results")
    add_origin(parser)
    options = parser.parse_args()
    before, nested = read_models(options.results, "before")[""], read_models(options.results, ROW)
    steps = json.loads((Path(options.results) / ROW / "result.json").read_text())["facts"]["steps"]
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
            theirs="58.6 against 59.4 (0.3×)",
        ),
        Claim(says="consecutive selection is better than uniform", theirs="62.5 against 61.6 (0.4×)"),
        Claim(says="fewer sizes in a run are slightly better for each", theirs="63.1 for one, 62.5 for two"),
    )
    evidence = Evidence(
        paper="Multi-Scale Model Compression via Nested Matrix Learning",
        method="Nested models: width",
        commands=(
            "python benchmarks/width.py all-mpnet-base-v2 --data texts --tasks . --objective align --batch-size 128 --minutes 4 "
            """--options '{"learning_rate":3e-4,"warmup":200}' --rows nested-mlp -o results""",
            "python benchmarks/papers/nml_claims.py results --hardware … --versions …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=1,
        claims=claims,
        tables=(table,),
    )
    evidence.keep("nml")
    print(markdown(evidence))


if __name__ == "__main__":
    main()
