"""Trials and the last training: each is a run of `compress` whose folder is named by all that leads to it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from trundle.cache import cache_folder
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, BadModel, ImpossibleCut, UserError
from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.folders import write_whole
from trundle.pipeline.compress import Run, compress
from trundle.progress import Progress
from trundle.recipe import Recipe, parse_recipe
from trundle.records import LINEAGE_FILE, read_lineage
from trundle.search.budget import _Timetable
from trundle.search.outcome import _REFUSED, _Tried

_TRIALS = "trials"
_RATE_FILE, _CONTEST_OVER, _WRITTEN_FILE = "texts-a-second", "contest-over", "written"


def _once(place: Path, measure: Callable[[], float]) -> float:
    """A figure as it was when it was first measured."""
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, repr(measure()))
    return float(place.read_text())


def _mark_written(work: Path, output: str | Path) -> None:
    """The output is this search's from here on, until the search is done and its work is gone."""
    work.mkdir(parents=True, exist_ok=True)
    write_whole(work / _WRITTEN_FILE, _identity(output))


def _wrote(work: Path, output: str | Path) -> bool:
    """Whether the search that has its work here has written this output, and nobody since, and was stopped before its end."""
    place = work / _WRITTEN_FILE
    return place.is_file() and place.read_text() == _identity(output)


def _any_wrote(output: str | Path) -> bool:
    """Whether some search has, told before it is known which one goes on."""
    works = cache_folder() / _TRIALS
    return works.is_dir() and any(_wrote(work, output) for work in works.iterdir())


def _identity(output: str | Path) -> str:
    lineage = Path(output).resolve() / LINEAGE_FILE
    return f"{lineage} {lineage.stat().st_mtime_ns if lineage.is_file() else None}"


_GPU_PACE = {"batch_size": 512, "learning_rate": 5e-4, "warmup": 200}
_CPU_PACE = {"batch_size": 16, "warmup": 20}
"""Where a step takes milliseconds, large batches learn more in a minute; where it takes a second, small ones do."""

_OVERTIME = 2.0
"""So many times as long as it was given, a trial may take for as many steps as the first one made."""
_HOPELESS = 1.25
"""One that is so many times as far from the teacher as the leader is not tried again."""
_REFUSALS = (ImpossibleCut, BadInput, BadModel)
"""How a step says that a candidate can't be made."""


