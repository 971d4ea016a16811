"""LEAF's tables in small: batch size, losses, pooling, and how much of its teacher a student of 23M keeps.

    python benchmarks/papers/leaf_claims.py --scores RESULTS --ablations RESULTS [RESULTS…] --report report.json --hardware "one H200"

Reads the folders that `benchmarks/leaf.py` wrote: rows `teacher` and `--student` with scores, and the rows `batch-…`, `loss-…`, `pooling-cls`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, markdown

BATCHES = {16: 0.4194, 32: 0.4214, 64: 0.4301, 128: 0.4390, 256: 0.4593}
LOSSES = {"leaf": 60.7, "minilm": 54.9, "tinybert": 53.7, "distilbert": 55.3}
SHARED = ("torch", "transformers", "sentence-transformers")


def distances(folders: list[str]) -> dict[str, float]:
    """The validation ℓ2 of every row."""
    files = [file for folder in folders for file in sorted(Path(folder).glob("*/result.json"))]
    return {file.parent.name: json.loads(file.read_text())["facts"]["validation"] for file in files}


def scores(folder: str, row: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((Path(folder) / row / "result.json").read_text())["scores"]
    return found


def mean(found: list[dict[str, Any]], mode: str, kind: str | None = None) -> float:
    """Over the tasks of one kind, or of all."""
    chosen = [one["score"] for one in found if one["mode"] == mode and (kind is None or one["kind"] == kind)]
    return float(sum(chosen) / len(chosen))


def batch_claim(found: dict[str, float]) -> tuple[Claim, Table]:
    ours = {size: found[f"batch-{size}"] for size in BATCHES}
    rows = tuple((str(size), f"{theirs:.3f}", f"{ours[size]:.3f}") for size, theirs in BATCHES.items())
    table = Table(
        title="Table 3, validation ℓ2 after equally many texts",
        columns=("batch", "paper", "here"),
        rows=rows,
    )
    holds = list(ours.values()) == sorted(ours.values())
    return Claim(
        says="small batches end nearer to the teacher than large ones, for the same texts",
        theirs=f"{BATCHES[16]:.3f} at 16, {BATCHES[256]:.3f} at 256",
        ours=f"{ours[16]:.3f} at 16, {ours[256]:.3f} at 256",
        verdict="holds here" if holds else "does not hold here",
        remark="per minute on a GPU large batches win",
    ), table


def loss_claim(found: dict[str, float]) -> tuple[Claim, Table]:
    ours = {name: found[f"loss-{name}"] for name in LOSSES}
    rows = tuple((name, f"{theirs:.1f}", f"{ours[name]:.3f}") for name, theirs in LOSSES.items())
    table = Table(
        title="Table 4, LEAF's loss alone and with another (paper: nDCG@10, higher is better; here: ℓ2, lower is better)",
        columns=("with", "paper", "here"),
        rows=rows,
    )
    best = min(ours, key=lambda name: ours[name])
    return Claim(
        says="losses that look inside both models do not help",
        theirs=f"{LOSSES['leaf']:.1f} alone, {max(LOSSES[name] for name in LOSSES if name != 'leaf'):.1f} with the best of them",
        ours=f"{ours['leaf']:.3f} alone, {min(ours[name] for name in ours if name != 'leaf'):.3f} with the best of them",
        verdict="holds here" if best == "leaf" else "does not hold here",
    ), table


def pooling_claim(found: dict[str, float]) -> Claim:
    mean_pooled, by_first = found["batch-32"], found["pooling-cls"]
    return Claim(
        says="mean pooling is better than the first token",
        theirs="figure 8",
        ours=f"{mean_pooled:.3f} against {by_first:.3f}",
        verdict="holds here" if mean_pooled < by_first else "does not hold here",
    )


def shortened_claim(report: str, run: str) -> Claim:
    """How much of its agreement with whole vectors of the teacher is left when vectors are shortened or rounded."""
    measured = json.loads(Path(report).read_text())["measured"][run]["shortened"][0]["rows"]
    found = {(row["dimensions"], row["precision"]): row["scores"] for row in measured}
    whole = found[max(found)[0], "float32"]

    def left(model: str, dimensions: int, precision: str) -> float:
        return 100 * float(found[dimensions, precision][model]) / float(whole[model])

    forms = ((256, "float32"), (max(found)[0], "int8"), (max(found)[0], "binary"))
    pairs = [tuple(left(model, *form) for model in ("student", "teacher")) for form in forms]
    shown = [f"{student:.0f}% against {teacher:.0f}%" for student, teacher in pairs]
    return Claim(
        says="truncated and quantised vectors of the student fall off like the teacher's",
        theirs="figures 6, 7",
        ours=f"agreement@10 left at 256 dimensions {shown[0]}, as int8 {shown[1]}, as bits {shown[2]}",
        verdict="holds here"
        if all(student > 0.95 * teacher for student, teacher in pairs)
        else "does not hold here",
        remark="in int4; the student falls off less",
    )


def kept_claims(folder: str, student: str) -> tuple[Claim, Claim]:
    whole, small = scores(folder, "teacher"), scores(folder, student)
    standard = 100 * mean(small, "standard") / mean(whole, "standard")
    alone = 100 * mean(small, "standard", "retrieval") / mean(whole, "standard", "retrieval")
    across = 100 * mean(small, "asymmetric", "retrieval") / mean(whole, "standard", "retrieval")
    return Claim(
        says="a student of 23M keeps nearly all of its teacher",
        theirs="96.1% of its retrieval, 97.7% on its index",
        ours=f"{standard:.1f}% of its mean, {alone:.1f}% of its retrieval, {across:.1f}% on its index",
        verdict="holds here" if standard > 96.1 else "does not hold here",
        remark="a sixth of the texts and minutes instead of 100 GPU hours",
    ), Claim(
        says="queries by the student do better on the teacher's index than on its own",
        theirs="+1.6 points of share",
        ours=f"{alone:.1f}% → {across:.1f}%",
        verdict="holds here" if across > alone else "does not hold here",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scores", required=True)
    parser.add_argument("--student", default="backbone-all")
    parser.add_argument("--ablations", nargs="+", required=True)
    parser.add_argument("--report", required=True, help="report.json of a student of the same teacher")
    parser.add_argument("--run", default="flagship", help="which run of the report")
    parser.add_argument("--hardware", required=True)
    options = parser.parse_args()
    found = distances(options.ablations)
    batches, losses = batch_claim(found), loss_claim(found)
    told = scores(options.scores, options.student)[0]["versions"]
    evidence = Evidence(
        paper="LEAF: Knowledge Distillation of Text Embedding Models with Teacher-Aligned Representations",
        method="LEAF: align",
        commands=(
            "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --batch-size 512 -o main backbone-all=…:steps=12000:learning_rate=5e-4:warmup=200",
            "python benchmarks/leaf.py all-mpnet-base-v2 --texts texts --tasks . --sample 60000 --no-scores -o ablations batch-16=…:batch_size=16:steps=7500 …",
            "python benchmarks/papers/leaf_claims.py --scores main --ablations ablations --report flagship/report.json --hardware …",
        ),
        hardware=options.hardware,
        versions={name: told[name] for name in SHARED},
        seeds=1,
        claims=(
            *kept_claims(options.scores, options.student),
            batches[0],
            losses[0],
            pooling_claim(found),
            shortened_claim(options.report, options.run),
        ),
        tables=(batches[1], losses[1]),
    )
    evidence.keep("leaf")
    print(markdown(evidence))


if __name__ == "__main__":
    main()
