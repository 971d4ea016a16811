"""What a model may weigh and take, in the words people use: 12MB, 10x, 20M-params, 5ms."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trundle.errors import BadInput
from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.methods.align.teacher_vectors import RIDGE_TEXTS, validation_count

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>k|m|g)?(?P<kind>b|x|ms|-?params|-?parameters)")
_EXAMPLES = "12MB, 10x, 20M-params or 5ms"


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """Limits; None where there is none."""

    bytes: int | None = None
    """Of the file that is shipped: the int8 graph, or the weights."""
    parameters: int | None = None
    milliseconds: float | None = None
    """For one short query on this machine."""

    def __str__(self) -> str:
        told = [
            None if self.bytes is None else f"{self.bytes / 1e6:.4g} MB",
            None if self.parameters is None else f"{self.parameters / 1e6:.4g}M parameters",
            None if self.milliseconds is None else f"{self.milliseconds:.4g} ms a query",
        ]
        return " and ".join(each for each in told if each)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"bytes": self.bytes, "parameters": self.parameters, "milliseconds": self.milliseconds}

    def allows(self, *, file_bytes: int, parameters: int, milliseconds: float | None = None) -> bool:
        """Whether something of this size and speed is within all limits; an unknown speed is."""
        return not self.exceeded(file_bytes=file_bytes, parameters=parameters, milliseconds=milliseconds)

    def exceeded(
        self, *, file_bytes: int, parameters: int, milliseconds: float | None = None
    ) -> tuple[str, ...]:
        """A sentence for each limit that something of this size and speed is over."""
        told = []
        if self.bytes is not None and file_bytes > self.bytes:
            told.append(
                f"the file has {file_bytes / 1e6:.6g} MB, over the budget of {self.bytes / 1e6:.6g} MB"
            )
        if self.parameters is not None and parameters > self.parameters:
            told.append(f"there are {parameters:,} parameters, over the budget of {self.parameters:,}")
        if self.milliseconds is not None and milliseconds is not None and milliseconds > self.milliseconds:
            told.append(f"a query takes {milliseconds:.4g} ms, over the budget of {self.milliseconds:.4g} ms")
        return tuple(told)


def _parse_budget(words: Sequence[str], *, whole_bytes: int) -> _Budget:
    """Read every limit; `10x` is a tenth of the model's own `whole_bytes`. The same kind twice is refused."""
    found: dict[str, tuple[str, _Budget]] = {}
    for word in (part.strip() for each in words for part in each.split(",")):
        match = _PATTERN.fullmatch(word.lower())
        if match is None or float(match["number"]) == 0:
            raise BadInput(f"{word!r} is no budget; say {_EXAMPLES}, or several with commas between")
        amount = float(match["number"]) * _UNITS[match["unit"] or ""]
        limits = {
            "b": _Budget(bytes=int(amount)),
            "x": _Budget(bytes=int(whole_bytes / amount)),
            "ms": _Budget(milliseconds=amount),
        }
        limit = limits.get(match["kind"], _Budget(parameters=int(amount)))
        kind = next(key for key, value in limit.as_json().items() if value is not None)
        if kind in found:
            raise BadInput(f"{found[kind][0]} and {word} both limit the {kind}; keep one of them")
        found[kind] = (word, limit)
    whole = _Budget()
    for kind, (_, limit) in found.items():
        whole = replace(whole, **{kind: limit.as_json()[kind]})
    return whole


_TRIED = 8
"""Candidates at most in the first round."""
_KEPT = 2
"""One of so many goes on to the next round."""
_SHORTEST_TRIAL, _SHORTEST_GPU_TRIAL = 20.0, 5.0
"""Seconds of training under which a trial says nothing; a GPU learns more in five than two cores in a minute."""
_LABELLING, _TRYING, _FINISHING = 0.25, 0.3, 0.35
"""Shares of the time: the teacher's vectors, the trials, the winner's training. The rest is for exporting and proving."""
_PROVING = 1 - _LABELLING - _TRYING - _FINISHING
_CLOSING = 60.0
"""Seconds the end takes on two slow cores however little there is to read: a graph, a race of processes, a page."""
_READINGS = 4
"""How often the texts that prove the result are read at the end: by both models to compare them, and again for the page."""
_MAPPING, _FEWEST_MAPPED = 1 / 150, 2048
"""The share of the time for the texts a candidate's linear map is fitted on, and so many however slow the teacher is."""
_PROVED_SHARE, _FEWEST_PROVED = 5, 200
"""One of so many texts more is there to prove the result by, and so many however slow the teacher is."""
_ENOUGH_TEXTS, _FEWEST_TEXTS = 2000, 200
"""So many are learned from if twice the time for them allows it, and so many however slow the teacher is."""


