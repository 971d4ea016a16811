"""The result of a search: every candidate with its trials, the chosen one, predictions and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.model.cost import Cost
from trundle.pipeline.run import Run
from trundle.records import CandidateRecord, PlanningRecord, TrialRecord
from trundle.search.budget import _Budget, _Timetable
from trundle.search.candidates import _Candidate

_REFUSED = "refused: "
"""Starts the outcome of a candidate that a method rejected; the method's error follows."""


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A candidate and its trials: the validation distance after each round."""

    candidate: _Candidate
    distances: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    outcome: str = "not tried"

    @property
    def refused(self) -> bool:
        return self.outcome.startswith(_REFUSED)

    def record(self) -> CandidateRecord:
        return CandidateRecord(
            name=self.candidate.name,
            base=self.candidate.base,
            steps=self.candidate.steps(),
            parameters=self.candidate.cost.parameters,
            bytes=self.candidate.bytes,
            milliseconds=self.candidate.milliseconds,
            flops_per_token=round(self.candidate.cost.flops_per_token),
            outcome=self.outcome,
            rungs=tuple(
                TrialRecord(steps=steps, distance=distance)
                for steps, distance in zip(self.steps, self.distances, strict=True)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The budget, the candidates, the chosen one, and what was measured of it."""

    budget: _Budget
    before: Cost
    before_milliseconds: float | None
    tried: tuple[_Tried, ...]
    chosen: _Tried
    timetable: _Timetable
    run: Run | None = None
    proof_texts: int = MEASURED_TEXTS
    """How many held-out texts the result was compared on."""
    bytes: int | None = None
    """Measured size of the exported file."""
    parameters: int | None = None
    """Counted in the written model."""
    milliseconds: float | None = None
    """Measured time of a query."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the search."""
    no_graph: str | None = None
    """Why the planned graph is missing, and what was written instead."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Returns a sentence for each limit that is not met or not proven."""
        if self.bytes is None or self.parameters is None:
            return ()
        remarks: tuple[str, ...] = () if self.no_graph is None else (self.no_graph,)
        remarks += self.budget.exceeded(
            file_bytes=self.bytes, parameters=self.parameters, milliseconds=self.milliseconds
        )
        if self.budget.milliseconds is not None and self.milliseconds is None:
            remarks += (f"no query was timed, so {self.budget.milliseconds:.4g} ms a query is not proven",)
        return remarks

    def record(self) -> PlanningRecord:
        """Returns the content of planning.json."""
        best, before = self.chosen.candidate, self.before
        teacher = {"parameters": before.parameters, "bytes": before.file_bytes}
        predicted = {"bytes": best.bytes, "parameters": best.cost.parameters}
        return PlanningRecord(
            budget=self.budget.as_json(),
            teacher=teacher | {"milliseconds": self.before_milliseconds},
            candidates=tuple(each.record() for each in self.tried),
            chosen=best.name,
            predicted=predicted | {"milliseconds": best.milliseconds},
            measured={"bytes": self.bytes, "parameters": self.parameters, "milliseconds": self.milliseconds},
            remarks=self.remarks,
            planned_seconds=self.timetable.as_json(),
            spent_seconds={label: round(seconds, 1) for label, seconds in self.spent.items()},
        )
