"""What a search leaves behind: every candidate with its trials, the one that was chosen, forecast and truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trundle.measure import Cost
from trundle.planner.budget import Budget
from trundle.planner.candidates import Candidate
from trundle.planner.halving import Timetable
from trundle.runs import Run


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A candidate and how its trials went: validation distances, round by round."""

    candidate: Candidate
    distances: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    outcome: str = "not tried"

    def as_json(self) -> dict[str, Any]:
        """For the report."""
        return {
            "name": self.candidate.name,
            "base": self.candidate.base,
            "steps": self.candidate.steps(),
            "parameters": self.candidate.cost.parameters,
            "bytes": self.candidate.bytes,
            "milliseconds": self.candidate.milliseconds,
            "flops_per_token": round(self.candidate.cost.flops_per_token),
            "outcome": self.outcome,
            "rungs": [
                {"seconds": round(seconds, 1), "steps": steps, "distance": distance}
                for seconds, steps, distance in zip(self.seconds, self.steps, self.distances, strict=True)
            ],
        }


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was asked, what could be had, what was chosen, and what came of it."""

    budget: Budget
    before: Cost
    before_milliseconds: float | None
    tried: tuple[Tried, ...]
    chosen: Tried
    timetable: Timetable
    run: Run | None = None
    bytes: int | None = None
    """Of the file that is shipped, as it lies on the disk."""
    milliseconds: float | None = None
    """For a query, as measured at the end."""

    def as_json(self) -> dict[str, Any]:
        """What planning.json holds."""
        best = self.chosen.candidate
        return {
            "budget": self.budget.as_json(),
            "teacher": {
                "parameters": self.before.parameters,
                "bytes": self.before.file_bytes,
                "milliseconds": self.before_milliseconds,
            },
            "candidates": [each.as_json() for each in self.tried],
            "chosen": best.name,
            "predicted": {"bytes": best.bytes, "milliseconds": best.milliseconds},
            "measured": {"bytes": self.bytes, "milliseconds": self.milliseconds},
        }
