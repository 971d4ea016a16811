"""NML's tables in small: what sizes of one nested run keep of the whole model, and what it keeps of itself.

    python benchmarks/papers/nml_claims.py
    python benchmarks/papers/nml_claims.py --aligned RESULTS --labels RESULTS [NAME=RESULTS/ROW…] --seed 0

Prints the section about this paper. `--aligned` and `--labels` take over folders that `benchmarks/width.py` wrote with that seed: with
`--objective align` all rows that are there, with `--objective contrast` likewise. NAME=FOLDER is one row under a name of its
own, such as a run with one size.
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
    Verdict,
    add_origin,
    all_above,
    judged,
    markdown,
    read_measured,
    write_measured,
)
from nml_tables import (
    NESTED_TEACHER,
    PAPER,
    ROW,
    ROWS,
    SMALLEST,
    STUDENTS,
    TEACHER,
    WHOLE,
    Scores,
    aligned_scores,
    aligned_table,
    labelled_scores,
    labels_table,
    together_table,
)

NAME = "nml"
BEFORE = "before"
HARM = 0.5
NESTED, APART, ONE_SIZE = "select-consecutive", "base", "half-alone"
"""What is compared with like: the paper's selection, in one run, by itself, and in a run with no other size."""
ALONE = {"nested": "alone", "nested-mlp": "alone-mlp"}
"""A nested run, and its sizes aligned by themselves."""


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


def add_aligned(aligned: dict[str, Any], folder: str, seed: int) -> None:
    """STS in points and shares of the model's own search, by row, size and seed."""
    for file in sorted(Path(folder).glob("*/result.json")):
        row, ending = joined_row(file.parent.name)
        content = json.loads(file.read_text())
        if row == BEFORE:
            before = content["models"][0]
            aligned["before"] = {
                "parameters": before["parameters"],
                "sts": round(before["sts"], 2),
                "search": search_of(before, "standard"),
            }
            continue
        aligned["steps"] = content["facts"]["steps"]
        for model in content["models"]:
            size = aligned["rows"].setdefault(row, {}).setdefault(ending or size_of(model), {"seeds": {}})
            size["parameters"] = model["parameters"]
            size["seeds"][str(seed)] = {
                "sts": round(model["sts"], 2),
                "own": round(100 * search_of(model, "standard") / aligned["before"]["search"], 2),
                "across": round(100 * search_of(model, "asymmetric") / aligned["before"]["search"], 2),
            }


def add_labels(labels: dict[str, Any], place: str, seed: int) -> None:
    """All rows of a folder, those that make one size each joined; or one row under its own name."""
    name, _, single = place.partition("=")
    folders = {name: Path(single)} if single else {one.name: one for one in Path(place).iterdir()}
    for row, folder in folders.items():
        joined, ending = joined_row(row)
        if joined in ROWS and (folder / "result.json").is_file():
            for model in read_row(folder):
                sizes = labels.setdefault(joined, {})
                sizes.setdefault(ending or size_of(model), {})[str(seed)] = round(model["sts"], 2)


def versus(scores: Scores, row: str, other: str) -> str:
    """Both students of two rows."""
    return ", ".join(f"{scores[row][size]} against {scores[other][size]} ({size})" for size in STUDENTS)


def theirs(row: str, other: str) -> str:
    """The same pair in the paper, where it has both."""
    sizes = [size for size in STUDENTS if size in PAPER[row] and size in PAPER[other]]
    names = {"1/2": "0.4×", "1/4": "0.2×"}
    return ", ".join(
        f"{PAPER[row][size]:.1f} against {PAPER[other][size]:.1f} ({names[size]})" for size in sizes
    )


def narrow_claims(measured: dict[str, Any], scores: Scores) -> tuple[Claim, Claim]:
    """What is left at each size, by labels as in the paper, and by align."""
    before, sizes = measured["aligned"]["before"], measured["aligned"]["rows"][ROW]
    aligned = aligned_scores(measured)[ROW]
    shares = {size: 100 * aligned[size].mean / before["sts"] for size in STUDENTS}
    goals = {size: 100 * score / TEACHER for size, (_, score) in SMALLEST.items()}
    whole = scores["tuned"][WHOLE].mean
    ours = {size: 100 * scores[NESTED][size].mean / whole for size in STUDENTS}
    paper = {size: 100 * PAPER[NESTED][size] / TEACHER for size in STUDENTS}
    picked = {size: 100 * scores["select-importance"][size].mean / whole for size in STUDENTS}
    return Claim(
        says="by labels, narrow models out of one run are good models",
        theirs=f"{paper['1/2']:.0f}% at 0.4×; {paper['1/4']:.0f}% at 0.2×",
        ours=f"{ours['1/2']:.0f}% at 0.45×; {ours['1/4']:.0f}% at 0.21×",
        verdict=judged(all(ours[size] >= paper[size] for size in STUDENTS)),
        remark=f"400 steps are few; chosen by importance {picked['1/2']:.0f}% and {picked['1/4']:.0f}%",
    ), Claim(
        says="the same by `align` (ours), MLPs narrower, too",
        theirs="; ".join(f"{goals[size]:.0f}% at {SMALLEST[size][0]}" for size in STUDENTS) + ", by labels",
        ours="; ".join(
            f"{shares[size]:.1f}% at {sizes[size]['parameters'] / before['parameters']:.2f}×"
            for size in STUDENTS
        ),
        verdict=judged(all(shares[size] >= goals[size] for size in STUDENTS)),
        remark="imitating the whole model's vectors keeps far more than learning by labels, and every size searches its index",
    )


