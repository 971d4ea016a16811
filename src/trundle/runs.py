"""A run as it went: what came in, each step, what came out. Plain records, for the lineage and for machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trundle.embedder import Embedder
from trundle.evaluate import Fidelity
from trundle.measure import Cost
from trundle.recipe import Call, Recipe


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """One step as it went."""

    call: Call
    says: str
    plan: Mapping[str, Any]
    facts: Mapping[str, Any]
    after: Cost
    applied: bool
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """For the lineage: what would lead to the same model again, so no times."""
        options = self.call.options.model_dump(mode="json")
        return {
            "step": self.call.step.name,
            "options": options,
            "plan": self.plan,
            "says": self.says,
            "facts": self.facts,
        }


@dataclass(frozen=True, kw_only=True)
class Sibling:
    """A further model that left in a folder beside the result's."""

    output: Path
    after: Cost
    fidelity: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        near = None if self.fidelity is None else self.fidelity.as_json()
        return {"output": str(self.output), "after": self.after.as_json(), "fidelity": near}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What went in, what was done, what came out."""

    source: str
    recipe: Recipe
    before: Cost
    after: Cost
    steps: tuple[StepRun, ...]
    fidelity: Fidelity | None
    judged: Mapping[str, tuple[float, float]]
    """What a step measured of the original and of the result."""
    output: Path | None
    pair: Path | None
    besides: tuple[Sibling, ...]
    original: Embedder
    result: Embedder
    """Both models as texts → vectors; what was encoded once is remembered."""
    needs_trundle: bool
    """Whether the result has a module of ours, which plain sentence-transformers opens only when told to."""
    settle: Callable[[], None]
    """Let go of what was kept in case of a failure, where it was held."""

    @property
    def only_cut(self) -> bool:
        """Whether vectors were moved and nothing was learned since."""
        learned = any("steps" in step.facts for step in self.steps)
        return not learned and not any(call.step.enters_space(call.options) for call in self.recipe.calls)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "source": self.source,
            "recipe": self.recipe.as_json(),
            "before": self.before.as_json(),
            "after": self.after.as_json(),
            "steps": [
                step.as_json() | {"seconds": round(step.seconds, 2), "applied": step.applied}
                for step in self.steps
            ],
            "fidelity": None if self.fidelity is None else self.fidelity.as_json(),
            "judged": {name: {"before": old, "after": new} for name, (old, new) in self.judged.items()},
            "output": None if self.output is None else str(self.output),
            "pair": None if self.pair is None else str(self.pair),
            "besides": [sibling.as_json() for sibling in self.besides],
        }
