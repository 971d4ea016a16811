"""The vocabulary paper's three tables with our figures in them, from the figures kept."""

from __future__ import annotations

import statistics
from typing import Any

import vocabulary_paper as paper
from claims import Table

TASKS = ("SST2", "CoLA", "MRPC", "RTE", "STSBenchmark")
LABELS = {
    "cluster": "clusters choose",
    "tfidf": "tf-idf",
    "frequency+cluster": "frequency + clusters",
    "tfidf+cluster": "tf-idf + clusters",
    "decompose": "tf-idf, decompose (ours)",
    "low-rank+sparse": "low-rank + sparse",
}
METHODS = (
    "full",
    "train tokens only",
    "random",
    "cluster",
    "attention",
    "frequency",
    "tfidf",
    "frequency+cluster",
    "tfidf+cluster",
    "decompose",
    "magnitude",
    "low-rank",
    "low-rank+sparse",
)
COSTS = {
    "parameters": "parameters, millions",
    "embedding_parameters": "of these tokens, millions",
    "storage_bytes": "weights on disk, MiB",
    "memory_bytes": "peak memory, MiB",
    "short": "a short text, ms",
    "long": "a long text, ms",
}
MILLION = 1e6
MEBI = 2**20
Scores = dict[tuple[str, str], list[float]]
"""Of the runs, in points, by method and task."""


def shown(values: list[float] | None) -> str:
    if values is None:
        return "–"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def by_seed(scores: Scores, method: str, tasks: tuple[str, ...]) -> list[float]:
    """The mean over tasks, one for each seed."""
    return [statistics.fmean(run) for run in zip(*(scores[method, task] for task in tasks), strict=True)]


def beside(ours: str, theirs: str | None) -> str:
    """Our figure, and the paper's in brackets where it has one."""
    return ours if theirs is None else f"{ours} ({theirs})"


def their_cells(row: paper.GlueRow) -> list[str]:
    """What the paper has of the tasks measured here, their mean, and what share of the full model's that is."""
    mean, full = row.mean_of(TASKS), paper.GLUE["full"].mean_of(TASKS)
    return [*(f"{row.of(task):.1f}" for task in TASKS), f"{mean:.1f}", f"{mean / full:.1%}"]


def glue_table(scores: Scores) -> Table:
    """Table 1: every method of the paper, measured here or not, and ours."""
    full = statistics.fmean(by_seed(scores, "full", TASKS))
    rows = []
    for method in METHODS:
        row, measured = paper.GLUE.get(method), (method, TASKS[0]) in scores
        means = by_seed(scores, method, TASKS) if measured else None
        kept = f"{statistics.fmean(means) / full:.1%}" if means else "–"
        mean = f"{statistics.fmean(means):.1f}" if means else "–"
        ours = [*(shown(scores.get((method, task))) for task in TASKS), mean, kept]
        theirs = their_cells(row) if row else [None] * len(ours)
        cells = map(beside, ours, theirs)
        rows.append((LABELS.get(method, method), *cells, f"{row.mean:.1f}" if row else "–"))
    missing = [LABELS.get(method, method) for method in METHODS if (method, TASKS[0]) not in scores]
    others = [task for task in paper.GLUE_TASKS if task not in TASKS]
    return Table(
        title="After fine-tuning with a fifth of all parameters removed (accuracy; CoLA: Matthews, STSBenchmark: Pearson), 8,000 rows at most, 3 epochs; "
        "in brackets the paper's table 1, ModernBERT with all training rows, low-rank + sparse being LoSparse. "
        f"Not measured here: {', '.join(missing)}; the tasks {', '.join(others)}, which are in the last column",
        columns=("", *TASKS, "mean", "of full", "paper, mean of 8"),
        rows=tuple(rows),
    )


def token_table(tokens: list[dict[str, Any]]) -> Table:
    """Table 2: ours, the paper's in brackets."""
    rows = []
    for row in tokens:
        theirs, halves = paper.TOKENS[row["task"]], (row["train"], row["measured"])
        cells = [f"{half['texts']:,}" if half else "–" for half in halves]
        for key, form in (("tokens", ",d"), ("share", ".1f"), ("top_fifth", ".1f")):
            cells += [
                beside(format(half[key], form) if half else "–", format(getattr(theirs, key)[place], form))
                for place, half in enumerate(halves)
            ]
        unseen = "–" if row["unseen"] is None else f"{row['unseen']:.1f}"
        rows.append((row["task"], *cells, beside(unseen, f"{theirs.unseen:.1f}")))
    return Table(
        title="How unevenly tokens are used, by all-MiniLM-L6-v2's tokenizer; in brackets the paper's table 2, whose shares are of a vocabulary of 30,522 tokens, too, but whose "
        "rows are others: SST2 and Quora (there QQP) are parts here, QNLI has no training rows, test rows are `dev` for RTE and QNLI, and MNLI is missing. Unseen: different tokens of the "
        "test texts that are not in the training texts",
        columns=(
            "",
            "train texts",
            "test texts",
            "tokens, train",
            "tokens, test",
            "% of vocabulary, train",
            "% of vocabulary, test",
            "% by a fifth, train",
            "% by a fifth, test",
            "% unseen",
        ),
        rows=tuple(rows),
    )


def ratios(cost: dict[str, Any], method: str, kind: str) -> list[float]:
    """A model's time as a multiple of the whole one's, one a round."""
    times = {model["method"]: model["milliseconds"][kind] for model in cost["models"]}
    return [mine / first for mine, first in zip(times[method], times["whole"], strict=True)]


def cost_table(cost: dict[str, Any]) -> Table:
    """Table 3: the whole model and two cut ones, with the paper's ratio."""
    models = {model["method"]: model for model in cost["models"]}
    cut = [method for method in models if method != "whole"]
    rows = []
    for key, label in COSTS.items():
        timed = key in ("short", "long")
        whole, pruned = paper.COST["milliseconds" if timed else key]
        if timed:
            middle = {name: statistics.median(model["milliseconds"][key]) for name, model in models.items()}
            times = {name: statistics.fmean(ratios(cost, name, key)) for name in cut}
            spread = {name: f" ± {statistics.stdev(ratios(cost, name, key)):.3f}" for name in cut}
        else:
            unit = MILLION if "parameters" in key else MEBI
            middle = {name: model[key] / unit for name, model in models.items()}
            times = {name: middle[name] / middle["whole"] for name in cut}
            spread = dict.fromkeys(cut, "")
        cells = [f"{middle[name]:.2f} ({times[name]:.3f}×{spread[name]})" for name in cut]
        rows.append(
            (
                label,
                f"{middle['whole']:.2f}",
                *cells,
                f"{whole:.2f}",
                f"{pruned:.2f} ({pruned / whole:.3f}×)",
            )
        )
    rounds = len(models["whole"]["milliseconds"]["short"])
    busy = (
        f", which other programs shared ({cost['other_cores']:.1f} of {cost['cores']} cores busy with these)"
    )
    return Table(
        title=f"all-MiniLM-L6-v2 without {cost['removed']}% of its parameters, tokens chosen by SST2's training texts, beside the whole one, in turns, {rounds} rounds. "
        "The paper's are ModernBERT on a GPU, its memory that of the GPU and its time one figure; here memory is that of the whole process, libraries and all, and time is processor time of one "
        f"thread of an ARM processor{busy if cost['other_cores'] else ''}, torch {cost['torch'].partition('+')[0]}; ± over rounds",
        columns=(
            "",
            "whole",
            *(LABELS[method] for method in cut),
            "paper, whole",
            "paper, tf-idf + clusters",
        ),
        rows=tuple(rows),
    )
