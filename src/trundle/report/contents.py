"""The contents of a report: report.json is these classes as JSON, and the page is drawn from them alone.

Shares are shares of 1. A figure that was not measured is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from trundle.evaluate.fidelity import TextError
from trundle.records import GradientAlignment, PlanningRecord, PrunedMatrix, QualityScores

if TYPE_CHECKING:  # it imports what a report without measurements does not need
    from trundle.evaluate.shortening import Inheritance

_Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """A form in which a model can run: its torch weights or an exported graph."""

    engine: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class _Quality(QualityScores):
    """How close a model is to its teacher."""

    measured: str
    """The texts or tasks it was measured on: two runs may have been measured on different ones."""
    share_standard: float | None = None
    """Share of the teacher's mean score over labelled tasks."""
    share_asymmetric: float | None = None


@dataclass(frozen=True, kw_only=True)
class _SpeedFigures:
    """Speed on the machine that wrote the report."""

    engine: str
    milliseconds: float
    """Median time of one short query."""
    texts_per_second: float | None = None
    """Long texts in batches."""


@dataclass(frozen=True, kw_only=True)
class _StepTaken:
    """A method in the lineage, with the model it started from."""

    begins_from: str
    step: str
    says: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Training:
    """The curves of a training, by step."""

    step: str
    """The method that trained."""
    loss: tuple[_Point, ...]
    validation: tuple[_Point, ...]
    watched: Mapping[str, tuple[_Point, ...]]
    """Further measures of each validation, by name."""


@dataclass(frozen=True, kw_only=True)
class _LayerLosses:
    """The loss of each layer as the last one, as the method depth measured it."""

    losses: tuple[float, ...]
    kept: int
    pick: str


@dataclass(frozen=True, kw_only=True)
class _Coverage:
    """The share of the tokens in its texts that a reduced vocabulary still has."""

    kept: int
    of: int
    coverage: float
    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _RunRecord:
    """Everything that can be read from a model folder without loading the model."""

    name: str
    folder: str
    source: str
    teacher: str
    parameters: int
    layers: int
    width: int
    parts: Mapping[str, int]
    """Parameters by part."""
    origin: Mapping[str, Any]
    """The cost of the first model in the lineage."""
    forms: tuple[_Form, ...]
    form: _Form
    """The form that is measured: the fastest one."""
    needs_trundle: bool
    pair: bool
    quality: _Quality | None
    scores: Mapping[str, float]
    steps: tuple[_StepTaken, ...]
    data: tuple[Mapping[str, Any], ...]
    seed: int
    versions: Mapping[str, str]
    trainings: tuple[_Training, ...]
    layer_losses: _LayerLosses | None
    coverage: _Coverage | None
    pruned: tuple[PrunedMatrix, ...]
    alignment: GradientAlignment | None
    planning: PlanningRecord | None


@dataclass(frozen=True, kw_only=True)
class _TeacherModel:
    """The model whose vector space the runs are in."""

    name: str
    path: str
    parameters: int | None = None
    bytes: int | None = None
    layers: int | None = None
    width: int | None = None
    speed: _SpeedFigures | None = None


@dataclass(frozen=True, kw_only=True)
class _TaskScore:
    """Scores on a labelled task; `asymmetric` is None for a task without documents."""

    task: str
    kind: str
    measure: str
    teacher: float
    standard: float
    asymmetric: float | None


@dataclass(frozen=True, kw_only=True)
class _TopDocuments:
    """The first documents of a search: positions among the report's documents, with their cosines."""

    documents: tuple[int, ...]
    cosines: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _SampleSearch:
    query: str
    teacher: _TopDocuments
    asymmetric: _TopDocuments
    student: _TopDocuments


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """Both models' vectors of the same texts, projected on the teacher's first two principal directions."""

    texts: tuple[str, ...]
    teacher: tuple[_Point, ...]
    student: tuple[_Point, ...]
    shown: float
    """Share of the variance of the teacher's vectors in these two directions."""


@dataclass(frozen=True, kw_only=True)
class _RunMeasurements:
    """What was measured with a run's loaded model."""

    quality: _Quality | None = None
    speed: _SpeedFigures | None = None
    tasks: tuple[_TaskScore, ...] = ()
    shortened: tuple[Inheritance, ...] = ()
    nearest: tuple[TextError, ...] = ()
    farthest: tuple[TextError, ...] = ()
    searches: tuple[_SampleSearch, ...] = ()
    projection: _Projection | None = None


@dataclass(frozen=True, kw_only=True)
class _TokenCurve:
    """The share of all tokens in the texts that the n most frequent ones account for."""

    tokenizer: str
    texts: int
    points: tuple[_Point, ...]


@dataclass(frozen=True, kw_only=True)
class _Report:
    runs: tuple[_RunRecord, ...]
    teacher: _TeacherModel | None
    measured: Mapping[str, _RunMeasurements] = field(default_factory=dict)
    """By a run's name."""
    documents: Mapping[int, str] = field(default_factory=dict)
    """The documents that the searches found, by position."""
    tokens: _TokenCurve | None = None
    machine: str = ""
    """The machine that the speeds were measured on."""
    busy: str | None = None
    """A warning if other programs used it at that time."""
    notes: tuple[str, ...] = ()
    format: int = 1

    def of(self, run: _RunRecord) -> _RunMeasurements:
        return self.measured.get(run.name, _RunMeasurements())

    def quality(self, run: _RunRecord) -> _Quality | None:
        return self.of(run).quality or run.quality

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"documents": {str(place): text for place, text in self.documents.items()}}
