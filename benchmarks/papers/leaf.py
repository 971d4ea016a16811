"""LEAF: what students keep of their teacher, batch sizes, losses, shortened vectors, errors and speed."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from evidence import Figures, Row, judged, merge, pick, points, read_results, share, signed, table

TEACHER, PLAIN, LARGEST, RETRIEVAL = "teacher", "plain", "backbone-all", "retrieval"
OWN, ACROSS, ALL_OWN, ALL_ACROSS = 96.1, 97.7, 95.8, 96.9
"""Tables 1 and 2: shares of the teacher's score on the student's own index and on the teacher's."""
SIMILAR = 5.0
"""Two curves are similar where they differ by at most this many points."""
TRAINED = 0.7
"""Students with a larger error were hardly trained; the trend is fitted below it."""
FASTER = {"documents": 6.5, "queries": 7.3}


def take(figures: Figures, what: str, place: str, _options: argparse.Namespace) -> None:
    """Add results: `scores` and `ablations` are folders, `shortened` and `speed` files."""
    if what == "scores":
        _take_scores(figures, read_results(place))
    elif what == "ablations":
        for name, content in read_results(place).items():
            kind, _, which = name.partition("-")
            error = {"error": round(content["facts"]["validation"], 3)}
            rows = [{"what": kind, "which": which} | error]
            rows += [{"what": "pooling", "which": "mean"} | error] if name == "batch-32" else []
            merge(figures["ablations"], rows, ("what", "which"))
    elif what == "shortened":
        content = json.loads(Path(place).read_text())
        full = {who: round(100 * score, 2) for who, score in content["rows"][0]["scores"].items()}
        figures["full_vectors"] = [full | {"sets": content["sets"]}]
        figures["shortened"] = [
            {key: row[key] for key in ("dimensions", "precision", "bytes")}
            | {who: round(100 * kept, 1) for who, kept in row["kept"].items()}
            for row in content["rows"]
        ]
    elif what == "speed":
        content = json.loads(Path(place).read_text())
        figures["speed"], figures["speed_conditions"] = content["rows"], [content["conditions"]]
    else:
        raise SystemExit(f"leaf takes scores, ablations, shortened and speed, not {what}")


def _take_scores(figures: Figures, results: dict[str, Row]) -> None:
    scored = {name: content for name, content in results.items() if content["models"][0]["scores"]}
    for name, content in scored.items():
        sets: dict[str, Row] = {}
        for score in content["models"][0]["scores"]:
            where = "own" if score["mode"] == "standard" else "across"
            row = sets.setdefault(score["task"], {"model": name, "task": score["task"]})
            row |= {"kind": score["kind"], where: round(100 * score["score"], 2)}
        merge(figures["sets"], sets.values(), ("model", "task"))
    whole = scored[TEACHER]["models"][0]
    for name in scored.keys() - {TEACHER}:
        model, search = scored[name]["models"][0], points(whole, RETRIEVAL)
        row = {"student": name, "parameters": model["parameters"]}
        row["error"] = round(scored[name]["facts"]["validation"], 3)
        row["mean"] = round(100 * points(model) / points(whole), 1)
        row["across"] = round(100 * points(model, RETRIEVAL, "asymmetric") / search, 1)
        row["own"] = round(100 * points(model, RETRIEVAL) / search, 1)
        merge(figures["students"], [row], ("student",))


def values(figures: Figures) -> dict[str, str]:
    """Compute every placeholder of the section."""
    found = _kept(figures) | _trained(figures) | _shortened(figures) | _margin(figures) | _speed(figures)
    return found | {
        "searches": _searches_table(figures),
        "kinds": _kinds_table(figures),
        "batches": _ablation_table(figures, "batch", "batch", 3),
        "losses": _ablation_table(figures, "loss", "with", 1),
    }


def by_kind(figures: Figures, model: str, where: str) -> dict[str, float]:
    """Return the mean score of each kind of task that was scored on this index."""
    found: dict[str, list[float]] = {}
    for row in pick(figures["sets"], model=model):
        if where in row:
            found.setdefault(row["kind"], []).append(row[where])
    return {kind: statistics.fmean(scores) for kind, scores in found.items()}


