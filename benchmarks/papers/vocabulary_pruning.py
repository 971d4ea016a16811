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

from evidence import Claim, Figure, Figures, Row, figure, gap, merge, pick, table

from trundle.report.markup import _around, _Axis, _Plot

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
MEASURED = {
    "all-MiniLM-L6-v2": "MiniLM 23M",
    "modernbert-shape": "ModernBERT-base's shape 149M, random weights",
}
"""The models whose cost was measured, and what the page calls them."""
SIZES = {"parameters": "parameters", "storage_bytes": "on disk", "memory_bytes": "memory"}
SWEPT = {"tfidf+cluster": "tf-idf + clusters", "tfidf": "tf-idf", "random": "random"}
"""The methods in the figure, and what it calls them."""
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#444}.ground{fill:#fff}"
    ".rule,.stub{stroke:#e4e4e4}.base{stroke:#888}"
    ".line{fill:none;stroke-width:2}.c0{fill:#1f6fb2}.c1{fill:#c2410c}.c2{fill:#666}"
    ".line.c0{stroke:#1f6fb2;fill:none}.line.c1{stroke:#c2410c;fill:none}.line.c2{stroke:#666;fill:none}"
    "@media (prefers-color-scheme:dark){text{fill:#c8c8c8}.ground{fill:#0d1117}.rule,.stub{stroke:#30363d}}"
)
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
        model = {"model": options.model or Path(content["model"]).name}
        merge(figures["cost"], [model | row for row in content["rows"]], ("model", "method"))
        merge(figures["cost_conditions"], [model | content["conditions"]], ("model",))
    else:
        raise SystemExit(f"vocabulary takes glue-PERCENT, kept-PERCENT, cuts, tokens and cost, not {what}")


def by_seed(scores: Scores, method: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the mean over tasks of each seed that all of them have."""
    return [statistics.fmean(run) for run in zip(*(scores[method, task] for task in tasks), strict=False)]


def gains(scores: Scores, better: str, worse: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the difference of two methods by seed; both runs of a seed see the same rows in one order."""
    runs = (by_seed(scores, method, tasks) for method in (better, worse))
    return [one - other for one, other in zip(*runs, strict=True)]


def _savings(figures: Figures, model: str, called: str) -> Claim:
    """What a fifth fewer parameters save of one model."""
    whole, cut = (pick(figures["cost"], model=model, method=name)[0] for name in ("whole", CUT))
    conditions = pick(figures["cost_conditions"], model=model)[0]
    paper = {row["what"]: row for row in figures["paper_cost"]}
    times = {kind: [one / other for one, other in zip(cut[kind], whole[kind], strict=True)] for kind in TIMED}
    return Claim(
        says="smaller, and at most 5% slower",
        paper=", ".join(f"{name} {_ratio(paper[what])}" for what, name in SIZES.items())
        + f", time {_ratio(paper['short'])}",
        here=", ".join(f"{name} {cut[what] / whole[what]:.3f}×" for what, name in SIZES.items())
        + "".join(f", {kind} texts {spread_of(one)}" for kind, one in times.items()),
        scale=f"{called}; one {conditions['processor']} thread",
        gaps=[
            gap(figure(100 * (SLOWER - ratio) for ratio in one), 0.0, f"{kind} texts:")
            for kind, one in times.items()
        ],
        unit="round",
        command="C",
    )


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
        *(
            _savings(figures, model, called)
            for model, called in MEASURED.items()
            if pick(figures["cost"], model=model)
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


def sweep(figures: Figures) -> dict[str, list[tuple[float, Figure]]]:
    """Return the accuracy of each method in the figure by the percentage of the tokens that were removed."""
    whole = pick(figures["cost"], model=next(iter(MEASURED)), method="whole")[0]
    table_share = whole["embedding_parameters"] / whole["parameters"]
    rows = pick(figures["glue"], task=ONE, characters="all")
    full = figure(max(pick(rows, method=FULL), key=lambda row: len(row["scores"]))["scores"])
    found = {}
    for method in SWEPT:
        points = [(0.0, full)]
        for row in pick(rows, method=method):
            tokens, removed = row.get("tokens"), row.get("removed")
            share = removed / table_share if tokens is None else 100.0 - tokens
            points.append((share, figure(row["scores"])))
        found[method] = sorted(points, key=lambda point: point[0])
    return found


def drawn(figures: Figures) -> str:
    """Draw the sweep."""
    lines = sweep(figures)
    low, high = _around([score.mean for points in lines.values() for _, score in points])
    plot = _Plot(
        title="Accuracy on SST2 against the share of the tokens that were removed",
        across=_Axis(label="tokens removed before fine-tuning", low=0, high=90, write=lambda v: f"{v:.0f}%"),
        up=_Axis(label="accuracy on SST2", low=low, high=high, write=lambda v: f"{v:g}"),
        right=130,
    )
    for number, (method, points) in enumerate(lines.items()):
        plot.line([(share, score.mean) for share, score in points], f"c{number}")
        for share, score in points:
            says = f"{SWEPT[method]}, {share:.0f}% removed: {score}, {score.seeds} seeds"
            plot.dot((share, score.mean), f"c{number}", size=4, stop=False, says=says)
    ends = [(points[-1][1].mean, SWEPT[name], f"c{n}") for n, (name, points) in enumerate(lines.items())]
    plot.names_at_the_end(ends)
    ground = f'<style>{STYLE}</style><rect class="ground" width="100%" height="100%"/>'
    head, inside, rest = plot.svg().partition(">")
    return head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + inside + ground + rest


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
