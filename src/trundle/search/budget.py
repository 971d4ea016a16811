"""How a search spends its time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.methods.align.teacher_vectors import RIDGE_TEXTS, validation_count
from trundle.methods.training import HEALING_TEXTS

_TRIED = 8
"""The most candidates in the first round."""
_KEPT = 2
"""One in this many goes on to the next round."""
_SHORTEST_TRIAL, _SHORTEST_GPU_TRIAL = 20.0, 5.0
"""A trial of fewer seconds says nothing; a GPU learns more in five than two cores in a minute."""
_SHORTEST_GPU_TRAINING = 60.0
"""The last training on a GPU captures its steps first, which takes 25 seconds."""
_LABELLING, _TRYING, _PROVING = 0.25, 0.3, 0.1
"""Shares of the time: teacher vectors, trials, and the end. The rest is for the winner's training."""
_GPU_LABELLING, _GPU_TRYING = 0.1, 0.03
"""The same with a GPU, which labels thousands of texts a second."""
_GPU_TRIAL_OVERHEAD = 5.0
"""Seconds of a trial on a GPU besides its steps: cutting, tokens, capturing, saving."""
_CLOSING = 60.0
"""Seconds that export, timing and the report take on two slow cores, besides encoding."""
_GPU_CLOSING, _GPU_CLOSING_WHOLE = 8.0, 36.0
"""The same beside a GPU, and what a student of the teacher's size adds: its graph runs on the CPU."""
_READINGS = 4
"""How often held-out texts are encoded at the end: by both models to compare, and again for the report."""
_MAPPING, _FEWEST_MAPPED = 1 / 150, 2048
"""The share of the time to encode texts for a candidate's linear map, and the fewest texts for it."""
_HEALING_PASSES, _HEALING = 4, 0.1
"""Passes of the teacher over the texts that healing takes, and the most of the time that it may take."""
_PROVED_SHARE, _FEWEST_PROVED = 5, 200
"""The comparison uses one text for this many training texts, and never fewer than the second number."""
_ENOUGH_TEXTS, _FEWEST_TEXTS = 2000, 200
"""Training gets the first number of texts if twice the planned time allows, and at least the second."""
_READ_PER_STEP = 16 * 3
"""Texts that a CPU encodes in the time of one training step: a batch, forwards and backwards."""
_FEWEST_STEPS, _FEWEST_NEAR_STEPS = 30, 400
"""Fewer steps than these gain nothing on a CPU: for a cut model, and for one that starts near its teacher."""
_CALIBRATED_ON = 512
"""Texts for the ranges of the teacher's vectors, if nothing else needs them."""


@dataclass(frozen=True, kw_only=True)
class _Rung:
    """One round of trials."""

    candidates: int
    seconds: float
    """Training time of each candidate."""


@dataclass(frozen=True, kw_only=True)
class _Timetable:
    """Seconds for each part of the search, and how many texts there is time for."""

    labelling: float
    rungs: tuple[_Rung, ...]
    finishing: float
    mapping: float = 0.0
    """Encoding texts for the linear map of one candidate."""
    closing: float = 0.0
    """After the last training: comparison, export, report."""
    texts: int = 0
    """Texts that the teacher encodes for the candidates; 0 if it encodes none."""
    steps: float = math.inf
    """Steps that a CPU would make in the last training, roughly; if they are too few, it makes none."""
    mapped: int = RIDGE_TEXTS
    """Texts to fit a candidate's linear map on."""
    heals: bool = False
    """Whether there is time to heal the cuts of each candidate."""
    proved: int = MEASURED_TEXTS
    """Held-out texts to compare the result on."""

    @property
    def trains(self) -> bool:
        """Whether there is a last training, or only closed forms."""
        return self.finishing > 0

    def as_json(self) -> dict[str, float]:
        """Returns the planned seconds of each part."""
        trials = sum(rung.candidates * rung.seconds for rung in self.rungs)
        parts = {"teacher vectors": self.labelling, "trials": trials, "training": self.finishing}
        return {name: round(seconds, 1) for name, seconds in (parts | {"end": self.closing}).items()}


_NOTHING_TO_LEARN = _Timetable(labelling=0.0, rungs=(), finishing=0.0)


