"""A fair race: one process per model, one turn at a time, the order rotated from round to round."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from trundle.bench.engines import _engines_of
from trundle.bench.process import _Worker
from trundle.bench.results import BenchResult, _ModelFigures, _of_rounds, _of_samples, _rotated, _Settings
from trundle.bench.workload import _mean_words, _usable_cores, _Workload, this_machine, workload
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.records import versions

_PAUSE = 0.25
"""Seconds between turns: thread pools spin for up to 0.2 s after their work before they go to sleep."""

_Number = TypeVar("_Number", int, float)

_MEASURES = (("throughput", "short"), ("latency", "short"), ("throughput", "long"), ("latency", "long"))


@dataclass(kw_only=True)
class _Contestant:
    """A model in the race, and the answers its workers have given so far."""

    model: str
    engine: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    answers: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """What it is called when something goes wrong."""
        return self.model if self.engine == "torch" else f"{self.model} ({self.engine})"


def bench(
    models: Sequence[str],
    *,
    texts: Iterable[str] | None = None,
    rounds: int = 5,
    seconds: float = 0.5,
    starts: int = 1,
    batch_size: int = 32,
    threads: int | None = None,
    timeout: float = 300.0,
    all_engines: bool = False,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure models side by side; the first is what the others are compared with.

    Each of the four measures runs for `seconds` (at least one batch) in each of `rounds` rounds. `starts` is how
    often each model is loaded in a fresh process. `threads` is the same for every model, all usable cores by
    default. `timeout` is the longest wait for one answer. Give `texts` to measure with words of your own.
    `all_engines` also runs every graph a model was exported to.
    """
    if not models:
        raise BadInput("there is no model to bench; give at least one folder or hub name")
    work = workload(texts)
    settings = _Settings(
        rounds=_positive("rounds", rounds),
        seconds=_positive("seconds", seconds),
        starts=_positive("starts", starts),
        batch_size=_positive("batch_size", batch_size),
        threads=_usable_cores() if threads is None else _positive("threads", threads),
        pause=_PAUSE,
        timeout=_positive("timeout", timeout),
        texts_given=texts is not None,
        texts_fingerprint=work.fingerprint(),
        short_texts=len(work.short),
        short_mean_words=_mean_words(work.short),
        long_texts=len(work.long),
        long_mean_words=_mean_words(work.long),
    )
    contestants = [
        _Contestant(model=model, engine=engine)
        for model in models
        for engine in (_engines_of(model) if all_engines else ["torch"])
    ]
    _race(contestants, work, settings, progress)
    return BenchResult(
        models=tuple(_figures(contestant) for contestant in contestants),
        settings=settings,
        machine=this_machine(),
        other_cores=_other_cores(contestants),
        versions=versions(),
    )


def _race(
    contestants: Sequence[_Contestant], work: _Workload, settings: _Settings, progress: Progress
) -> None:
    """Collect everybody's answers; every worker is gone when this returns or fails."""
    total = len(contestants) * (1 + settings.starts + settings.rounds * len(_MEASURES))
    with (
        tempfile.TemporaryDirectory(prefix="trundle-bench-") as scratch,
        progress.task("bench", total) as advance,
        ExitStack() as running,
    ):
        texts = Path(scratch) / "texts.json"
        texts.write_text(work.as_json(), encoding="utf-8")
        for engine in dict.fromkeys(contestant.engine for contestant in contestants):
            same = [contestant for contestant in contestants if contestant.engine == engine]
            _warm_disk(same, texts, settings)
            advance(len(same))
        workers: dict[int, _Worker] = {}
        for start in range(settings.starts):
            for index in _rotated(len(contestants), start):
                if index in workers:
                    workers.pop(index).close()
                worker = running.enter_context(_worker(contestants[index], settings))
                workers[index] = worker
                _open(contestants[index], worker, texts, settings)
                advance(1)
        for index, contestant in enumerate(contestants):
            workers[index].ask({"ask": "warm"})
            contestant.answers = {measure: [] for measure in _MEASURES}
        for turn in range(settings.rounds):
            for ask, kind in _MEASURES:
                for index in _rotated(len(contestants), turn):
                    time.sleep(settings.pause)
                    answer = workers[index].ask({"ask": ask, "kind": kind, "seconds": settings.seconds})
                    contestants[index].answers[ask, kind].append(answer)
                    advance(1)
        for index, contestant in enumerate(contestants):
            contestant.memory = workers[index].ask({"ask": "memory"})


def _warm_disk(contestants: Sequence[_Contestant], texts: Path, settings: _Settings) -> None:
    """Open each model once in a worker whose times do not count.

    Otherwise whoever starts first pays for reading the libraries from disk, or even for a download. It also
    finds a model that can't be opened before any time is spent on the others.
    """
    with _worker(contestants[0], settings) as worker:
        for contestant in contestants:
            worker.label = contestant.label
            worker.ask(_open_request(contestant, texts, settings))


def _worker(contestant: _Contestant, settings: _Settings) -> _Worker:
    return _Worker(contestant.label, threads=settings.threads, timeout=settings.timeout)


def _open_request(contestant: _Contestant, texts: Path, settings: _Settings) -> dict[str, Any]:
    return {
        "ask": "open",
        "model": contestant.model,
        "engine": contestant.engine,
        "texts": str(texts),
        "threads": settings.threads,
        "batch_size": settings.batch_size,
    }


def _open(contestant: _Contestant, worker: _Worker, texts: Path, settings: _Settings) -> None:
    """Load the model in its own fresh process and note how long it took."""
    answer = worker.ask(_open_request(contestant, texts, settings))
    contestant.starts.append(time.perf_counter() - worker.started)
    contestant.loads.append(answer["load_seconds"])
    contestant.facts = answer["facts"]


def _figures(contestant: _Contestant) -> _ModelFigures:
    """The answers of all rounds, summed up."""

    def rates(kind: str) -> list[float]:
        return [answer["texts"] / answer["seconds"] for answer in contestant.answers["throughput", kind]]

    def samples(kind: str) -> list[list[float]]:
        return [answer["samples"] for answer in contestant.answers["latency", kind]]

    facts = contestant.facts
    return _ModelFigures(
        model=contestant.model,
        engine=contestant.engine,
        device=facts["device"],
        dimensions=facts["dimensions"],
        max_tokens=facts["max_tokens"],
        parameters=facts["parameters"],
        weights_bytes=facts["weights_bytes"],
        folder_bytes=facts["folder_bytes"],
        start_seconds=_of_rounds(contestant.starts),
        load_seconds=_of_rounds(contestant.loads),
        short_texts_per_second=_of_rounds(rates("short")),
        long_texts_per_second=_of_rounds(rates("long")),
        short_latency_p50=_of_samples(samples("short"), 50),
        short_latency_p95=_of_samples(samples("short"), 95),
        long_latency_p50=_of_samples(samples("long"), 50),
        long_latency_p95=_of_samples(samples("long"), 95),
        peak_memory_bytes=contestant.memory["peak"],
        bare_memory_bytes=contestant.memory["bare"],
    )


def _other_cores(contestants: Sequence[_Contestant]) -> float | None:
    """How busy the rest of the machine was during the turns, on average."""
    answers = [
        answer for contestant in contestants for turns in contestant.answers.values() for answer in turns
    ]
    seen = [answer["other_cores"] for answer in answers if answer["other_cores"] is not None]
    return fmean(seen) if seen else None


def _positive(name: str, value: _Number) -> _Number:
    if not (value > 0 and math.isfinite(value)):
        raise BadInput(f"{name} is {value}; give a number above zero")
    return value
