"""The files beside a model that steps and the planner leave, and the headers of its weights."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trundle.errors import BadInput
from trundle.measure.pruned_matrix import Alignment, PrunedMatrix
from trundle.report.records import Candidate, Planning, Point, Rung, Training

PLANNING_FILE = "planning.json"
CHOSEN = "chosen"
"""How a plan marks the candidate it was carried out with."""
PRUNED_FILE = "weights.json"
METRICS = {"step", "epoch", "loss", "lr", "validation", "seconds", "texts_per_second"}
POINTS = 400
"""A curve is thinned to so many points: more can't be seen."""

T = TypeVar("T")


def read_side_file(path: Path, make: Callable[[str], T]) -> T | None:
    """What `make` reads in a file, or None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return make(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path} is damaged ({type(error).__name__}: {error}); delete it, or make the folder again"
        ) from error


def read_training(folder: Path, step: str) -> Training | None:
    """The metrics a step left, thinned; None where there are none."""
    training = read_side_file(folder / f"{step}.jsonl", lambda text: _training(step, text))
    return training if training and (training.loss or training.validation) else None


def _training(step: str, text: str) -> Training:
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]

    def points(key: str) -> tuple[Point, ...]:
        found = ((float(row["step"]), float(row[key])) for row in rows if row.get(key) is not None)
        return tuple(point for point in found if math.isfinite(point[1]))

    watched = sorted({key for row in rows for key in row if key not in METRICS})
    return Training(
        step=step,
        loss=thinned(points("loss"), POINTS),
        validation=points("validation"),
        watched={key: points(key) for key in watched},
    )


def thinned(points: Sequence[T], most: int) -> tuple[T, ...]:
    """Evenly spaced ones, the first and the last among them."""
    if len(points) <= most:
        return tuple(points)
    return tuple(points[round(place * (len(points) - 1) / (most - 1))] for place in range(most))


def read_pruned(folder: Path) -> tuple[PrunedMatrix, ...]:
    """Which weights the step weights left."""

    def make(text: str) -> tuple[PrunedMatrix, ...]:
        keys = ("layer", "matrix", "weights", "kept")
        return tuple(PrunedMatrix(**{key: one[key] for key in keys}) for one in json.loads(text)["matrices"])

    return read_side_file(folder / PRUNED_FILE, make) or ()


def read_alignment(folder: Path) -> Alignment | None:
    """How far the two sides' gradients agreed when weights were pruned for a domain."""
    return read_side_file(
        folder / PRUNED_FILE, lambda text: Alignment.from_json(json.loads(text).get("alignment"))
    )


def read_planning(folder: Path) -> Planning | None:
    """How a budget was met."""
    return read_side_file(folder / PLANNING_FILE, lambda text: _planning(json.loads(text)))


def _planning(content: dict[str, Any]) -> Planning:
    keys = ("steps", "distance")
    bases = {one.get("base") for one in content["candidates"]}
    candidates = tuple(
        Candidate(
            name=_candidate_name(one, several=len(bases) > 1),
            parameters=int(one["parameters"]),
            bytes=int(one["bytes"]),
            milliseconds=None if one["milliseconds"] is None else float(one["milliseconds"]),
            outcome=str(one["outcome"]),
            rungs=tuple(Rung(**{key: rung[key] for key in keys}) for rung in one["rungs"]),
        )
        for one in content["candidates"]
    )
    return Planning(
        budget={key: content["budget"].get(key) for key in ("bytes", "parameters", "milliseconds")},
        teacher=dict(content["teacher"]),
        candidates=candidates,
        chosen=next(
            (one.name for one in candidates if one.outcome == CHOSEN), str(content["chosen"])
        ),  # a plan that was never carried out has chosen none
        predicted=dict(content["predicted"]),
        measured=dict(content["measured"]),
        remarks=tuple(str(one) for one in content.get("remarks", ())),
    )


def _candidate_name(one: dict[str, Any], *, several: bool) -> str:
    """Cuts of two models may be called the same."""
    return f"{one['name']}, of {Path(one['base']).name}" if several else str(one["name"])


def weigh(folder: Path) -> tuple[int, int]:
    """Bytes and parameters of a model's safetensors, by their headers alone."""
    size = parameters = 0
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as handle:
            header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        size += file.stat().st_size
        parameters += sum(
            math.prod(tensor["shape"])
            for name, tensor in header.items()
            if name != "__metadata__" and "F" in tensor["dtype"]
        )
    return size, parameters
