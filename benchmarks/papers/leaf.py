"""LEAF: what students keep of their teacher, batch sizes, losses, shortened vectors, errors and speed."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from evidence import Claim, Figures, Gap, Row, figure, gap, merge, pick, points, read_results, signed

TEACHER, PLAIN, LARGEST, RETRIEVAL = "teacher", "plain", "backbone-all", "retrieval"
OWN, ACROSS, ALL_OWN, ALL_ACROSS = 96.1, 97.7, 95.8, 96.9
"""Tables 1 and 2: shares of the teacher's score on the student's own index and on the teacher's."""
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


def claims(figures: Figures) -> list[Claim]:
    """Return the rows of the paper's table; every student was trained with one seed."""
    return [*_kept(figures), *_trained(figures), *_unsettled(figures)]


def by_kind(figures: Figures, model: str, where: str) -> dict[str, float]:
    """Return the mean score of each kind of task that was scored on this index."""
    found: dict[str, list[float]] = {}
    for row in pick(figures["sets"], model=model):
        if where in row:
            found.setdefault(row["kind"], []).append(row[where])
    return {kind: statistics.fmean(scores) for kind, scores in found.items()}


def _kept(figures: Figures) -> list[Claim]:
    best = pick(figures["students"], student=LARGEST)[0]
    whole, small = (by_kind(figures, model, "own") for model in (TEACHER, PLAIN))
    mixed = small | by_kind(figures, PLAIN, "across")
    own, across = (100 * sum(one.values()) / sum(whole.values()) for one in (small, mixed))
    searches = pick(figures["sets"], model=PLAIN, kind=RETRIEVAL)
    better = [row["task"] for row in searches if row["across"] > row["own"]]
    gained = statistics.fmean(row["across"] - row["own"] for row in searches)
    large, plain = "109M → 23M; 34,170 steps of 512, 953,264 texts", "109M → 20M; 7.5 minutes, the same texts"
    return [
        Claim(
            says="a student of 23M keeps 96.1% of its teacher's retrieval on its own index",
            paper="96.1%",
            here=f"{best['own']:.1f}%",
            scale=large,
            gaps=[gap(figure([best["own"]]), OWN)],
            command="A",
        ),
        Claim(
            says="its queries keep 97.7% on the teacher's index",
            paper="97.7%",
            here=f"{best['across']:.1f}%",
            scale=large,
            gaps=[gap(figure([best["across"]]), ACROSS)],
            command="A",
        ),
        Claim(
            says="the teacher's index serves the student better than its own",
            paper="on 11 of 14 sets",
            here=f"on {len(better)} of {len(searches)} sets",
            scale=plain,
            gaps=[gap(figure([gained]), 0.0)],
            command="A",
        ),
        Claim(
            says="over all kinds of task it keeps 95.8%, with the teacher's index 96.9%",
            paper="95.8%, 96.9% (335M → 23M)",
            here=f"{own:.1f}%, {across:.1f}%",
            scale=plain,
            gaps=[gap(figure([own]), ALL_OWN), gap(figure([across]), ALL_ACROSS)],
            command="A",
        ),
    ]


def _trained(figures: Figures) -> list[Claim]:
    batch, loss, pooling = (
        {row["which"]: row for row in pick(figures["ablations"], what=what)}
        for what in ("batch", "loss", "pooling")
    )
    alone, others = loss["leaf"], [row for which, row in loss.items() if which != "leaf"]
    scale = "109M → 23M; 60,000 texts, validation ℓ2"

    def closer(one: Row, other: Row) -> list[Gap]:
        """How much smaller the first error is, in hundredths."""
        return [gap(figure([100 * other["error"]]), figure([100 * one["error"]]), "ℓ2 × 100:")]

    return [
        Claim(
            says="for the same texts, batches of 16 end closer to the teacher than of 256",
            paper=f"{batch['16']['paper']:.3f} against {batch['256']['paper']:.3f}",
            here=f"{batch['16']['error']:.3f} against {batch['256']['error']:.3f}",
            scale=scale,
            gaps=closer(batch["16"], batch["256"]),
            command="B",
        ),
        Claim(
            says="losses on hidden states do not help (paper: nDCG@10, here: ℓ2)",
            paper=f"{alone['paper']:.1f} alone, {max(row['paper'] for row in others):.1f} with the best",
            here=f"{alone['error']:.3f} alone, {min(row['error'] for row in others):.3f} with the best",
            scale=scale,
            gaps=closer(alone, min(others, key=lambda row: float(row["error"]))),
            missing="TinyBERT's loss as corrected, with its map, and nDCG@10 of all of them",
            command="B",
        ),
        Claim(
            says="mean pooling is better than the first token",
            paper="figure 8",
            here=f"{pooling['mean']['error']:.3f} against {pooling['cls']['error']:.3f}",
            scale=scale,
            gaps=closer(pooling["mean"], pooling["cls"]),
            command="B",
        ),
        Claim(
            says="linear decay is the best schedule; queries matter more than documents",
            paper="figures 9 and 4",
            here="–",
            scale=scale,
            missing="the rows themselves: `--schedule`, `--query-weight`",
            command="B",
        ),
    ]


def _unsettled(figures: Figures) -> list[Claim]:
    """Claims that these figures can't decide, whatever their number."""
    rows = {(row["dimensions"], row["precision"]): row for row in figures["shortened"]}
    shown = ((768, "int8"), (256, "float32"), (128, "binary"))
    trained = [row for row in figures["students"] if row["error"] < TRAINED]
    errors = [row["error"] for row in trained]
    along = [statistics.correlation(errors, [row[where] for row in trained]) for where in ("mean", "across")]
    _, student, shipped = dict.fromkeys(row["model"] for row in figures["speed"])
    speeds = {(row["model"], row["texts"]): row["ratio"] for row in figures["speed"]}

    def faster(model: str) -> str:
        return ", ".join(f"{speeds[model, kind]:.1f}×" for kind in FASTER)

    return [
        Claim(
            says="short and quantised vectors of the student degrade like the teacher's",
            paper="nearly identical (figure 6)",
            here="; ".join(
                f"{way[0]} × {way[1]} {rows[way]['student']:.1f}%, teacher {rows[way]['teacher']:.1f}%"
                for way in shown
            ),
            scale="109M → 20M; four retrieval sets",
            missing="a teacher that was trained for short vectors; all-mpnet-base-v2 was not",
            command="C",
        ),
        Claim(
            says="the smaller the error, the better the retrieval",
            paper="a falling line (figure 7)",
            here=signed(f"correlation {along[0]:.2f} on their own index, {along[1]:.2f} on the teacher's"),
            scale=f"{len(trained)} students of 11 – 46M",
            missing="checkpoints of one training; these are different students",
            command="A",
        ),
        Claim(
            says="a student of 23M encodes documents 6.5 and queries 7.3 times as fast",
            paper="6.5×, 7.3×",
            here=f"{faster(student)}; in int4 and int8 {faster(shipped)}",
            scale="109M → 20M; one ARM thread",
            missing="both models in ONNX Runtime as in the paper; the teacher ran in torch",
            command="D",
        ),
    ]
