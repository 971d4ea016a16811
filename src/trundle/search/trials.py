"""The trials of a search and the training of its winner: each is a run of a recipe in a folder of its own.

An `Outcome` holds every candidate with its trials, the chosen one, predictions and measurements.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from trundle.cache import cache_entry, cache_folder
from trundle.errors import BadInput, BadModel, ImpossibleCut, UserError
from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.evaluate.index_check import IndexCheck
from trundle.folders import write_atomic
from trundle.model.cost import Cost
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request, Run
from trundle.progress import SILENT, Stopwatch
from trundle.recipe import Recipe, make_recipe
from trundle.records import LINEAGE_FILE, CandidateRecord, PlanningRecord, TrialRecord, read_lineage
from trundle.search.budget import _Timetable
from trundle.search.candidates import _Candidate
from trundle.search.limits import _Budget

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
    before: Cost | None
    """Of the model that made the vector space; None if it is not here."""
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
    undisturbed: bool = True
    """Whether no other program used the processor while queries were timed."""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the search."""
    check: IndexCheck | None = None
    """Whether the exported model finds in the index what the index's own vectors find."""
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
        if self.budget.milliseconds is None:
            return remarks
        if self.milliseconds is None:
            remarks += (f"no query was timed, so {self.budget.milliseconds:.4g} ms a query is not proven",)
        elif self.milliseconds > self.budget.milliseconds and not self.undisturbed:
            remarks += ("other programs used the processor then; time it again with trundle bench",)
        return remarks

    def record(self) -> PlanningRecord:
        """Returns the content of planning.json."""
        best, before = self.chosen.candidate, self.before
        teacher = {
            "parameters": None if before is None else before.parameters,
            "bytes": None if before is None else before.file_bytes,
        }
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
            index={} if self.check is None else self.check.as_json(),
        )


_TRIALS = "trials"
_RATE_FILE, _CONTEST_OVER, _WRITTEN_FILE = "texts-a-second", "contest-over", "written"


_USUAL = 0.25
"""A rate may differ from the one before by this share to be the same; machines vary."""


def _once(place: Path, measure: Callable[[], float]) -> float:
    """Returns the number stored in `place`, measured and stored the first time."""
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, repr(measure()))
    return float(place.read_text())


def _usual_rate(known: Sequence[Any], measured: float) -> float:
    """Returns the rate of an earlier search of the same models and texts if `measured` is close to it.

    A search that plans like an earlier one trains on the same texts, whose teacher vectors are there.
    """
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    place = cache_entry("speed", _RATE_FILE, *known, device) / _RATE_FILE
    usual = float(place.read_text()) if place.is_file() else math.inf
    if abs(measured - usual) <= _USUAL * usual < math.inf:
        return usual
    place.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(place, repr(measured))
    return measured


