"""The vocabulary paper's table 1 in small: what a fifth of all parameters costs when they are taken from the vocabulary.

    python benchmarks/papers/vocabulary_claims.py --glue GLUE --more GLUE45 --without-training FILE… --hardware "one H200" --versions torch=2.11.0

Reads what `benchmarks/glue.py` wrote at a fifth (several tasks and seeds) and at more (SST2), and what
`benchmarks/vocabulary.py` wrote.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from claims import Claim, Evidence, Table, Verdict, add_origin, markdown

TASKS = ("SST2", "CoLA", "MRPC", "RTE")
ONE = "SST2"
LABELS = {"tfidf": "tf-idf", "tfidf+cluster": "tf-idf + clusters", "decompose": "tf-idf, decompose (ours)"}
METHODS = (
    "full",
    "random",
    "frequency",
    "tfidf",
    "tfidf+cluster",
    "decompose",
    "magnitude",
    "low-rank",
    "low-rank+sparse",
)
PAPER, PAPER_LOSPARSE = 0.824, 0.810
Cells = dict[tuple[str, str], dict[str, Any]]


def read_glue(folder: str) -> Cells:
    """By method and task."""
    found = (json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json")))
    return {(content["method"], content["task"]): content for content in found}


def by_seed(cells: Cells, method: str, task: str) -> list[float]:
    """The scores of the runs, in points."""
    cell = cells[method, task]
    return [100 * scores[cell["measure"]] for scores in cell["scores"]]


def cell_of(cells: Cells, method: str, task: str) -> str:
    if (method, task) not in cells:
        return "–"
    values = by_seed(cells, method, task)
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def mean_of(cells: Cells, method: str) -> float | None:
    """Over all tasks, in points; None where one is missing."""
    if any((method, task) not in cells for task in TASKS):
        return None
    return statistics.fmean(statistics.fmean(by_seed(cells, method, task)) for task in TASKS)


def told(cells: Cells, better: str, worse: str) -> Verdict:
    """By two standard errors of the difference of the means over all tasks, from seed to seed."""
    runs = []
    for method in (better, worse):
        if any((method, task) not in cells for task in TASKS):
            return "not measured yet"
        runs.append(
            [
                statistics.fmean(run)
                for run in zip(*(by_seed(cells, method, task) for task in TASKS), strict=True)
            ]
        )
    error = sum(statistics.variance(run) / len(run) for run in runs) ** 0.5
    difference = statistics.fmean(runs[0]) - statistics.fmean(runs[1])
    if abs(difference) <= 2 * error:
        return "can't tell"
    return "holds here" if difference > 0 else "does not hold here"


def retained(files: list[str]) -> dict[tuple[str, str, str], float]:
    """Of the score at a fifth, by task, score and what becomes of lost tokens; nothing trained."""
    rows = [row for file in files for row in json.loads(Path(file).read_text())["rows"]]
    return {
        (row["domain"], row["score"], row["oov"]): 100 * row["retention"]
        for row in rows
        if row["removed"] == 0.2 and not row["align"]
    }


def shares_told(better: dict[str, Any], worse: dict[str, Any]) -> Verdict:
    """By two standard errors of the difference of two shares of the same test rows."""
    errors = [one["score"] * (1 - one["score"]) / one["measured_rows"] for one in (better, worse)]
    difference: float = better["score"] - worse["score"]
    if abs(difference) <= 2 * sum(errors) ** 0.5:
        return "can't tell"
    return "holds here" if difference > 0 else "does not hold here"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glue", required=True)
    parser.add_argument("--more", required=True)
    parser.add_argument("--without-training", nargs="+", required=True)
    add_origin(parser)
    options = parser.parse_args()
    fifth, more, kept = read_glue(options.glue), read_glue(options.more), retained(options.without_training)
    means = {method: mean_of(fifth, method) for method in METHODS}
    full = means["full"]

    def share(method: str) -> float | None:
        mean = means[method]
        return None if mean is None or full is None else 100 * mean / full

    table = Table(
        title="After fine-tuning with a fifth of all parameters removed (accuracy; CoLA: Matthews), 8,000 rows at most, 3 epochs",
        columns=("", *TASKS, "mean", "of full"),
        rows=tuple(
            (
                LABELS.get(method, method),
                *(cell_of(fifth, method, task) for task in TASKS),
                "–" if means[method] is None else f"{means[method]:.1f}",
                "–" if (left := share(method)) is None else f"{left:.1f}%",
            )
            for method in METHODS
        ),
    )
    most = Table(
        title=f"{ONE} with 45% removed, 3,000 rows, one epoch, one seed",
        columns=("", "accuracy"),
        rows=tuple(
            (LABELS.get(method, method), cell_of(more, method, ONE))
            for method in METHODS
            if (method, ONE) in more
        ),
    )
    tasks = sorted({task for task, *_ in kept})
    left = share("tfidf+cluster")
    claims = (
        Claim(
            says="a fifth of all parameters less leaves 97.6% of the score",
            theirs="97.6% (tf-idf + clusters, mean of GLUE)",
            ours=("" if left is None else f"{left:.1f}%, {share('decompose'):.1f}% with decompose; ")
            + "without any training "
            + ", ".join(f"{kept[task, 'tfidf', 'decompose']:.1f}% ({task}, decompose)" for task in tasks),
            verdict="not measured yet"
            if left is None
            else "holds here"
            if left >= 97.6
            else "does not hold here",
            remark="a fifth is mild for MiniLM, half of which is vocabulary",
        ),
        Claim(
            says="clusters for lost tokens help",
            theirs="+1.9 points",
            ours=""
            if means["tfidf+cluster"] is None or means["tfidf"] is None
            else f"{means['tfidf+cluster'] - means['tfidf']:+.1f} points; without training "
            f"{kept['STSBenchmark', 'tfidf', 'cluster']:.1f}% against {kept['STSBenchmark', 'tfidf', 'unk']:.1f}% "
            f"of STSBenchmark, {kept['STSBenchmark', 'tfidf', 'decompose']:.1f}% with decompose",
            verdict=told(fifth, "tfidf+cluster", "tfidf"),
        ),
        Claim(
            says="it does better than low-rank + sparse matrices at the same size",
            theirs=f"{100 * PAPER:.1f} against {100 * PAPER_LOSPARSE:.1f}",
            ours=""
            if means["tfidf+cluster"] is None
            else f"{means['tfidf+cluster']:.1f} against {means['low-rank+sparse']:.1f}",
            verdict=told(fifth, "tfidf+cluster", "low-rank+sparse"),
            remark="theirs is pruned step by step, ours at once",
        ),
        Claim(
            says="tf-idf chooses better than chance",
            theirs="",
            ours=f"{100 * more['tfidf', ONE]['score']:.1f} against {100 * more['random', ONE]['score']:.1f} at 45% ({ONE})",
            verdict=shares_told(more["tfidf", ONE], more["random", ONE]),
            remark="at a fifth nothing of a task's own texts is lost, whoever chooses",
        ),
    )
    evidence = Evidence(
        paper="Words That Matter: Vocabulary Pruning in ModernBERT",
        method="Vocabulary pruning: vocabulary, finetune",
        commands=(
            "python benchmarks/glue.py all-MiniLM-L6-v2 --data . --seeds 0 1 2 --rows 8000 -o glue",
            "python benchmarks/glue.py all-MiniLM-L6-v2 --data . --tasks SST2 --rows 3000 --epochs 1 --precision bf16 --removed 45 -o glue45",
            "python benchmarks/vocabulary.py all-MiniLM-L6-v2 --data . --removed 20 -o cuts.json",
            "python benchmarks/papers/vocabulary_claims.py --glue glue --more glue45 --without-training cuts.json …",
        ),
        hardware=options.hardware,
        versions=dict(options.versions),
        seeds=max(len(cell["seeds"]) for cell in fifth.values()),
        claims=claims,
        tables=(table, most),
    )
    evidence.keep("vocabulary")
    print(markdown(evidence))


if __name__ == "__main__":
    main()
