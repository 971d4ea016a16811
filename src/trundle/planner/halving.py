"""How the time is shared: many candidates for a little while, the better half for longer, the winner for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.steps.align_texts import RIDGE_TEXTS, validation_count

TRIED = 8
"""Candidates at most in the first round."""
KEPT = 2
"""One of so many goes on to the next round."""
SHORTEST_TRIAL, SHORTEST_GPU_TRIAL = 20.0, 5.0
"""Seconds of training under which a trial says nothing; a GPU learns more in five than two cores in a minute."""
LABELLING, TRYING, FINISHING = 0.25, 0.3, 0.35
"""Shares of the time: the teacher's vectors, the trials, the winner's training. The rest is for exporting and proving."""
PROVING = 1 - LABELLING - TRYING - FINISHING
CLOSING = 60.0
"""Seconds the end takes on two slow cores however little there is to read: a graph, a race of processes, a page."""
READINGS = 4
"""How often the texts that prove the result are read at the end: by both models to compare them, and again for the page."""
MAPPING, FEWEST_MAPPED = 1 / 150, 2048
"""The share of the time for the texts a candidate's linear map is fitted on, and so many however slow the teacher is."""
PROVED_SHARE, FEWEST_PROVED = 5, 200
"""One of so many texts more is there to prove the result by, and so many however slow the teacher is."""
ENOUGH_TEXTS, FEWEST_TEXTS = 2000, 200
"""So many are learned from if twice the time for them allows it, and so many however slow the teacher is."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One round of trials."""

    candidates: int
    seconds: float
    """Of training for each of them."""


@dataclass(frozen=True, kw_only=True)
class Timetable:
    """Seconds for each part of the work, and how many texts there is time for."""

    labelling: float
    rungs: tuple[Rung, ...]
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


NOTHING_TO_LEARN = Timetable(labelling=0.0, rungs=(), finishing=0.0)


def plan_time(
    minutes: float, candidates: int, *, rate: float, there: float = math.inf, on_gpu: bool = False
) -> Timetable:
    """As many candidates as the time can try for long enough; with time for one alone, none is tried.

    `rate` is how many texts the teacher reads in a second, `there` how many there are. Reading for a linear map and reading at the
    end are much of a short time, so they have a part in it.
    """
    shortest = SHORTEST_GPU_TRIAL if on_gpu else SHORTEST_TRIAL
    whole = 60 * minutes
    trying = TRYING * whole
    texts = int(min(there, texts_within(LABELLING * whole, rate)))
    labelling = (texts + validation_count(texts)) / rate
    mapped = min(texts, RIDGE_TEXTS, max(FEWEST_MAPPED, round(MAPPING * whole * rate)))
    mapping = mapped / rate
    proved = proof_texts(texts)
    closing = max(PROVING * whole, CLOSING + READINGS * proved / rate)
    tried = min(TRIED, candidates)
    while tried > 1 and trying / len(_counts(tried)) / tried < shortest + mapping:
        tried -= 1
    counts = _counts(tried) if tried > 1 else []
    rungs = tuple(
        Rung(candidates=count, seconds=trying / len(counts) / count - (0 if number else mapping))
        for number, count in enumerate(counts)
    )
    return Timetable(
        labelling=labelling,
        mapping=mapping,
        rungs=rungs,
        finishing=time_left(minutes, labelling + (trying if rungs else mapping), closing),
        closing=closing,
        texts=texts,
        mapped=mapped,
        proved=proved,
    )


def time_left(minutes: float, gone: float, closing: float) -> float:
    """Seconds for the winner when so many have gone: what was lost before is not lost at the end as well."""
    return max(SHORTEST_TRIAL, 60 * minutes - closing - gone)


def texts_within(seconds: float, rate: float) -> int:
    """How many to learn from: what fits into this time, beside those that validate; up to `ENOUGH_TEXTS` in twice the time."""
    affordable = int(seconds * rate)
    found = affordable - validation_count(affordable)
    return found if found >= ENOUGH_TEXTS else min(ENOUGH_TEXTS, max(FEWEST_TEXTS, 2 * found))


def proof_texts(texts: int) -> int:
    """How many held-out texts the result is compared by, when so many were learned from: the teacher has to read these as well."""
    return min(MEASURED_TEXTS, max(FEWEST_PROVED, texts // PROVED_SHARE)) if texts else MEASURED_TEXTS


def _counts(tried: int) -> list[int]:
    """8, 4, 2: each round has the same time, so each candidate in it has more."""
    counts = [tried]
    while counts[-1] > KEPT:
        counts.append(-(-counts[-1] // KEPT))
    return counts
