"""The vocabulary paper's table 1 in small: what a fifth of all parameters costs when they are taken from the vocabulary.

    python benchmarks/papers/vocabulary_claims.py
    python benchmarks/papers/vocabulary_claims.py --glue 20=GLUE 45=GLUE45 --cuts FILE… --model all-MiniLM-L6-v2

Prints the section about this paper. `--glue` takes over folders that `benchmarks/glue.py` wrote, each after the share of all
parameters that went, and `--cuts` what `benchmarks/vocabulary.py` wrote.
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
    Verdict,
    add_origin,
    judged,
    markdown,
    merged,
    read_measured,
    write_measured,
)

NAME = "vocabulary"
MODEL = "all-MiniLM-L6-v2"
TASKS = ("SST2", "CoLA", "MRPC", "RTE", "STSBenchmark")
ONE = "SST2"
FIFTH, MORE = 20, 45
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
KEPT_SHARE = 97.6
GLUE_KEY = ("removed", "task", "method", "characters")
CUT_KEY = ("model", "domain", "score", "oov", "characters", "removed", "align")
CHARACTERS, LATER = "all", "auto"
"""What stood when most figures of this page were taken, and the default since."""
Scores = dict[tuple[str, str], list[float]]
"""Of the runs, in points, by method and task."""


def read_glue(folder: str, removed: int) -> list[dict[str, Any]]:
    found = (json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json")))
    return [
        {"removed": removed}
        | {key: cell[key] for key in ("task", "method", "characters", "measured_rows")}
        | {"scores": [round(100 * scores[cell["measure"]], 2) for scores in cell["scores"]]}
        for cell in found
    ]


def read_cuts(file: str, model: str) -> list[dict[str, Any]]:
    keys = (*CUT_KEY[1:], "retention")
    return [
        {"model": model} | {key: row[key] for key in keys}
        for row in json.loads(Path(file).read_text())["rows"]
    ]


def at(cells: list[dict[str, Any]], removed: int, characters: str = CHARACTERS) -> Scores:
    return {
        (cell["method"], cell["task"]): cell["scores"]
        for cell in cells
        if (cell["removed"], cell["characters"]) == (removed, characters)
    }


def shown(values: list[float] | None) -> str:
    if values is None:
        return "–"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}"


def by_seed(scores: Scores, method: str, tasks: tuple[str, ...]) -> list[float]:
    """The mean over tasks, one for each seed."""
    return [statistics.fmean(run) for run in zip(*(scores[method, task] for task in tasks), strict=True)]


def told(scores: Scores, better: str, worse: str, tasks: tuple[str, ...] = TASKS) -> Verdict:
    """By two standard errors of the difference of the means over tasks, from seed to seed."""
    runs = [by_seed(scores, method, tasks) for method in (better, worse)]
    if min(map(len, runs)) < 2:
        return "can't tell"
    error = sum(statistics.variance(run) / len(run) for run in runs) ** 0.5
    difference = statistics.fmean(runs[0]) - statistics.fmean(runs[1])
    return "can't tell" if abs(difference) <= 2 * error else judged(difference > 0)


def glue_table(scores: Scores, means: dict[str, float]) -> Table:
    return Table(
        title="After fine-tuning with a fifth of all parameters removed (accuracy; CoLA: Matthews, STSBenchmark: Pearson), 8,000 rows at most, 3 epochs",
        columns=("", *TASKS, "mean", "of full"),
        rows=tuple(
            (
                LABELS.get(method, method),
                *(shown(scores[method, task]) for task in TASKS),
                f"{means[method]:.1f}",
                f"{100 * means[method] / means['full']:.1f}%",
            )
            for method in METHODS
        ),
    )


def evidence() -> Evidence:
    """All there is about this paper, from the figures kept."""
    measured = read_measured(NAME)
    fifth, more = (at(measured["glue"], removed) for removed in (FIFTH, MORE))
    later = at(measured["glue"], MORE, LATER)
    means = {method: statistics.fmean(by_seed(fifth, method, TASKS)) for method in METHODS}
    shares = {method: 100 * means[method] / means["full"] for method in METHODS}
    kept = {
        (row["domain"], row["oov"]): 100 * row["retention"]
        for row in measured["cuts"]
        if (row["model"], row["score"], row["characters"], row["align"]) == (MODEL, "tfidf", CHARACTERS, 0)
        and round(100 * row["removed"]) == FIFTH
    }
    domains = sorted({domain for domain, _ in kept})
    most = Table(
        title=f"{ONE} with {MORE}% removed, trained alike",
        columns=("", "accuracy"),
        rows=tuple(
            (LABELS.get(method, method) + ending, shown(scores[method, ONE]))
            for scores, ending in ((more, ""), (later, f", `--characters {LATER}`"))
            for method in METHODS
            if (method, ONE) in scores
        ),
    )
    claims = (
        Claim(
            says="a fifth of all parameters less leaves 97.6% of the score",
            theirs="97.6% (tf-idf + clusters, mean of GLUE)",
            ours=f"{shares['tfidf+cluster']:.1f}%, {shares['decompose']:.1f}% with decompose; without any training "
            + ", ".join(f"{kept[domain, 'decompose']:.1f}% ({domain})" for domain in domains)
            + " with decompose",
            verdict=judged(shares["tfidf+cluster"] >= KEPT_SHARE),
            remark="a fifth is mild for MiniLM, half of which is vocabulary",
        ),
        Claim(
            says="clusters for lost tokens help",
            theirs="+1.9 points",
            ours=f"{means['tfidf+cluster'] - means['tfidf']:+.1f} points at a fifth, "
            f"{statistics.fmean(more['tfidf+cluster', ONE]) - statistics.fmean(more['tfidf', ONE]):+.1f} at {MORE}% ({ONE}); "
            f"without training {kept['STSBenchmark', 'cluster']:.1f}% of STSBenchmark "
            f"against {kept['STSBenchmark', 'unk']:.1f}% as unknown and {kept['STSBenchmark', 'decompose']:.1f}% with decompose".replace(
                "-", "−"
            ),
            verdict=told(fifth, "tfidf+cluster", "tfidf"),
        ),
        Claim(
            says="it does better than low-rank + sparse matrices at the same size",
            theirs="82.4 against 81.0",
            ours=f"{means['tfidf+cluster']:.1f} against {means['low-rank+sparse']:.1f}",
            verdict=told(fifth, "tfidf+cluster", "low-rank+sparse"),
            remark="theirs is pruned step by step, ours at once",
        ),
        Claim(
            says="tf-idf chooses better than chance",
            theirs="",
            ours=f"{shown(more['tfidf', ONE])} against {shown(more['random', ONE])} at {MORE}% ({ONE})",
            verdict=told(more, "tfidf", "random", (ONE,)),
            remark="at a fifth nothing of a task's own texts is lost, whoever chooses",
        ),
    )
    glue = f"python benchmarks/glue.py {MODEL} --data . --characters {CHARACTERS} --seeds 0 1 2 --rows 8000"
    return Evidence(
        paper="Words That Matter: Vocabulary Pruning in ModernBERT",
        method="Vocabulary pruning: vocabulary, finetune",
        commands=(
            f"{glue} --tasks {' '.join(TASKS)} --at-once 4 -o glue",
            f"{glue} --tasks SST2 --methods random tfidf tfidf+cluster decompose --removed 45 --at-once 4 -o glue45",
            f"python benchmarks/glue.py {MODEL} --data . --characters {LATER} --seeds 0 1 2 --rows 8000 "
            "--tasks SST2 --methods tfidf decompose --removed 45 -o glue45-auto",
            f"python benchmarks/vocabulary.py {MODEL} --data . --characters {CHARACTERS} --scores tfidf --removed 20 35 --align 300 -o cuts.json",
            "python benchmarks/papers/vocabulary_claims.py --glue 20=glue 45=glue45 45=glue45-auto --cuts cuts.json --hardware … --versions …",
        ),
        hardware=measured["hardware"],
        versions=measured["versions"],
        seeds=max(len(scores) for scores in fifth.values()),
        claims=claims,
        tables=(glue_table(fifth, means), most),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glue", nargs="+", default=[], metavar="PERCENT=FOLDER")
    parser.add_argument("--cuts", nargs="+", default=[], metavar="FILE")
    parser.add_argument("--model", default=MODEL, help="whose cuts these are")
    add_origin(parser)
    options = parser.parse_args()
    if options.glue or options.cuts:
        measured = read_measured(NAME)
        folders = [one.partition("=") for one in options.glue]
        cells = [cell for percent, _, folder in folders for cell in read_glue(folder, int(percent))]
        cuts = [row for file in options.cuts for row in read_cuts(file, options.model)]
        measured["glue"] = merged(measured["glue"], cells, GLUE_KEY)
        measured["cuts"] = merged(measured["cuts"], cuts, CUT_KEY)
        write_measured(NAME, measured, options)
    print(markdown(evidence()))


if __name__ == "__main__":
    main()
