"""The records that trundle writes into a model folder: each is declared, written and read here.

- trundle.json: the `Lineage`, with one `MethodRecord` per method and the `QualityScores` among its scores.
- align.jsonl, contrast.jsonl, …: a training log, one `TrainingRecord` per line.
- planning.json: the `PlanningRecord` of a search for a budget.
- weights.json: the `WeightMap` of pruned matrices.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from trundle.errors import BadInput

LINEAGE_FILE = "trundle.json"
THE_ORIGINAL = "the original"
"""The name of the teacher in a lineage if the teacher is the source model."""
CALIBRATION_FILE = "calibration.json"
TRACKED = ("trundle", "torch", "transformers", "sentence-transformers", "tokenizers", "numpy", "scikit-learn")
"""The packages whose versions a lineage records."""

_T = TypeVar("_T")


@cache
def versions(packages: tuple[str, ...] = TRACKED) -> Mapping[str, str]:
    """Return the versions of Python and of those `packages` that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """How a model folder was made, with everything needed to make it again."""

    source: str
    space: str | None = None
    """The model whose vector space this one is in, if that is not the source."""
    steps: tuple[Mapping[str, Any], ...] = ()
    """A `MethodRecord` as JSON for each method."""
    data: tuple[Mapping[str, Any], ...] = ()
    seed: int = 0
    before: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Any] = field(default_factory=dict)
    scores: Mapping[str, Any] = field(default_factory=dict)
    compared: Mapping[str, int] = field(default_factory=dict)
    """How many held-out `queries` and `documents` the model was compared with its teacher on."""
    versions: Mapping[str, str] = field(default_factory=versions)
    parent: Mapping[str, Any] | None = None
    format: int = 1

    def after_parent(self) -> Lineage:
        """Merge the parent's lineage into this one, for a source that was an intermediate result."""
        parent = self.parent
        if parent is None:
            return self
        return replace(
            self,
            source=parent["source"],
            space=THE_ORIGINAL if self.space == parent["source"] else self.space,
            steps=(*parent["steps"], *self.steps),
            before=parent["before"],
            parent=parent["parent"],
        )

    def write(self, folder: Path) -> None:
        """Write the lineage into `folder`."""
        text = json.dumps(asdict(self), indent=2, sort_keys=True, ensure_ascii=False)
        (folder / LINEAGE_FILE).write_text(text + "\n", encoding="utf-8")


def read_lineage(folder: str | Path) -> dict[str, Any] | None:
    """Return the lineage in `folder` as JSON values, or None if trundle did not write the folder."""
    path = Path(folder) / LINEAGE_FILE
    if not path.is_file():
        return None
    lineage = _read(path, dict[str, Any])
    if lineage is None or lineage.get("format") != Lineage.format:
        raise BadInput(f"{path} was written by another version of trundle; make the folder again")
    return lineage


@dataclass(frozen=True, kw_only=True)
class MethodRecord:
    """One method in a lineage. It holds no times, so the same run gives the same record."""

    step: str
    """The name of the method."""
    options: Mapping[str, Any]
    plan: Mapping[str, Any]
    says: str
    """The plan as a sentence."""
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class QualityScores:
    """The scores in a lineage that compare a model with its teacher; None for what was not measured."""

    k: int = 10
    cosine: float | None = None
    distance: float | None = None
    agreement_asymmetric: float | None = None
    """Share of the teacher's top k that the model's queries retrieve from the teacher's index."""
    agreement_standard: float | None = None
    """The same for an index of the model's own vectors."""

    def as_scores(self, teacher: str) -> dict[str, float]:
        """Return the scores under the names that a lineage and a model card show."""
        named = {
            f"cosine to {teacher}": self.cosine,
            f"l2 distance to {teacher}": self.distance,
            f"agreement@{self.k}, searching the index of {teacher}": self.agreement_asymmetric,
            f"agreement@{self.k}, own index": self.agreement_standard,
        }
        return {name: round(value, 4) for name, value in named.items() if value is not None}

    @classmethod
    def from_scores(cls, scores: Mapping[str, Any]) -> QualityScores | None:
        """Find these scores among all scores of a lineage; None if it has none of them."""
        found, k = dict[str, float](), cls.k
        for name, value in scores.items():
            if match := re.match(r"agreement@(\d+), (searching the index|own index)", name):
                k = int(match[1])
                own = match[2] == "own index"
                found["agreement_standard" if own else "agreement_asymmetric"] = float(value)
            elif name.startswith("cosine to "):
                found["cosine"] = float(value)
            elif name.startswith("l2 distance to "):
                found["distance"] = float(value)
        return cls(k=k, **found) if found else None


