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

from evidence import CONFIDENCE, Figures, Row, Verdict, figure, judged, merge, pick, table

TASKS = ("SST2", "CoLA", "MRPC", "RTE", "STSBenchmark")
ONE, FULL, CUT = "SST2", "full", "tfidf+cluster"
KEPT, TOP, SLOWER = 97.6, 80, 1.05
"""The share of the score and of the occurrences in the claims; a time ratio that counts as no slower."""
GLUE_KEY = ("removed", "task", "method", "characters")
CUT_KEY = ("model", "domain", "score", "oov", "characters", "removed", "align")
TIMED = ("short", "long")
Scores = dict[tuple[str, str], list[float]]
"""Points of each seed by method and task."""


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add results of `vocabulary.py`: `glue-PERCENT` is a folder, `cuts`, `tokens` and `cost` are files."""
    if what.startswith("glue-"):
        for file in sorted(Path(place).glob("*.json")):
            cell = json.loads(file.read_text())
            row: Row = {"removed": int(what.removeprefix("glue-"))}
            row |= {key: cell[key] for key in ("task", "method", "characters", "measured_rows")}
            row["scores"] = [round(100 * scores[cell["measure"]], 2) for scores in cell["scores"]]
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
        raise SystemExit(f"vocabulary takes glue-PERCENT, cuts, tokens and cost, not {what}")


def by_seed(scores: Scores, method: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the mean over tasks of each seed."""
    return [statistics.fmean(run) for run in zip(*(scores[method, task] for task in tasks), strict=True)]


def gains(scores: Scores, better: str, worse: str, tasks: tuple[str, ...] = TASKS) -> list[float]:
    """Return the difference of two methods by seed; both runs of a seed see the same rows in one order."""
    runs = (by_seed(scores, method, tasks) for method in (better, worse))
    return [one - other for one, other in zip(*runs, strict=True)]


def beyond_chance(differences: list[float]) -> Verdict:
    """Judge whether differences are above zero at 95% confidence."""
    low, high = figure(differences).interval
    return "can't tell" if low <= 0 <= high else judged(low > 0)


def ratios(figures: Figures, method: str, kind: str) -> list[float]:
    """Return the time of a cut model as a multiple of the full model's, one per round."""
    mine, whole = (pick(figures["cost"], method=name)[0][kind] for name in (method, "whole"))
    return [one / other for one, other in zip(mine, whole, strict=True)]


def spread_of(times: list[float]) -> str:
    """Show the mean and the standard deviation of ratios."""
    return f"{statistics.fmean(times):.3f}× ± {statistics.stdev(times):.3f}"


def values(figures: Figures) -> dict[str, str]:
    """Compute every placeholder of the section."""
    fifth, more, later = (
        {
            (row["method"], row["task"]): row["scores"]
            for row in pick(figures["glue"], removed=removed, characters=characters)
        }
        for removed, characters in ((20, "all"), (45, "all"), (45, "auto"))
    )
    methods = {row["method"]: row for row in figures["methods"]}
    means = {name: statistics.fmean(by_seed(fifth, name)) for name in methods if (name, ONE) in fifth}
    theirs = {name: row["paper"]["mean"] for name, row in methods.items() if "paper" in row}
    kept = {
        (row["domain"], row["oov"]): f"{100 * row['retention']:.1f}%"
        for row in pick(figures["cuts"], model="all-MiniLM-L6-v2", score="tfidf", characters="all", align=0)
        if round(100 * row["removed"]) == 20
    }
    domains = sorted({domain for domain, _ in kept})
    tops = [row["top_fifth"] for row in pick(figures["tokens"], rows="train")]
    their_tops = [row["top_fifth"] for row in pick(figures["paper_tokens"], rows="train")]
    most = [
        f"{methods[name]['label']}{ending} | {figure(scores[name, ONE])}"
        for scores, ending in ((more, ""), (later, ", `--characters auto`"))
        for name in methods
        if (name, ONE) in scores
    ]
    return {
        "kept.cluster": f"{100 * means[CUT] / means[FULL]:.1f}%",
        "kept.decompose": f"{100 * means['decompose'] / means[FULL]:.1f}%",
        "untrained": ", ".join(f"{kept[domain, 'decompose']} ({domain})" for domain in domains),
        "clusters.paper": f"{theirs[CUT] - theirs['tfidf']:+.1f}",
        "clusters.fifth": figure(gains(fifth, CUT, "tfidf")).change,
        "clusters.more": figure(gains(more, CUT, "tfidf", (ONE,))).change,
        **{f"sts.{fate}": kept["STSBenchmark", fate] for fate in ("cluster", "unk", "decompose")},
        "sparse.paper": f"{theirs[CUT]} against {theirs['low-rank+sparse']}",
        "sparse.here": f"{means[CUT]:.1f} against {means['low-rank+sparse']:.1f}",
        "chance.paper": f"{theirs['tfidf']} against {theirs['random']}",
        "chance.more": f"{figure(more['tfidf', ONE])} against {figure(more['random', ONE])}",
        "chance.fifth": f"{means['tfidf']:.1f} against {means['random']:.1f}",
        "top.paper": f"{min(their_tops):.1f} to {max(their_tops):.1f}%",
        "top.here": f"{min(tops):.1f} to {max(tops):.1f}% ({len(tops)} tasks)",
        "sure": f"{CONFIDENCE:.0%}",
        "verdict.kept": judged(100 * means[CUT] / means[FULL] >= KEPT),
        "verdict.clusters": beyond_chance(gains(fifth, CUT, "tfidf")),
        "verdict.sparse": beyond_chance(gains(fifth, CUT, "low-rank+sparse")),
        "verdict.chance": beyond_chance(gains(more, "tfidf", "random", (ONE,))),
        "verdict.top": judged(min(tops) >= TOP),
        "not_measured": ", ".join(row["label"] for name, row in methods.items() if name not in means),
        "glue": _glue_table(methods, fifth),
        "most": table(" | accuracy", most),
        "tokens": _token_table(figures),
        "seeds": str(max(len(scores) for scores in fifth.values())),
    } | _cost(figures)


