"""LEAF: what students keep of their teacher, batch sizes, losses, shortened vectors, errors and speed."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from evidence import Claim, Figure, Figures, Gap, Row, figure, gap, merge, pick, points, read_results, signed

TEACHER, PLAIN, LARGEST, RETRIEVAL = "teacher", "plain", "backbone-all", "retrieval"
OWN, ACROSS, ALL_OWN, ALL_ACROSS = 96.1, 97.7, 95.8, 96.9
"""Tables 1 and 2: shares of the teacher's score on the student's own index and on the teacher's."""
TRAINED = 0.7
"""Students with a larger error were hardly trained; the trend is fitted below it."""
STUDENT = "109M → 23M"
CYCLES = "three cycles of 11 epochs"
FASTER = {"documents": 6.5, "queries": 7.3}


def take(figures: Figures, what: str, place: str, options: argparse.Namespace) -> None:
    """Add results: `scores` and `settings` are folders, `shortened` and `speed` files.

    `settings` are rows named WHAT-WHICH of one seed: batch, pooling, schedule, texts (queries, documents,
    both, or more of the queries) and loss. Those that were compared with each other saw the same texts.
    """
    if what == "scores":
        _take_scores(figures, read_results(place))
    elif what == "settings":
        for name, content in read_results(place).items():
            kind, _, which = name.partition("-")
            row = {"what": kind, "which": which, "seed": options.seed, "steps": content["facts"]["steps"]}
            row |= {"texts": content["facts"]["texts"], "error": round(content["facts"]["validation"], 4)}
            if content["models"][0]["scores"]:
                row["search"] = round(points(content["models"][0], RETRIEVAL), 2)
            rows = [row]
            if name == "batch-32":  # the others pool the mean of 32 texts a step too
                rows.append(row | {"what": "pooling", "which": "mean"})
            merge(figures["settings"], rows, ("what", "which", "seed"))
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
        raise SystemExit(f"leaf takes scores, settings, shortened and speed, not {what}")


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


class Settings:
    """Students of several seeds that differ in one setting; students of a seed see the same texts."""

    def __init__(self, figures: Figures, what: str) -> None:
        self._what, self._rows = what, pick(figures["settings"], what=what)

    @property
    def _student(self) -> str:
        """The teacher and the student; losses on hidden states need one of the teacher's family."""
        return "109M → 46M (first 3 layers)" if self._what == "loss" else STUDENT

    @property
    def which(self) -> set[str]:
        """The settings that were measured."""
        return {row["which"] for row in self._rows}

    def of(self, which: str, key: str = "error") -> Figure:
        """Return the error in hundredths, or the mean nDCG@10 of searches in points, over seeds."""
        factor = 100 if key == "error" else 1
        return figure(factor * row[key] for row in pick(self._rows, which=which))

    def gaps(self, better: str, others: Iterable[str], key: str = "error") -> list[Gap]:
        """Return how much better a setting is than others within each seed."""
        found = []
        for other in others:
            one, two = (
                {row["seed"]: row[key] for row in pick(self._rows, which=which)} for which in (better, other)
            )
            factor = -100 if key == "error" else 1
            by_seed = [factor * (one[seed] - two[seed]) for seed in one.keys() & two.keys()]
            found.append(gap(figure(by_seed), 0.0, f"{other}:"))
        return found

    def shown(self, *which: str, key: str = "error") -> str:
        """Show settings side by side."""
        return ", ".join(f"{one} {self.of(one, key)}" for one in which)

    @property
    def scale(self) -> str:
        """The model, the texts and the steps of the training."""
        texts = {row["texts"] for row in self._rows}
        steps = sorted({row["steps"] for row in self._rows})
        length = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} – {steps[-1]:,}"
        cycles = f", {CYCLES}" if self._what == "schedule" else ""
        return f"{self._student}; {max(texts):,} texts, {length} steps{cycles}"


def _trained(figures: Figures) -> list[Claim]:
    paper = {(row["what"], row["which"]): row["paper"] for row in figures["paper_settings"]}
    batches, losses, pooling, rates, texts = (
        Settings(figures, what) for what in ("batch", "loss", "pooling", "schedule", "texts")
    )
    rivals = sorted(losses.which - {"leaf"})
    best, search = max(paper["loss", which] for which in rivals), "nDCG@10 of six searches"

    def compared(
        says: str, published: str, found: Settings, better: str, others: list[str], key: str = "error"
    ) -> Claim:
        return Claim(
            says=says,
            paper=published,
            here=f"{'ℓ2 × 100' if key == 'error' else search}: {found.shown(better, *others, key=key)}",
            scale=found.scale,
            gaps=found.gaps(better, others, key),
            command="B",
        )

    return [
        compared(
            "for the same texts, batches of 16 end closer to the teacher than of 256",
            f"{paper['batch', '16']:.3f} against {paper['batch', '256']:.3f}",
            batches,
            "16",
            ["256"],
        ),
        compared(
            "losses on hidden states do not help",
            f"nDCG@10 {paper['loss', 'leaf']:.1f} alone, {best:.1f} with the best",
            losses,
            "leaf",
            rivals,
            "search",
        ),
        compared("the same by distance to the teacher", "no figures", losses, "leaf", rivals),
        compared("mean pooling is better than the first token", "figure 8", pooling, "mean", ["cls"]),
        compared(
            "with few batches an epoch, a constant rate is better than linear decay by epochs",
            "figure 9",
            rates,
            "constant",
            ["leaf"],
        ),
        Claim(
            says="with 100,000 batches an epoch, linear decay is the best schedule",
            paper="figure 9",
            here="–",
            scale=f"{STUDENT}; 562 batches an epoch",
            missing="an epoch of so many batches",
            command="B",
        ),
        compared(
            "queries matter more than documents: of as many texts, queries alone are better to train on",
            "figure 4",
            texts,
            "queries",
            ["documents"],
            "search",
        ),
        compared(
            "it is best to train on both", "figure 4", texts, "both", ["queries", "documents"], "search"
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