def _kept(figures: Figures) -> dict[str, str]:
    best, plain = (pick(figures["students"], student=name)[0] for name in (LARGEST, PLAIN))
    whole, small = (by_kind(figures, model, "own") for model in (TEACHER, PLAIN))
    mixed = small | by_kind(figures, PLAIN, "across")
    shares = [100 * sum(one.values()) / sum(whole.values()) for one in (small, mixed)]
    teacher = {row["task"]: row["own"] for row in pick(figures["sets"], model=TEACHER)}
    searches = pick(figures["sets"], model=PLAIN, kind=RETRIEVAL)
    better = [row["task"] for row in searches if row["across"] > row["own"]]
    ahead = [row["task"] for row in searches if row["own"] > teacher[row["task"]]]
    behind = [row for row in searches if row["task"] not in ahead]
    fewer = 100 * sum(row["own"] for row in behind) / sum(teacher[row["task"]] for row in behind)
    found = {
        f"{name}.{key}": f"{row[key]:.1f}"
        for name, row in (("best", best), ("plain", plain))
        for key in ("own", "across")
    }
    return found | {
        "ahead": ", ".join(ahead),
        "behind": f"{fewer:.1f}",
        "better": f"on {len(better)} of {len(searches)} sets: {', '.join(better)}",
        "all": f"{shares[0]:.1f}%, {shares[1]:.1f}%",
        "verdict.own": judged(best["own"] >= OWN),
        "verdict.across": judged(best["across"] >= ACROSS),
        "verdict.better": judged(2 * len(better) > len(searches)),
        "verdict.all": judged(shares[0] >= ALL_OWN and shares[1] >= ALL_ACROSS),
    }


def _trained(figures: Figures) -> dict[str, str]:
    batch, loss, pooling = (
        {row["which"]: row for row in pick(figures["ablations"], what=what)}
        for what in ("batch", "loss", "pooling")
    )
    alone, others = loss["leaf"], [row for which, row in loss.items() if which != "leaf"]
    errors = [row["error"] for row in batch.values()]
    return {
        "batch.paper": f"{batch['16']['paper']:.3f} at 16, {batch['256']['paper']:.3f} at 256",
        "batch.here": f"{batch['16']['error']:.3f} at 16, {batch['256']['error']:.3f} at 256",
        "loss.paper": f"{alone['paper']:.1f} alone, {max(row['paper'] for row in others):.1f}",
        "loss.here": f"{alone['error']:.3f} alone, {min(row['error'] for row in others):.3f}",
        "pooling": f"{pooling['mean']['error']:.3f} against {pooling['cls']['error']:.3f}",
        "verdict.batch": judged(errors == sorted(errors)),
        "verdict.loss": judged(alone["error"] < min(row["error"] for row in others)),
        "verdict.pooling": judged(pooling["mean"]["error"] < pooling["cls"]["error"]),
    }


def _shortened(figures: Figures) -> dict[str, str]:
    rows = {(row["dimensions"], row["precision"]): row for row in figures["shortened"]}
    apart = {way: row["student"] - row["teacher"] for way, row in rows.items()}
    most = max(apart, key=lambda way: abs(apart[way]))
    far = [size for (size, precision), gap in apart.items() if precision != "binary" and abs(gap) > SIMILAR]
    full, sizes = max(rows)[0], list(dict.fromkeys(size for size, _ in rows))
    shown = ((full, "int8"), (256, "float32"), (64, "float32"), (full, "binary"), (128, "binary"))
    precisions = list(dict.fromkeys(precision for _, precision in rows))
    vectors = figures["full_vectors"][0]

    def cell(size: int, precision: str) -> str:
        return f"{rows[size, precision]['teacher']:.1f} / {rows[size, precision]['student']:.1f}%"

    return {
        "shortened.here": "; ".join(
            f"{way[0]} × {way[1]} {rows[way]['student']:.1f}% against {rows[way]['teacher']:.1f}%"
            for way in shown
        ),
        "shortened.down_to": str(min(size for size in sizes if not far or size > max(far))),
        "shortened.most": signed(f"{apart[most]:+.1f}") + f" at {most[0]} × {most[1]}",
        "shortened.sets": ", ".join(vectors["sets"]),
        "full.teacher": f"{vectors['teacher']:.1f}",
        "full.student": f"{vectors['student']:.1f}",
        "verdict.shortened": judged(all(abs(gap) <= SIMILAR for gap in apart.values())),
        "shortened": table(
            " | ".join(["dimensions", *precisions]),
            (" | ".join([str(size), *(cell(size, one) for one in precisions)]) for size in sizes),
        ),
    }


def _margin(figures: Figures) -> dict[str, str]:
    """Fit the share that is kept to the error, and extrapolate to the teacher's score."""
    trained = [row for row in figures["students"] if row["error"] < TRAINED]
    errors = [row["error"] for row in trained]
    found, slopes = {"trained": str(len(trained)), "nearest": f"{min(errors):.2f}"}, []
    for where in ("mean", "across"):
        shares = [row[where] for row in trained]
        slopes.append(statistics.correlation(errors, shares))
        slope, start = statistics.linear_regression(errors, shares)
        found |= {f"along.{where}": signed(f"{slopes[-1]:.2f}")}
        found |= {f"meets.{where}": f"{(100 - start) / slope:.2f}"}
    ordered = sorted(figures["students"], key=lambda row: -row["error"])
    found["students"] = table(
        "student | parameters | error | own index | teacher's index",
        (
            f"{row.get('label', row['student'])} | {row['parameters'] / 1e6:.1f}M | {row['error']:.3f} "
            f"| {row['mean']:.1f}% | {row['across']:.1f}%"
            for row in ordered
        ),
    )
    return found | {"verdict.error": judged(all(one < -0.8 for one in slopes))}


