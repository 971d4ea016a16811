"""What a report shows, as plain records: `report.json` is these written down, and the page is drawn from them alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trundle.records import GradientAlignment, PlanningRecord, PrunedMatrix

_FORMAT = 1

_Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class _Form:
    """One form in which a model can be run: its torch weights or an exported graph."""

    engine: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class _Quality:
    """How near a model is to its teacher; what was not measured is None. Shares of 1."""

    measured: str
    """On what: said beside every figure, because two runs may have been measured on different texts."""
    k: int = 10
    agreement_asymmetric: float | None = None
    """Of the teacher's top k, found by the model's queries in the teacher's index."""
    agreement_standard: float | None = None
    """The same in an index of the model's own vectors."""
    cosine: float | None = None
    distance: float | None = None
    share_standard: float | None = None
    """Of the teacher's mean over tasks with labels."""
    share_asymmetric: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """One query at a time, and long texts in batches, on the machine that wrote the report."""

    engine: str
    milliseconds: float
    """Median time of one short query."""
    texts_per_second: float | None = None
    """Long texts."""


@dataclass(frozen=True, kw_only=True)
class _StepTaken:
    """One step of the way here, with the model it began from."""

    begins_from: str
    step: str
    says: str
    options: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Training:
    """What a training wrote down: the loss while it learned, and what validation said."""

    step: str
    loss: tuple[_Point, ...]
    validation: tuple[_Point, ...]
    watched: Mapping[str, tuple[_Point, ...]]
    """Further measures taken at each validation, by name."""


@dataclass(frozen=True, kw_only=True)
class _LayerLosses:
    """The loss of each layer as the last one, as the step depth saw it."""

    losses: tuple[float, ...]
    kept: int
    pick: str


@dataclass(frozen=True, kw_only=True)
class _Coverage:
    """A cut vocabulary: how much of the texts it was chosen by its tokens are."""

    kept: int
    of: int
    coverage: float
    lost: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Everything a model folder tells without being opened."""

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
    """What the first model of the lineage cost."""
    forms: tuple[_Form, ...]
    form: _Form
    """The form that is measured: the fastest there is."""
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
class _Teacher:
    """The model whose space the runs are in."""

    name: str
    path: str
    parameters: int | None = None
    bytes: int | None = None
    layers: int | None = None
    width: int | None = None
    speed: _Speed | None = None


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Vectors cut to so many dimensions and kept in a precision, and what searches in them score."""

    dimensions: int
    precision: str
    bytes: int
    scores: Mapping[str, float]
    """Of teacher, asymmetric and student."""


@dataclass(frozen=True, kw_only=True)
class _Shortened:
    """All ways to keep vectors, by one measure."""

    measure: str
    rows: tuple[_Kept, ...]


@dataclass(frozen=True, kw_only=True)
class _TaskScore:
    """One task with labels; None where the mode means nothing."""

    task: str
    kind: str
    measure: str
    teacher: float
    standard: float
    asymmetric: float | None


@dataclass(frozen=True, kw_only=True)
class _Apart:
    """A text and how far the two models' vectors of it lie apart."""

    text: str
    distance: float
    cosine: float


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What one way of searching found first: positions among the report's documents, with their cosines."""

    documents: tuple[int, ...]
    cosines: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class _Search:
    """One query, searched in three ways."""

    query: str
    teacher: _Found
    asymmetric: _Found
    student: _Found


@dataclass(frozen=True, kw_only=True)
class _Projection:
    """Vectors of the same texts by both models, on the two directions in which the teacher's differ most."""

    texts: tuple[str, ...]
    teacher: tuple[_Point, ...]
    student: tuple[_Point, ...]
    shown: float
    """Share of the teacher's variance that these two directions hold."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What opening a run's model brought."""

    quality: _Quality | None = None
    speed: _Speed | None = None
    tasks: tuple[_TaskScore, ...] = ()
    shortened: tuple[_Shortened, ...] = ()
    nearest: tuple[_Apart, ...] = ()
    farthest: tuple[_Apart, ...] = ()
    searches: tuple[_Search, ...] = ()
    projection: _Projection | None = None


@dataclass(frozen=True, kw_only=True)
class _TokenCurve:
    """How much of the texts the n most frequent tokens are."""

    tokenizer: str
    texts: int
    points: tuple[_Point, ...]


@dataclass(frozen=True, kw_only=True)
class _Report:
    """One report."""

    runs: tuple[_Run, ...]
    teacher: _Teacher | None
    measured: Mapping[str, _Measured] = field(default_factory=dict)
    """By a run's name."""
    documents: Mapping[int, str] = field(default_factory=dict)
    """The documents that searches found, by position."""
    tokens: _TokenCurve | None = None
    machine: str = ""
    """What speeds were measured on."""
    notes: tuple[str, ...] = ()
    format: int = _FORMAT

    def of(self, run: _Run) -> _Measured:
        """What was measured of a run; nothing, where it was not opened."""
        return self.measured.get(run.name, _Measured())

    def quality(self, run: _Run) -> _Quality | None:
        """What was measured now, or else what was kept with the model."""
        return self.of(run).quality or run.quality

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        whole = asdict(self)
        whole["documents"] = {str(place): text for place, text in self.documents.items()}
        return whole