@dataclass(frozen=True, kw_only=True)
class _Rung:
    """One round of trials."""

    candidates: int
    seconds: float
    """Of training for each of them."""


@dataclass(frozen=True, kw_only=True)
class _Timetable:
    """Seconds for each part of the work, and how many texts there is time for."""

    labelling: float
    rungs: tuple[_Rung, ...]
    finishing: float
    mapping: float = 0.0
    """Reading for the linear map of one candidate, before it learns."""
    closing: float = 0.0
    """Behind the last training: comparing, exporting, the page."""
    texts: int = 0
    """To learn from; 0 where nothing is learned."""
    mapped: int = RIDGE_TEXTS
    """Of these, to fit a candidate's linear map on before it learns."""
    proved: int = MEASURED_TEXTS
    """Held-out ones, to compare the result by."""


_NOTHING_TO_LEARN = _Timetable(labelling=0.0, rungs=(), finishing=0.0)


def _plan_time(
    minutes: float, candidates: int, *, rate: float, there: float = math.inf, on_gpu: bool = False
) -> _Timetable:
    """As many candidates as the time can try for long enough; with time for one alone, none is tried.

    `rate` is how many texts the teacher reads in a second, `there` how many there are. Reading for a linear map and reading at the
    end are much of a short time, so they have a part in it.
    """
    shortest = _SHORTEST_GPU_TRIAL if on_gpu else _SHORTEST_TRIAL
    whole = 60 * minutes
    trying = _TRYING * whole
    texts = int(min(there, _texts_within(_LABELLING * whole, rate)))
    labelling = (texts + validation_count(texts)) / rate
    mapped = min(texts, RIDGE_TEXTS, max(_FEWEST_MAPPED, round(_MAPPING * whole * rate)))
    mapping = mapped / rate
    proved = _proof_texts(texts)
    closing = max(_PROVING * whole, _CLOSING + _READINGS * proved / rate)
    tried = min(_TRIED, candidates)
    while tried > 1 and trying / len(_counts(tried)) / tried < shortest + mapping:
        tried -= 1
    counts = _counts(tried) if tried > 1 else []
    rungs = tuple(
        _Rung(candidates=count, seconds=trying / len(counts) / count - (0 if number else mapping))
        for number, count in enumerate(counts)
    )
    return _Timetable(
        labelling=labelling,
        mapping=mapping,
        rungs=rungs,
        finishing=_time_left(minutes, labelling + (trying if rungs else mapping), closing),
        closing=closing,
        texts=texts,
        mapped=mapped,
        proved=proved,
    )


def _time_left(minutes: float, gone: float, closing: float) -> float:
    """Seconds for the winner when so many have gone: what was lost before is not lost at the end as well."""
    return max(_SHORTEST_TRIAL, 60 * minutes - closing - gone)


def _texts_within(seconds: float, rate: float) -> int:
    """How many to learn from: what fits into this time, beside those that validate; up to `ENOUGH_TEXTS` in twice the time."""
    affordable = int(seconds * rate)
    found = affordable - validation_count(affordable)
    return found if found >= _ENOUGH_TEXTS else min(_ENOUGH_TEXTS, max(_FEWEST_TEXTS, 2 * found))


def _proof_texts(texts: int) -> int:
    """How many held-out texts the result is compared by, when so many were learned from: the teacher has to read these as well."""
    return min(MEASURED_TEXTS, max(_FEWEST_PROVED, texts // _PROVED_SHARE)) if texts else MEASURED_TEXTS


def _counts(tried: int) -> list[int]:
    """8, 4, 2: each round has the same time, so each candidate in it has more."""
    counts = [tried]
    while counts[-1] > _KEPT:
        counts.append(-(-counts[-1] // _KEPT))
    return counts