def _mark_written(work: Path, output: str | Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    write_atomic(work / _WRITTEN_FILE, _identity(output))


def _wrote(work: Path, output: str | Path) -> bool:
    """Whether the interrupted search in `work` has written `output`, and nobody has changed it since."""
    place = work / _WRITTEN_FILE
    return place.is_file() and place.read_text() == _identity(output)


def _any_wrote(output: str | Path) -> bool:
    works = cache_folder() / _TRIALS
    return works.is_dir() and any(_wrote(work, output) for work in works.iterdir())


def _identity(output: str | Path) -> str:
    lineage = Path(output).resolve() / LINEAGE_FILE
    return f"{lineage} {lineage.stat().st_mtime_ns if lineage.is_file() else None}"


_GPU_PACE: dict[str, Any] = {"batch_size": 512, "learning_rate": 5e-4, "warmup": 300, "optimizer": "muon"}
_CPU_PACE = {"batch_size": 16, "warmup": 20}
"""Large batches learn more per minute if a step takes milliseconds, small ones if it takes a second."""
_ROUND_AFTER = 0.85
"""Of an int4 model's last training on a GPU, before its weights are rounded: exact weights learn faster."""

_OVERTIME = 2.0
"""A trial that has to make as many steps as the first one may take this many times its planned seconds."""
_HOPELESS = 1.25
"""A candidate this many times as far from the teacher as the leader is dropped."""
_REFUSALS = (ImpossibleCut, BadInput, BadModel)
"""Errors by which a method rejects a candidate."""


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """Candidates of one model, learning from the same texts."""

    source: str
    request: Request
    """What the user asked for, with the models in memory."""
    texts: int
    """Training texts, at most."""
    mapped: int
    """Texts to fit a candidate's linear map on, before it is trained."""
    work: Path
    heals: bool = True
    """Whether cuts are healed before that."""
    watch: Stopwatch = field(default_factory=lambda: Stopwatch(SILENT))
    """Counts where the time goes."""
    endpoint_model: str | None = None
    """The teacher's name, if the source is an endpoint."""

    def contest(self, tried: Sequence[_Tried], timetable: _Timetable, *, until: float) -> list[_Tried]:
        """Successive halving: the better half of each round stays. Returns all candidates, best first.

        The first trial sets the pace; the others make as many steps per second planned, so that neither a
        busy machine nor a candidate's own speed decides. A candidate that a method rejects is replaced by the
        next one. After `until` no trial is started, but trials of an interrupted search are used.
        """
        running: list[_Tried] = list(tried)
        behind: list[_Tried] = []
        errors: list[UserError] = []
        pace: float | None = None
        for number, rung in enumerate(timetable.rungs, start=1):
            waiting, running = running, []
            while waiting and len(running) < rung.candidates:
                if running and not self._may_try(waiting[0], number - 1, until):
                    break
                one = waiting.pop(0)
                steps = None if pace is None else max(1, round(pace * rung.seconds))
                try:
                    running.append(self._trial(one, number - 1, rung.seconds, steps))
                except _REFUSALS as error:
                    errors.append(error)
                    behind.append(self._refused(one, error))
                    continue
                # A candidate that is close enough to its teacher makes no steps, and sets no pace.
                pace = pace or running[-1].steps[-1] / rung.seconds or None
            late = len(running) < rung.candidates
            behind = [*(_left(each, late=late) for each in waiting), *behind]
            if not running:
                break
            running.sort(key=lambda each: each.distances[-1])
            leader = running[0]
            reach = _HOPELESS * leader.distances[-1]
            lost = [each for each in running if each.distances[-1] > reach]
            running = running[: len(running) - len(lost)]
            behind = [*(_left(each) for each in lost), *behind]
            self.request.progress.say(
                f"round {number}: {leader.candidate.name} leads at a distance of {leader.distances[-1]:.4f}"
            )
            if len(running) == 1 or not self._may_try(leader, number, until):
                break
        found = sorted([*(_left(each) for each in running), *behind], key=_standing)
        best = next((each for each in found if not each.refused), None)
        if best is None:
            raise errors[0]
        return [replace(best, outcome="chosen"), *(each for each in found if each is not best)]

    def finish_best(
        self, ranked: Sequence[_Tried], seconds: Callable[[_Tried], float], deadline: float = math.inf
    ) -> tuple[Run, list[_Tried]]:
        """Trains the first candidate that no method rejects; returns its run and the ranking."""
        waiting, refused = [each for each in ranked if not each.refused], []
        errors: list[UserError] = []
        while waiting:
            best = waiting.pop(0)
            try:
                run = self.finish(best, seconds(best), deadline)
            except _REFUSALS as error:
                errors.append(error)
                refused.append(self._refused(best, error))
                continue
            rest = [*waiting, *refused, *(each for each in ranked if each.refused)]
            return run, [replace(best, outcome="chosen"), *sorted(rest, key=_standing)]
        raise errors[0]

    def finish(self, chosen: _Tried, seconds: float, deadline: float = math.inf) -> Run:
        """Trains the winner further from its last trial, for as long as was planned first, and writes it.

        With 0 seconds it is made in closed form.
        """
        rounds = len(chosen.distances)
        start = self._folder(chosen, rounds - 1) if rounds else None
        planned = _once(self._folder(chosen, rounds).with_suffix(".seconds"), lambda: seconds)
        source = chosen.candidate.base if start is None else str(start)
        request = replace(
            self.request,
            source=source,
            continues=start is not None,
            hold=True,
            deadline=deadline,
            compare=self.request.compare and not chosen.candidate.untouched,  # only its graph differs
        )
        length = {"minutes": planned / 60} if planned else {"steps": 0}
        if torch.cuda.is_available() and chosen.candidate.in_int4 and planned:
            length |= {"round_after": _ROUND_AFTER}
        return run_recipe(request, self._recipe(chosen, rounds, length))

    def _may_try(self, tried: _Tried, number: int, until: float) -> bool:
        return time.monotonic() <= until or self._folder(tried, number).is_dir()

    def _trial(self, tried: _Tried, number: int, seconds: float, steps: int | None) -> _Tried:
        folder = self._folder(tried, number)
        if not folder.is_dir():
            start = self._folder(tried, number - 1) if number else None
            length, amount = {"minutes": seconds / 60}, f"{seconds:.0f} s"
            if steps is not None:
                length, amount = {"steps": steps, "minutes": _OVERTIME * seconds / 60}, f"{steps:,} steps"
            self.request.progress.say(f"round {number + 1}, {amount}: {tried.candidate.name}")
            request = replace(
                self.request,
                source=tried.candidate.base if start is None else str(start),
                output=folder,
                continues=start is not None,
                compare=False,
                pair=False,
                replace=False,
            )
            run_recipe(request, self._recipe(tried, number, length))
        facts = (read_lineage(folder) or {})["steps"][-1]["facts"]
        distance = float(facts["loss"] if facts["validation"] is None else facts["validation"])
        steps_made = (*tried.steps, int(facts["steps"]))
        return replace(tried, distances=(*tried.distances, distance), steps=steps_made)

    def _refused(self, tried: _Tried, error: UserError) -> _Tried:
        self.request.progress.say(f"{tried.candidate.name} is {_REFUSED}{error}")
        return replace(tried, outcome=f"{_REFUSED}{error}")

    def _recipe(self, tried: _Tried, rounds: int, length: Mapping[str, float]) -> Recipe:
        """The cuts and the first training, or further training of a candidate that is cut already."""
        candidate = tried.candidate
        align: dict[str, Any] = {"texts": self.texts} | dict(length)
        align |= _GPU_PACE if torch.cuda.is_available() else _CPU_PACE
        if not candidate.layers:
            for name in ("learning_rate", "optimizer"):  # align has others for static models
                align.pop(name, None)
        if rounds or candidate.base != self.source or not candidate.steps():
            align |= {"teacher": self.source, "teacher_model": self.endpoint_model}
        if candidate.in_int4:
            align["rounding"] = "int4"
        align |= {"start": "keep"} if rounds or candidate.in_space else {"start_texts": self.mapped}
        cuts = candidate.steps(texts=self.texts if candidate.base == self.source else None, heal=self.heals)
        rows = [] if rounds else [row for cut in cuts for row in cut.items()]
        rows += [] if candidate.untouched else [("align", align)]
        return make_recipe(rows, name=candidate.name)

    def _folder(self, tried: _Tried, number: int) -> Path:
        known = json.dumps([tried.candidate.base, tried.candidate.name, number])
        return self.work / blake2b(known.encode(), digest_size=12).hexdigest()


def _left(tried: _Tried, *, late: bool = False) -> _Tried:
    if tried.distances:
        return replace(tried, outcome=f"dropped in round {len(tried.distances)}")
    return replace(tried, outcome="no time to try it") if late else tried


def _standing(tried: _Tried) -> int:
    """Sorts tried candidates first, then rejected ones, then the others."""
    return 1 if tried.refused else 0 if tried.distances else 2