def _read(path: Path, kind: type[_T], *, lines: bool = False) -> _T | None:
    """Read a JSON file, or one with a row per line; None if there is none.

    Other versions of trundle may have written more or fewer fields.
    """
    if not path.is_file():
        return None
    try:
        text = path.read_text(encoding="utf-8")
        rows = f"[{','.join(line for line in text.splitlines() if line.strip())}]" if lines else text
        return TypeAdapter(kind).validate_json(rows)
    except (OSError, ValueError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BadInput(f"{path} is damaged ({problem}); delete it, or make the folder again") from error


TRAINING_LOG_FILE = "metrics.jsonl"
"""The training log while a training runs."""


def training_log_file(method: str) -> str:
    """Return the name of the training log in the folder of the trained model."""
    return f"{method}.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """One line of a training log. A figure that was not measured at this step is None."""

    step: int
    epoch: float | None = None
    loss: float | None = None
    lr: float | None = None
    validation: float | None = None
    seconds: float | None = None
    texts_per_second: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    """Further figures of a validation, by name."""

    def as_line(self) -> str:
        """Return the line, with its line break."""
        row = {name: value for name, value in asdict(self).items() if name != "measures" or value}
        return json.dumps(row) + "\n"


def read_training_log(folder: Path, method: str) -> tuple[TrainingRecord, ...]:
    """Return the training log that `method` wrote into a model folder; empty if there is none."""
    return _read(folder / training_log_file(method), tuple[TrainingRecord, ...], lines=True) or ()


def training_log_up_to(text: str, step: int) -> str:
    """Drop the lines after `step`, and a line that is incomplete because the process died."""
    kept = ""
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] > step:
                break
        except ValueError:
            break
        kept += line
    return kept


PLANNING_FILE = "planning.json"


@dataclass(frozen=True, kw_only=True)
class TrialRecord:
    """A short training of a candidate."""

    steps: int
    distance: float
    """To the teacher, on validation texts."""


@dataclass(frozen=True, kw_only=True)
class CandidateRecord:
    """A candidate of a search, with its predicted size and speed and its trials."""

    name: str
    base: str | None = None
    """The model it is made from."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Its recipe."""
    parameters: int
    bytes: int
    milliseconds: float | None
    flops_per_token: int | None = None
    outcome: str
    rungs: tuple[TrialRecord, ...]


@dataclass(frozen=True, kw_only=True)
class PlanningRecord:
    """How a search met a budget. The figures have the keys bytes, parameters and milliseconds."""

    # int | float, so that a whole number is one after reading
    budget: Mapping[str, int | float | None]
    teacher: Mapping[str, int | float | None]
    candidates: tuple[CandidateRecord, ...]
    chosen: str
    predicted: Mapping[str, int | float | None]
    measured: Mapping[str, int | float | None]
    remarks: tuple[str, ...] = ()
    """Where the result differs from what was requested."""
    planned_seconds: Mapping[str, float] = field(default_factory=dict)
    spent_seconds: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the search, as planned and as measured."""
    index: Mapping[str, Any] = field(default_factory=dict)
    """The check of the result on the index that it was trained from; empty without one."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    def as_text(self) -> str:
        """Return the content of planning.json."""
        return json.dumps(self.as_json(), indent=1)


def read_planning(folder: Path) -> PlanningRecord | None:
    """Return the planning record of a model folder, or None if it was not made for a budget.

    Candidates made from different models get their model's name as well.
    """
    found = _read(folder / PLANNING_FILE, PlanningRecord)
    if found is None:
        return None
    candidates = found.candidates
    if len({one.base for one in candidates}) > 1:
        named = ((one, f"{one.name}, of {Path(one.base or '').name}") for one in candidates)
        candidates = tuple(replace(one, name=name) for one, name in named)
    trained = next((one.name for one in candidates if one.outcome == "chosen"), found.chosen)
    return replace(found, candidates=candidates, chosen=trained)


WEIGHTS_FILE = "weights.json"
NEUTRAL = 0.1
"""Gradients whose cosine is closer to 0 than this neither agree nor conflict."""


@dataclass(frozen=True, kw_only=True)
class PrunedMatrix:
    """A matrix and the number of weights it keeps."""

    layer: int
    matrix: str
    weights: int
    kept: int


@dataclass(frozen=True, kw_only=True)
class GradientAlignment:
    """How many weights lie in rows (or matrices) of each cosine between domain and general mean gradient."""

    counts: tuple[int, ...]
    """By cosine, in equal intervals from −1 to 1."""
    shared: int
    """Weights whose two gradients have the same direction."""
    specific: int
    conflicting: int


@dataclass(frozen=True, kw_only=True)
class WeightMap:
    """What the method `weights` kept of each matrix."""

    says: str
    matrices: tuple[PrunedMatrix, ...]
    alignment: GradientAlignment | None
    """None if no gradients were compared."""

    def as_text(self) -> str:
        """Return the content of weights.json."""
        return json.dumps(asdict(self))


def read_weight_map(folder: Path) -> WeightMap | None:
    """Return the weight map of a model folder, or None if its weights were not pruned."""
    return _read(folder / WEIGHTS_FILE, WeightMap)