def harm_claim(measured: dict[str, Any], scores: Scores) -> Claim:
    before, after = measured["aligned"]["before"]["sts"], aligned_scores(measured)[ROW][WHOLE].mean
    alone, nested = scores["tuned"][WHOLE], scores[NESTED][WHOLE]
    by_align = "no harm" if after >= before - HARM else "harm, too"
    return Claim(
        says="nesting does the whole model no harm",
        theirs=f"{TEACHER:.1f} → {NESTED_TEACHER:.1f}",
        ours=f"by labels {alone} → {nested}; by `align` {before:.1f} → {after:.1f}",
        verdict=judged(not alone.above(nested)),
        remark=f"by `align` {by_align}",
    )


def not_worse(scores: Scores, row: str, other: str) -> Verdict:
    """Whether no size of a row is below another's."""
    return judged(not any(scores[other][size].above(scores[row][size]) for size in STUDENTS))


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    scores, aligned, own = (
        labelled_scores(measured),
        aligned_scores(measured),
        aligned_scores(measured, "own"),
    )

    def better(row: str, *others: str) -> Verdict:
        return all_above((scores[row][size], scores[other][size]) for other in others for size in STUDENTS)

    claims = (
        *narrow_claims(measured, scores),
        harm_claim(measured, scores),
        Claim(
            says="it does as well as cutting first and training each size by itself",
            theirs=theirs(NESTED, APART),
            ours=f"{versus(scores, NESTED, APART)}; by `align` "
            + "; ".join(versus(aligned, row, other) for row, other in ALONE.items()),
            verdict=not_worse(scores, NESTED, APART),
            remark="no size is worse by more than its seeds tell; at a quarter nesting is ahead. By `align` the search of an index of its own pays at half the width: "
            f"{own['nested-mlp']['1/2']}% against {own['alone-mlp']['1/2']}%",
        ),
        Claim(
            says="and better than what starts at random",
            theirs=f"{theirs(NESTED, 'random')}; distilled {theirs(NESTED, 'distil')}",
            ours=f"{versus(scores, NESTED, 'random')}; distilled {versus(scores, NESTED, 'distil')}",
            verdict=better(NESTED, "random", "distil"),
            remark="at half the width it is; at a quarter, after so few steps, a random start is ahead",
        ),
        Claim(
            says="consecutive selection is better than uniform",
            theirs=theirs(NESTED, "select-uniform"),
            ours=versus(scores, NESTED, "select-uniform"),
            verdict=better(NESTED, "select-uniform"),
            remark="seeds differ by more than the two do; importance is far ahead of both at half, and far behind at a quarter",
        ),
        Claim(
            says="fewer sizes in a run are slightly better for each",
            theirs="63.1 for one, 62.5 for two (0.4×); 60.0 and 58.6 with narrower MLPs",
            ours=f"{scores[ONE_SIZE]['1/2']} for one, {scores[NESTED]['1/2']} for two (1/2)",
            verdict=all_above([(scores[ONE_SIZE]["1/2"], scores[NESTED]["1/2"])]),
            remark="seeds differ by more than that",
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
            "python benchmarks/width.py … --seed 1 …; python benchmarks/papers/nml_claims.py … --seed 1; and so for 2",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=max(len(seeds) for sizes in measured["labels"].values() for seeds in sizes.values()),
        claims=claims,
        tables=(aligned_table(measured), together_table(measured), labels_table(scores)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--aligned", metavar="FOLDER")
    parser.add_argument("--labels", nargs="+", default=[], metavar="FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    add_origin(parser)
    options = parser.parse_args()
    if options.aligned or options.labels:
        measured = read_measured(NAME)
        if options.aligned:
            add_aligned(measured["aligned"], options.aligned, options.seed)
        for place in options.labels:
            add_labels(measured["labels"], place, options.seed)
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()
