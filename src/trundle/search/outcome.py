"""What a search leaves behind: every candidate with its trials, the one that was chosen, forecast and truth."""

from __future__ import annotations

from dataclasses import dataclass

from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.model.cost import Cost
from trundle.pipeline.compress import Run
from trundle.records import CandidateRecord, PlanningRecord, TrialRecord
from trundle.search.budget import _Budget, _Timetable
from trundle.search.candidates import _Candidate

_REFUSED = "refused: "
"""How the outcome of a candidate begins that a step could not make; the step's own sentence follows."""


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """A candidate and how its trials went: validation distances, round by round."""

    candidate: _Candidate
    distances: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    outcome: str = "not tried"

    @property
    def refused(self) -> bool:
        """Whether a step could not make it."""
        return self.outcome.startswith(_REFUSED)

    def record(self) -> CandidateRecord:
        """Return the entry of planning.json."""
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
    """What was asked, what could be had, what was chosen, and what came of it."""

    budget: _Budget
    before: Cost
    before_milliseconds: float | None
    tried: tuple[_Tried, ...]
    chosen: _Tried
    timetable: _Timetable
    run: Run | None = None
    proof_texts: int = MEASURED_TEXTS
    """How many held-out texts there is time to compare by."""
    bytes: int | None = None
    """Of the file that is shipped, as it lies on the disk."""
    parameters: int | None = None
    """As counted in what was written."""
    milliseconds: float | None = None
    """For a query, as measured at the end."""
    no_graph: str | None = None
    """Why the graph that was planned is not there, and what is."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Where what came of it is not what was asked; empty where all is well or nothing was made."""
        if self.bytes is None or self.parameters is None:
            return ()
        told: tuple[str, ...] = () if self.no_graph is None else (self.no_graph,)
        told += self.budget.exceeded(
            file_bytes=self.bytes, parameters=self.parameters, milliseconds=self.milliseconds
        )
        if self.budget.milliseconds is not None and self.milliseconds is None:
            told += (f"no query was timed, so {self.budget.milliseconds:.4g} ms a query is not proven",)
        return told

    def record(self) -> PlanningRecord:
        """Return the content of planning.json."""
        best = self.chosen.candidate
        return PlanningRecord(
            budget=self.budget.as_json(),
            teacher={
                "parameters": self.before.parameters,
                "bytes": self.before.file_bytes,
                "milliseconds": self.before_milliseconds,
            },
            candidates=tuple(each.record() for each in self.tried),
            chosen=best.name,
            predicted={
                "bytes": best.bytes,
                "parameters": best.cost.parameters,
                "milliseconds": best.milliseconds,
            },
            measured={
                "bytes": self.bytes,
                "parameters": self.parameters,
                "milliseconds": self.milliseconds,
            },
            remarks=self.remarks,
        )