def _speed(figures: Figures) -> dict[str, str]:
    whole, student, shipped = dict.fromkeys(row["model"] for row in figures["speed"])
    rows = {(row["model"], row["texts"]): row for row in figures["speed"]}
    how = figures["speed_conditions"][0]

    def lines(kind: str) -> Iterator[str]:
        for row in pick(figures["paper_speed"], texts=kind):
            yield " | ".join([f"paper: {row['model']}", kind, *row["cells"]])
        for row in pick(figures["speed"], texts=kind):
            largest = f"{row['largest']:.0f}" if row["largest"] else "–"
            speeds = f"{row['per_second']:.1f} | {row['ratio']:.1f}× | {1000 * row['latency']:.3g} ms"
            yield f"{row['model']} ({row['runs']}) | {kind} | {speeds} | {largest}"

    def ratios(model: str) -> str:
        return ", ".join(f"{rows[model, kind]['ratio']:.1f}×" for kind in FASTER)

    busy = f"while other work used {how['other_cores']:.1f} of the two cores"
    own = f"CPU time of one thread on ARM Neoverse-N1 cores, {busy}"
    clock = f"{how['threads']} threads on two ARM Neoverse-N1 cores, {busy}"
    return {
        "speed.student": f"{ratios(student)} in {rows[student, 'queries']['runs']}",
        "speed.shipped": f"({rows[shipped, 'queries']['runs']}) {ratios(shipped)}",
        "speed.teacher": rows[whole, "queries"]["runs"],
        "speed.how": own if how["time"] == "own" else clock,
        "speed.rounds": str(how["rounds"]),
        "verdict.speed": judged(all(rows[student, kind]["ratio"] >= one for kind, one in FASTER.items())),
        "speed": table(
            "model | texts | per second | speed-up | shortest latency | largest batch",
            (line for kind in FASTER for line in lines(kind)),
        ),
    }


def _paper(rows: list[Row]) -> str:
    """Show the paper's student on its own index and on the teacher's, where the paper has this row."""
    return " | ".join(share(rows[0][key], rows[0]["teacher"]) for key in ("own", "across")) if rows else " | "


def _searches_table(figures: Figures) -> str:
    models = {PLAIN: "student", "plain-int4": "in four bits"}
    scores = {(row["model"], row["task"]): row for row in figures["sets"]}
    tasks = [row["task"] for row in pick(figures["sets"], model=TEACHER, kind=RETRIEVAL)]

    def row(name: str, chosen: list[str]) -> str:
        def mean(model: str, where: str) -> float:
            return statistics.fmean(scores[model, task][where] for task in chosen)

        whole = mean(TEACHER, "own")
        cells = [share(mean(model, where), whole) for model in models for where in ("own", "across")]
        paper = _paper(pick(figures["paper_searches"], task=name))
        return " | ".join([name, paper, f"{whole:.1f}", *cells])

    ours = [f"{name}, {index} index" for name in models.values() for index in ("own", "teacher's")]
    columns = " | ".join(["", "paper, own index", "paper, teacher's index", "teacher", *ours])
    return table(columns, [*(row(task, [task]) for task in tasks), row("mean", tasks)])


def _kinds_table(figures: Figures) -> str:
    whole, own = (by_kind(figures, model, "own") for model in (TEACHER, PLAIN))
    across = by_kind(figures, PLAIN, "across")
    kinds = [row["kind"] for row in figures["paper_kinds"] if row["kind"] != "mean"]
    rows = []
    for kind in kinds:
        count = len(pick(figures["sets"], model=TEACHER, kind=kind))
        last = share(across[kind], whole[kind]) if kind in across else "the same"
        paper = _paper(pick(figures["paper_kinds"], kind=kind))
        cells = f"{whole[kind]:.1f} | {share(own[kind], whole[kind])} | {last}"
        rows.append(f"{kind} ({count}) | {paper} | {cells}")
    first, *others = (statistics.fmean(one[kind] for kind in kinds) for one in (whole, own, own | across))
    paper = _paper(pick(figures["paper_kinds"], kind="mean"))
    rows.append(" | ".join(["mean of kinds", paper, f"{first:.1f}", *(share(one, first) for one in others)]))
    columns = "paper, own index | paper, teacher's index | teacher | own index | teacher's index"
    return table(f"sets here | {columns}", rows)


def _ablation_table(figures: Figures, what: str, column: str, digits: int) -> str:
    rows = pick(figures["ablations"], what=what)
    lines = (f"{row['which']} | {row['paper']:.{digits}f} | {row['error']:.3f}" for row in rows)
    return table(f"{column} | paper | here", lines)