def _plan_time(
    minutes: float,
    candidates: int,
    *,
    rate: float,
    labels: float | None = None,
    there: float = math.inf,
    on_gpu: bool = False,
    near: bool = False,
    work: float = 1.0,
) -> _Timetable:
    """Plans trials for `there` texts, of which the teacher encodes `rate` a second.

    `labels` is how many vectors a second it gives, if it has some of them already. With time for only one
    trial, the first candidate is trained at once. On a CPU without time for enough steps nothing is trained;
    a first candidate that is `near` its teacher from the start needs more of them. `work` is the share of the
    teacher's FLOPs that it computes.
    """
    labels = labels or rate
    step = _READ_PER_STEP * work / rate
    shortest = _SHORTEST_GPU_TRIAL if on_gpu else max(_SHORTEST_TRIAL, _FEWEST_STEPS * step)
    whole = 60 * minutes
    trying = (_GPU_TRYING if on_gpu else _TRYING) * whole
    texts = int(min(there, _texts_within((_GPU_LABELLING if on_gpu else _LABELLING) * whole, labels)))
    labelling = (texts + validation_count(texts)) / labels
    mapped = min(texts, RIDGE_TEXTS, max(_FEWEST_MAPPED, round(_MAPPING * whole * rate)))
    mapping = mapped / rate + (_GPU_TRIAL_OVERHEAD if on_gpu else 0.0)
    healing = _HEALING_PASSES * min(there, HEALING_TEXTS) / rate
    heals = healing <= _HEALING * whole
    mapping += healing if heals else 0.0
    proved = _proof_texts(texts)
    closing = (_GPU_CLOSING + _GPU_CLOSING_WHOLE * work if on_gpu else _CLOSING) + _READINGS * proved / rate
    if not on_gpu:
        closing = max(_PROVING * whole, closing)
    tried = min(_TRIED, candidates)
    while tried > 1 and trying / len(_counts(tried)) / tried < shortest + mapping:
        tried -= 1
    counts = _counts(tried) if tried > 1 else []
    rungs = tuple(
        _Rung(candidates=count, seconds=trying / len(counts) / count - (0 if number else mapping))
        for number, count in enumerate(counts)
    )
    finishing = _time_left(minutes, labelling + (trying if rungs else mapping), closing)
    times = _Timetable(
        labelling=labelling,
        mapping=mapping,
        rungs=rungs,
        finishing=finishing,
        closing=closing,
        texts=texts,
        mapped=mapped,
        heals=heals,
        proved=proved,
    )
    if on_gpu:
        return times
    times = replace(times, steps=finishing / step)
    if rungs or times.steps >= _fewest_steps(near=near):
        return times
    times = replace(times, heals=heals or healing <= finishing)  # in the time of the training
    return _without_training(times, rate, near=near)


def _fewest_steps(*, near: bool) -> int:
    return _FEWEST_NEAR_STEPS if near else _FEWEST_STEPS


def _without_training(times: _Timetable, rate: float, *, near: bool) -> _Timetable:
    """The same plan in closed form: the teacher encodes the texts of the linear map, if one is needed."""
    texts = min(times.texts, _CALIBRATED_ON if near else times.mapped)
    return replace(
        times,
        labelling=texts / rate,
        mapping=0.0 if near else times.mapping,
        finishing=0.0,
        texts=texts,
        mapped=min(times.mapped, texts),
    )


def _time_left(minutes: float, gone: float, closing: float) -> float:
    """Seconds left to train the winner after `gone` seconds, with `closing` seconds kept for the end."""
    return max(_SHORTEST_TRIAL, 60 * minutes - closing - gone)


def _texts_within(seconds: float, rate: float) -> int:
    affordable = int(seconds * rate)
    found = affordable - validation_count(affordable)
    return found if found >= _ENOUGH_TEXTS else min(_ENOUGH_TEXTS, max(_FEWEST_TEXTS, 2 * found))


def _proof_texts(texts: int) -> int:
    return min(MEASURED_TEXTS, max(_FEWEST_PROVED, texts // _PROVED_SHARE)) if texts else MEASURED_TEXTS


def _counts(tried: int) -> list[int]:
    """Candidates per round, such as 8, 4, 2; each round takes the same time."""
    counts = [tried]
    while counts[-1] > _KEPT:
        counts.append(-(-counts[-1] // _KEPT))
    return counts
