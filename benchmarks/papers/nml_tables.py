"""NML's tables with ours beside them, out of the figures that were kept."""

from __future__ import annotations

from typing import Any

from claims import Figure, Table, figure

ROW = "nested-mlp"
"""What stands beside the paper's table 2: the sizes whose MLPs are narrower, too."""
WHOLE = "1"
STUDENTS = ("1/2", "1/4")
TEACHER, NESTED_TEACHER = 81.55, 81.90
SMALLEST = {"1/2": ("0.3×", 62.22), "1/4": ("0.1×", 59.63)}
"""Table 2: MLPs narrower, too, after fine-tuning further, two sizes in one run."""
PAPER = {
    "tuned": {WHOLE: 81.55},
    "select-consecutive": {WHOLE: 81.90, "1/2": 62.53, "1/4": 54.16},
    "half-alone": {WHOLE: 81.29, "1/2": 63.07},
    "select-uniform": {WHOLE: 81.32, "1/2": 61.64, "1/4": 53.76},
    "further-consecutive": {"1/2": 64.76, "1/4": 58.98},
    "base": {"1/2": 63.45, "1/4": 50.69},
    "from-tuned": {"1/2": 63.58, "1/4": 54.44},
    "distil": {"1/2": 49.43},
    "random": {"1/2": 49.11, "1/4": 46.26},
}
"""Tables 1, 3, 4 and 5: mean of STS at 1×, 0.4× and 0.2×."""
ALIGNED_ROWS = {
    "nested-mlp": "nested with MLPs",
    "alone-mlp": "the same, each size by itself",
    "nested": "nested, MLPs as they were",
    "alone": "the same, each size by itself",
}
ROWS = {
    "tuned": "the whole model alone",
    "select-importance": "nested, by importance (ours)",
    "select-consecutive": "nested, consecutive (the paper's), λ 0.9",
    "lambda-0.5": "the same, λ 0.5",
    "lambda-1.0": "the same, λ 1: the whole model counts for nothing",
    "half-alone": "the same, λ 0.9, half the width only",
    "select-uniform": "nested, uniform",
    "select-rotary": "nested, rotary pairs",
    "further-consecutive": "nested, consecutive, then trained on",
    "further-importance": "nested by importance, then trained on",
    "base": "consecutive selection, then trained",
    "from-tuned": "the same from the trained model",
    "distil": "random start, distilled from the trained model",
    "random": "random start, trained",
}
Scores = dict[str, dict[str, Figure]]
"""STS by row and size."""


def labelled_scores(measured: dict[str, Any]) -> Scores:
    return {
        row: {size: figure(seeds.values()) for size, seeds in sizes.items()}
        for row, sizes in measured["labels"].items()
    }


def aligned_scores(measured: dict[str, Any], kind: str = "sts") -> Scores:
    return {
        row: {size: figure(seed[kind] for seed in one["seeds"].values()) for size, one in sizes.items()}
        for row, sizes in measured["aligned"]["rows"].items()
    }


def shown(score: Figure | None, whole: float) -> str:
    return "" if score is None else f"{score} ({100 * score.mean / whole:.1f}%)"


def aligned_table(measured: dict[str, Any]) -> Table:
    aligned, scores = measured["aligned"], aligned_scores(measured)[ROW]
    before, sizes = aligned["before"], aligned["rows"][ROW]
    return Table(
        title="Tables 2 and 3, mean of STS: Qwen1.5-0.5B by labels there, all-mpnet-base-v2 by `align` here, "
        f"{aligned['steps']} steps of 128 texts",
        columns=("model", "size, paper", "paper", "size, here", "here"),
        rows=(
            ("whole model, before", "", f"{TEACHER:.1f}", "1×", f"{before['sts']:.1f}"),
            ("whole model, nested", "1×", f"{NESTED_TEACHER:.1f}", "1×", str(scores[WHOLE])),
            *(
                (
                    f"width {size}, MLPs too",
                    smaller,
                    f"{score:.1f} ({100 * score / TEACHER:.0f}%)",
                    f"{sizes[size]['parameters'] / before['parameters']:.2f}×",
                    shown(scores[size], before["sts"]),
                )
                for size, (smaller, score) in SMALLEST.items()
            ),
        ),
    )


def together_table(measured: dict[str, Any]) -> Table:
    aligned = measured["aligned"]
    before, rows = aligned["before"], aligned["rows"]
    sts, own, across = (aligned_scores(measured, kind) for kind in ("sts", "own", "across"))
    return Table(
        title=f"all-mpnet-base-v2 by `align`, {aligned['steps']} steps of 128 texts for every row: STS, searches of the size's own index and "
        "of the model's, as shares of what the model had; one seed where no spread is given",
        columns=("", "size", "parameters", "STS", "own index", "model's index"),
        rows=tuple(
            (
                name,
                size,
                f"{one['parameters'] / before['parameters']:.2f}×",
                shown(sts[row][size], before["sts"]),
                f"{own[row][size]}%",
                f"{across[row][size]}%",
            )
            for row, name in ALIGNED_ROWS.items()
            for size in (WHOLE, *STUDENTS)
            if (one := rows.get(row, {}).get(size))
        ),
    )


def labels_table(scores: Scores) -> Table:
    whole = scores["tuned"][WHOLE].mean
    sizes = (WHOLE, *STUDENTS)
    return Table(
        title="Tables 1, 4 and 5: SmolLM2-135M-Instruct by labels (SNLI), 400 steps of 64 tuples for every row, mean of STS and its share of the whole "
        "model alone, one seed where no spread is given; beside it Qwen1.5-0.5B in the paper (MNLI and SNLI, three epochs)",
        columns=("", "whole", "1/2 (0.45×)", "1/4 (0.21×)", "paper, whole", "paper, 0.4×", "paper, 0.2×"),
        rows=tuple(
            (
                name,
                *(shown(scores.get(row, {}).get(size), whole) for size in sizes),
                *(f"{PAPER[row][size]:.1f}" if size in PAPER.get(row, {}) else "" for size in sizes),
            )
            for row, name in ROWS.items()
            if row in scores or row in PAPER
        ),
    )