def _beside(ours: str, theirs: str | None) -> str:
    return ours if theirs is None else f"{ours} ({theirs})"


def _glue_table(methods: dict[str, Row], scores: Scores) -> str:
    full = statistics.fmean(by_seed(scores, FULL))
    theirs_full = statistics.fmean(methods[FULL]["paper"][task] for task in TASKS)
    rows = []
    for name, row in methods.items():
        ours, theirs = ["–"] * (len(TASKS) + 2), [None] * (len(TASKS) + 2)  # type: list[str], list[str | None]
        if (name, ONE) in scores:
            mean = statistics.fmean(by_seed(scores, name))
            ours = [*(str(figure(scores[name, task])) for task in TASKS), f"{mean:.1f}", f"{mean / full:.1%}"]
        if paper := row.get("paper"):
            mean = statistics.fmean(paper[task] for task in TASKS)
            theirs = [*(f"{paper[task]:.1f}" for task in TASKS), f"{mean:.1f}", f"{mean / theirs_full:.1%}"]
        last = f"{paper['mean']:.1f}" if paper else "–"
        rows.append(" | ".join([row["label"], *map(_beside, ours, theirs), last]))
    return table(" | ".join(["", *TASKS, "mean", "of full", "paper, mean of 8"]), rows)


def _token_table(figures: Figures) -> str:
    rows = []
    for task in dict.fromkeys(row["task"] for row in figures["tokens"]):
        found = [pick(figures["tokens"], task=task, rows=half) for half in ("train", "measured")]
        ours = [rows[0] if rows else None for rows in found]
        theirs = [pick(figures["paper_tokens"], task=task, rows=half)[0] for half in ("train", "measured")]
        cells = [f"{half['texts']:,}" if half else "–" for half in ours]
        for key, form in (("tokens", ",d"), ("share", ".1f"), ("top_fifth", ".1f")):
            for mine, paper in zip(ours, theirs, strict=True):
                cells.append(_beside(format(mine[key], form) if mine else "–", format(paper[key], form)))
        unseen = ours[1]["unseen"] if ours[1] else None
        cells.append(_beside("–" if unseen is None else f"{unseen:.1f}", f"{theirs[1]['unseen']:.1f}"))
        rows.append(" | ".join([task, *cells]))
    halves = ("tokens", "% of vocabulary", "% by a fifth")
    columns = [f"{name}, {half}" for name in halves for half in ("train", "test")]
    return table(" | ".join(["", "train texts", "test texts", *columns, "% unseen"]), rows)


def _cost(figures: Figures) -> dict[str, str]:
    models = {row["method"]: row for row in figures["cost"]}
    paper = {row["what"]: row for row in figures["paper_cost"]}
    labels = {row["method"]: row["label"] for row in figures["methods"]}
    cut, whole = [name for name in models if name != "whole"], models["whole"]
    own = [labels[name] for name in cut]
    rows = []
    for what, row in paper.items():
        unit = 1e6 if "parameters" in what else 2**20
        cells = []
        for name in cut:
            if what in TIMED:
                spread = spread_of(ratios(figures, name, what))
                cells.append(f"{statistics.median(models[name][what]):.2f} ({spread})")
            else:
                cells.append(f"{models[name][what] / unit:.2f} ({models[name][what] / whole[what]:.3f}×)")
        before = statistics.median(whole[what]) if what in TIMED else whole[what] / unit
        theirs = f"{row['pruned']:.2f} ({row['pruned'] / row['whole']:.3f}×)"
        rows.append(" | ".join([row["label"], f"{before:.2f}", *cells, f"{row['whole']:.2f}", theirs]))
    left = {what: models[CUT][what] / whole[what] for what in ("parameters", "storage_bytes", "memory_bytes")}
    times = {kind: ratios(figures, CUT, kind) for kind in TIMED}
    ends = [figure(one).interval for one in times.values()]
    slow: Verdict = "does not hold here" if any(low > SLOWER for low, _ in ends) else "can't tell"
    verdict = "holds here" if all(high <= SLOWER for _, high in ends) else slow
    how = figures["cost_conditions"][0]
    shared = f", while other programs used {how['other_cores']:.1f} of {how['cores']} cores"
    found = {f"left.{what}": f"{value:.3f}×" for what, value in left.items()}
    found |= {
        f"paper.{what}": f"{paper[what]['pruned'] / paper[what]['whole']:.3f}×" for what in (*left, "short")
    }
    return found | {
        "times": ", ".join(f"{spread_of(one)} ({kind} texts)" for kind, one in times.items()),
        "verdict.slower": "does not hold here" if max(left.values()) >= 1 else verdict,
        "cost": table(" | ".join(["", "full", *own, "paper, full", "paper, tf-idf + clusters"]), rows),
        "removed": str(how["removed"]),
        "rounds": str(len(whole["short"])),
        "cost.how": f"torch {how['torch'].partition('+')[0]}{shared if how['other_cores'] else ''}",
    }
