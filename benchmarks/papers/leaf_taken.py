"""New figures for LEAF's section: what the benchmarks wrote, taken over into `measured/leaf.json`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leaf_tables import RETRIEVAL, TEACHER

TEXTS = ("documents", "queries")


def read_rows(folder: str) -> dict[str, dict[str, Any]]:
    """What `benchmarks/leaf.py` wrote of each row."""
    files = sorted(Path(folder).glob("*/result.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def sets_of(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Points of each set on the student's own index, and on the teacher's where there is a search."""
    found: dict[str, dict[str, Any]] = {}
    for one in content["scores"]:
        where = "own" if one["mode"] == "standard" else "across"
        found.setdefault(one["task"], {"kind": one["kind"]})[where] = round(100 * one["score"], 2)
    return found


def mean_of(sets: dict[str, dict[str, Any]], where: str, kind: str | None = None) -> float:
    """Over the sets of one kind, or of all."""
    return statistics.fmean(
        one[where] for one in sets.values() if where in one and kind in (None, one["kind"])
    )


def student_of(content: dict[str, Any], whole: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Its error, and its shares of the teacher's mean and search."""
    sets, search = sets_of(content), mean_of(whole, "own", RETRIEVAL)
    return {
        "parameters": content["parameters"],
        "error": round(content["facts"]["validation"], 3),
        "mean": round(100 * mean_of(sets, "own") / mean_of(whole, "own"), 1),
        "across": round(100 * mean_of(sets, "across", RETRIEVAL) / search, 1),
        "own": round(100 * mean_of(sets, "own", RETRIEVAL) / search, 1),
    }


def take_scores(measured: dict[str, Any], folder: str) -> None:
    """Every set of the teacher and its students, and what follows for each student."""
    rows = {name: one for name, one in read_rows(folder).items() if one.get("scores")}
    measured["sets"] |= {name: sets_of(one) for name, one in rows.items()}
    whole = measured["sets"][TEACHER]
    measured["students"] |= {name: student_of(one, whole) for name, one in rows.items() if name != TEACHER}


def take_ablations(measured: dict[str, Any], folder: str) -> None:
    """Validation errors by batch size, loss and pooling."""
    found = {name: round(one["facts"]["validation"], 3) for name, one in read_rows(folder).items()}
    for name, error in found.items():
        what, _, which = name.partition("-")
        if what in ("batch", "loss"):
            measured["batches" if what == "batch" else "losses"][which] = error
    for name, which in (("batch-32", "mean"), ("pooling-cls", "cls")):
        if name in found:
            measured["pooling"][which] = found[name]


def take_shortened(measured: dict[str, Any], file: str) -> None:
    """Shares in per cent of the same model's score with whole vectors."""
    content = json.loads(Path(file).read_text())
    measured["shortened"] = {
        "sets": content["sets"],
        "whole": {who: round(100 * score, 2) for who, score in content["rows"][0]["scores"].items()},
        "rows": [
            {key: row[key] for key in ("dimensions", "precision", "bytes")}
            | {who: round(100 * share, 1) for who, share in row["kept"].items()}
            for row in content["rows"]
        ],
    }


def take_speed(measured: dict[str, Any], file: str) -> None:
    """Table 9 without the times of each size."""
    content = json.loads(Path(file).read_text())
    models = {
        model: {"runs": kinds["runs"]}
        | {
            kind: {
                key: float(f"{kinds[kind][key]:.4g}") for key in ("per_second", "ratio", "latency", "largest")
            }
            for kind in TEXTS
        }
        for model, kinds in content["models"].items()
    }
    busy = round(content["other_cores"], 1)
    how = {key: content[key] for key in ("rounds", "threads", "time")}
    measured["speed"] = {"models": models, "other_cores": busy} | how


TAKEN: dict[str, Callable[[dict[str, Any], str], None]] = {
    "scores": take_scores,
    "ablations": take_ablations,
    "shortened": take_shortened,
    "speed": take_speed,
}
"""How each option of `leaf_claims.py` is taken over."""
