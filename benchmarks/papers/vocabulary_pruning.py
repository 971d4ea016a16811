"""Vocabulary pruning: what a fifth of all parameters costs when tokens are removed, and how tokens are used.

The shares of the paper's table 2 are those of 30,522 tokens (5,416 are 17.74%). That is BERT's uncased
tokenizer, which all-MiniLM-L6-v2 has too, and not ModernBERT's of 50,368 tokens. So its counts can be
compared with ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from evidence import Claim, Figures, Row, figure, gap, merge, pick, table

TASKS = ("SST2", "CoLA", "MRPC", "RTE")
ONE, FULL, CUT, TUNED = "SST2", "full", "tfidf+cluster", "attention"
KEPT, TOP, SLOWER = 97.6, 80, 1.05
"""The share of the score and of the occurrences in the claims; a time ratio that counts as no slower."""
SCALE = "MiniLM 23M; 4 tasks, at most 8,000 rows, 3 epochs"
SEVERE = 23
"""The paper's recipe keeps this percentage of the tokens."""
GLUE_KEY = ("removed", "tokens", "task", "method", "characters")
CUT_KEY = ("model", "domain", "score", "oov", "characters", "removed", "align")
TIMED = ("short", "long")
COST = (("cost", "method"), ("paper_cost", "what"))
SIZES = {"parameters": "parameters", "storage_bytes": "on disk", "memory_bytes": "memory"}
Scores = dict[tuple[str, str], list[float]]
"""Points of each seed by method and task."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add results of `vocabulary.py`: `glue-PERCENT` is a folder, `cuts`, `tokens` and `cost` are files.

    So is `kept-PERCENT`, where the percentage is that of the tokens that were kept.
    """
    kind, _, percent = what.partition("-")
    if percent:
        level = {"glue": {"removed": int(percent)}, "kept": {"tokens": int(percent)}}[kind]
        for file in sorted(Path(place).glob("*.json")):
            cell = json.loads(file.read_text())
            by_method = {cell["method"]: cell["scores"]}
            if cell.get("full_scores"):
                by_method[FULL] = cell["full_scores"]
            for method, runs in by_method.items():
                row: Row = level | {"task": cell["task"], "method": method}
                row |= {key: cell[key] for key in ("characters", "measured_rows")}
                row["scores"] = [round(100 * scores[cell["measure"]], 2) for scores in runs]
                merge(figures["glue"], [row], GLUE_KEY)
        return
    content = json.loads(Path(place).read_text())
    if what == "cuts":
        model = {"model": options.model or Path(content["model"]).name}
        rows = [model | {key: row[key] for key in (*CUT_KEY[1:], "retention")} for row in content["rows"]]
        merge(figures["cuts"], rows, CUT_KEY)
    elif what == "tokens":
        figures["tokens"] = content["rows"]
    elif what == "cost":
        figures["cost"], figures["cost_conditions"] = content["rows"], [content["conditions"]]
    else:
        raise SystemExit(f"vocabulary takes glue-PERCENT, kept-PERCENT, cuts, tokens and cost, not {what}")