@dataclass(frozen=True, kw_only=True)
class _Trials:
    """Candidates of one model, learning from the same texts."""

    source: str
    corpus: Corpus
    texts: int
    """How many of the corpus."""
    mapped: int
    """By how many of these a candidate's linear map is fitted before it learns."""
    work: Path
    seed: int
    trust_remote_code: bool
    progress: Progress
    proof_texts: int = MEASURED_TEXTS
    """How many held-out texts the result is compared with the model by."""
    fresh: bool = False
    """Whether nothing is taken over from a run that was stopped."""

    def contest(self, tried: Sequence[_Tried], timetable: _Timetable, *, until: float) -> list[_Tried]:
        """Round by round the better half goes on, but nothing hopeless; best first, those that were dropped behind.

        The first trial sets the pace, by the clock; all others make as many steps for their time. By the clock alone a trial would also
        measure what else the machine did, and how fast a candidate is rather than how good.
        One that a step refuses makes room for the next, and keeps the step's sentence; it is the end only where all are
        refused. A trial also takes time to read and to cut. When the clock has reached `until` no other is begun, and the
        best of the round so far is the winner; what a stopped search has tried is taken over at any time.
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
                pace = (
                    pace or running[-1].steps[-1] / rung.seconds or None
                )  # one that is near enough makes none
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
            self.progress.say(
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
        self,
        ranked: Sequence[_Tried],
        seconds: Callable[[_Tried], float],
        output: str | Path,
        *,
        replace_output: bool,
        pair: bool,
    ) -> tuple[Run, list[_Tried]]:
        """Finish the first that no step refuses, in the time there is for it then; also the ranking as it is after that."""
        waiting, refused = [each for each in ranked if not each.refused], []
        errors: list[UserError] = []
        while waiting:
            best = waiting.pop(0)
            try:
                run = self.finish(best, seconds(best), output, replace_output=replace_output, pair=pair)
            except _REFUSALS as error:
                errors.append(error)
                refused.append(self._refused(best, error))
                continue
            rest = [*waiting, *refused, *(each for each in ranked if each.refused)]
            return run, [replace(best, outcome="chosen"), *sorted(rest, key=_standing)]
        raise errors[0]

    def finish(
        self,
        chosen: _Tried,
        seconds: float,
        output: str | Path,
        *,
        replace_output: bool,
        pair: bool,
    ) -> Run:
        """Train the winner on from its last trial, and write it; what it learned is kept until the run is settled.

        One that goes on trains for as long as was planned at first.
        """
        rounds = len(chosen.distances)
        start = self._folder(chosen, rounds - 1) if rounds else None
        planned = _once(self._folder(chosen, rounds).with_suffix(".seconds"), lambda: seconds)
        return compress(
            chosen.candidate.base if start is None else str(start),
            self._recipe(chosen, rounds, {"minutes": planned / 60}),
            output=output,
            corpus=self.corpus,
            seed=self.seed,
            replace=replace_output,
            pair=pair,
            continues=start is not None,
            measured_texts=self.proof_texts,
            hold=True,
            trust_remote_code=self.trust_remote_code,
            fresh=self.fresh,
            progress=self.progress,
        )

    def _may_try(self, tried: _Tried, number: int, until: float) -> bool:
        return time.monotonic() <= until or self._folder(tried, number).is_dir()

    def _trial(self, tried: _Tried, number: int, seconds: float, steps: int | None) -> _Tried:
        folder = self._folder(tried, number)
        if not folder.is_dir():
            start = self._folder(tried, number - 1) if number else None
            length = (
                {"minutes": seconds / 60}
                if steps is None
                else {"steps": steps, "minutes": _OVERTIME * seconds / 60}
            )
            told = f"{seconds:.0f} s" if steps is None else f"{steps:,} steps"
            self.progress.say(f"round {number + 1}, {told}: {tried.candidate.name}")
            compress(
                tried.candidate.base if start is None else str(start),
                self._recipe(tried, number, length),
                output=folder,
                corpus=self.corpus,
                seed=self.seed,
                continues=start is not None,
                compare=False,
                trust_remote_code=self.trust_remote_code,
                fresh=self.fresh,
                progress=self.progress,
            )
        lineage = read_lineage(folder) or {}
        facts = lineage["steps"][-1]["facts"]
        distance = facts["validation"] if facts["validation"] is not None else facts["loss"]
        return replace(
            tried,
            distances=(*tried.distances, float(distance)),
            steps=(*tried.steps, int(facts["steps"])),
        )

    def _refused(self, tried: _Tried, error: UserError) -> _Tried:
        self.progress.say(f"{tried.candidate.name} is {_REFUSED}{error}")
        return replace(tried, outcome=f"{_REFUSED}{error}")

    def _recipe(self, tried: _Tried, rounds: int, length: Mapping[str, float]) -> Recipe:
        """The cuts and the first training, or the next training of what is cut already."""
        candidate = tried.candidate
        align: dict[str, Any] = {"texts": self.texts} | dict(length)
        align |= _GPU_PACE if torch.cuda.is_available() else _CPU_PACE
        if not candidate.layers:
            align.pop("learning_rate", None)  # a table learns faster, which `align` knows
        if rounds or candidate.base != self.source or not candidate.steps():
            align["teacher"] = self.source
        if candidate.in_int4:
            align["rounding"] = "int4"
        align |= {"start": "keep"} if rounds else {"start_texts": self.mapped}
        cuts = candidate.steps(texts=self.texts if candidate.base == self.source else None)
        steps = [*([] if rounds else cuts), *([] if candidate.untouched else [{"align": align}])]
        return parse_recipe(json.dumps({"steps": steps}), name=candidate.name)

    def _folder(self, tried: _Tried, number: int) -> Path:
        known = json.dumps([tried.candidate.base, tried.candidate.name, number])
        return self.work / blake2b(known.encode(), digest_size=12).hexdigest()


def _left(tried: _Tried, *, late: bool = False) -> _Tried:
    """One that goes no further after the rounds it was in."""
    if tried.distances:
        return replace(tried, outcome=f"dropped in round {len(tried.distances)}")
    return replace(tried, outcome="no time to try it") if late else tried


def _standing(tried: _Tried) -> int:
    """Those that were tried come first, then those that were refused, then all others."""
    return 1 if tried.refused else 0 if tried.distances else 2