def by_seed(scores: Scores, method: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the mean over tasks of each seed that all of them have."""
    return [statistics.fmean(run) for run in zip(*(scores[method, task] for task in tasks), strict=False)]


def gains(scores: Scores, better: str, worse: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the difference of two methods by seed; both runs of a seed see the same rows in one order."""
    runs = (by_seed(scores, method, tasks) for method in (better, worse))
    return [one - other for one, other in zip(*runs, strict=True)]


def ratios(figures: Figures, method: str, kind: str) -> list[float]:
    """Return the time of a cut model as a multiple of the full model's, one per round."""
    mine, whole = (pick(figures["cost"], method=name)[0][kind] for name in (method, "whole"))
    return [one / other for one, other in zip(mine, whole, strict=True)]


def spread_of(times: list[float]) -> str:
    """Show the mean and the standard deviation of ratios."""
    return f"{statistics.fmean(times):.3f}× ± {statistics.stdev(times):.3f}"


def by_method(figures: Figures, removed: int | None, tokens: int | None = None) -> Scores:
    """Return the scores of all seeds with this share of all parameters removed, or of all tokens kept."""
    rows = pick(figures["glue"], removed=removed, tokens=tokens, characters="all")
    return {(row["method"], row["task"]): row["scores"] for row in rows}


def claims(figures: Figures) -> list[Claim]:
    """Return the rows of the paper's table."""
    fifth, more = (by_method(figures, removed) for removed in (20, 45))
    methods = {row["method"]: row for row in figures["methods"]}
    theirs = {name: row["paper"]["mean"] for name, row in methods.items() if "paper" in row}
    means = {name: statistics.fmean(by_seed(fifth, name)) for name in methods if (name, ONE) in fifth}
    tops = [row["top_fifth"] for row in pick(figures["tokens"], rows="train")]
    their_tops = [row["top_fifth"] for row in pick(figures["paper_tokens"], rows="train")]
    models, paper = ({row[key]: row for row in figures[rows]} for rows, key in COST)
    left = {what: models[CUT][what] / models["whole"][what] for what in SIZES}
    times = {kind: ratios(figures, CUT, kind) for kind in TIMED}

    return [
        *_at_severity(by_method(figures, None, SEVERE), theirs),
        Claim(
            says="it is better than low-rank + sparse matrices (LoSparse) at the same size",
            paper=f"{theirs[CUT]} against {theirs['low-rank+sparse']}",
            here=f"{means[CUT]:.1f} against {means['low-rank+sparse']:.1f}",
            scale=SCALE,
            gaps=[gap(figure(gains(fifth, CUT, "low-rank+sparse")), 0.0)],
            missing="LoSparse as published: it prunes step by step, here it is done at once",
            command="A",
        ),
        Claim(
            says="tf-idf selects better than chance",
            paper=f"{theirs['tfidf']} against {theirs['random']}",
            here=f"{figure(more['tfidf', ONE])} against {figure(more['random', ONE])}, 45% removed",
            scale="MiniLM 23M; SST2, 8,000 rows",
            gaps=[gap(figure(gains(more, "tfidf", "random", (ONE,))), 0.0)],
            command="B",
        ),
        Claim(
            says="a fifth of a task's tokens makes up 80% of all occurrences",
            paper=f"{min(their_tops):.1f} to {max(their_tops):.1f}%",
            here=f"{min(tops):.1f} to {max(tops):.1f}%",
            scale="BERT's uncased tokenizer; 5 tasks",
            gaps=[gap(figure(tops), TOP)],
            unit="task",
            command="C",
        ),
        Claim(
            says="smaller, and at most 5% slower",
            paper=", ".join(f"{name} {_ratio(paper[what])}" for what, name in SIZES.items())
            + f", time {_ratio(paper['short'])}",
            here=", ".join(f"{name} {left[what]:.3f}×" for what, name in SIZES.items())
            + "".join(f", {kind} texts {spread_of(one)}" for kind, one in times.items()),
            scale="MiniLM 23M; one ARM thread",
            gaps=[
                gap(figure(100 * (SLOWER - ratio) for ratio in one), 0.0, f"{kind} texts:")
                for kind, one in times.items()
            ],
            unit="round",
            command="C",
        ),
    ]


def _compared(scores: Scores, *methods: str) -> tuple[str, ...]:
    """Return the tasks that all of these methods were measured on."""
    return tuple(task for task in TASKS if all((method, task) in scores for method in methods))


def _at_severity(scores: Scores, theirs: dict[str, float]) -> list[Claim]:
    """The claims where as much of the token table is removed as in the paper."""
    pairs = zip(by_seed(scores, CUT), by_seed(scores, FULL), strict=True)
    kept = figure(100 * cut / full for cut, full in pairs)

    def versus(says: str, better: str, worse: str) -> Claim:
        one, other = (figure(by_seed(scores, method)) for method in (better, worse))
        return Claim(
            says=says,
            paper=f"{theirs[better]} against {theirs[worse]}",
            here=f"{one} against {other}",
            scale=SCALE,
            gaps=[gap(figure(gains(scores, better, worse)), 0.0)],
            command="D",
        )

    return [
        Claim(
            says=f"without {100 - SEVERE}% of the tokens, at least 97.6% of the score is left",
            paper="97.6% (tf-idf + clusters, mean of 8 tasks)",
            here=f"{kept}%",
            scale=SCALE,
            gaps=[gap(kept, KEPT)],
            command="D",
        ),
        versus("clusters for removed tokens help", CUT, "tfidf"),
        versus(f"tf-idf selects better than chance, {SEVERE}% kept", "tfidf", "random"),
        versus(f"tf-idf selects better than attention in a fine-tuned model, {SEVERE}% kept", "tfidf", TUNED),
    ]


def _ratio(row: Row) -> str:
    return f"{row['pruned'] / row['whole']:.3f}×"


def tables(figures: Figures) -> dict[str, str]:
    """Compute the placeholders of the section besides the claims."""
    methods = {row["method"]: row for row in figures["methods"]}
    severe = by_method(figures, None, SEVERE)
    fifth = by_method(figures, 20)
    return {"glue": _glue_table(methods, fifth), "severe": _glue_table(methods, severe)}


def _beside(ours: str, theirs: float | None) -> str:
    return ours if theirs is None else f"{ours} ({theirs:.1f})"


def _glue_table(methods: dict[str, Row], scores: Scores) -> str:
    tasks = _compared(scores, FULL)
    full = statistics.fmean(by_seed(scores, FULL, tasks))
    rows = []
    for name, row in methods.items():
        if not set(tasks) <= set(_compared(scores, name)):
            continue
        mean, theirs = statistics.fmean(by_seed(scores, name, tasks)), row.get("paper", {})
        cells = [_beside(str(figure(scores[name, task])), theirs.get(task)) for task in tasks]
        last = f"{theirs['mean']:.1f}" if theirs else "–"
        rows.append(" | ".join([row["label"], *cells, f"{mean:.1f}", f"{mean / full:.1%}", last]))
    return table(" | ".join(["", *tasks, "mean", "of full", "paper, mean of 8"]), rows)
