"""A fair benchmark: one process per model, one model at a time, in an order that rotates from round to round."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from trundle.bench.child import _engines_of
from trundle.bench.process import _Worker
from trundle.bench.results import (
    BenchResult,
    _BenchSettings,
    _ModelFigures,
    _of_rounds,
    _of_samples,
    _rotated,
)
from trundle.bench.workload import _mean_words, _usable_cores, _Workload, this_machine, workload
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.records import versions

_PAUSE = 0.25
"""Seconds between measurements: thread pools spin for up to 0.2 s before they sleep."""

_MEASURES = (("throughput", "short"), ("latency", "short"), ("throughput", "long"), ("latency", "long"))


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """How models are measured."""

    rounds: int = 5
    seconds: float = 0.5
    """Time of each of the four measurements in each round; at least one batch."""
    starts: int = 1
    """How often each model is loaded in a fresh process."""
    batch_size: int = 32
    threads: int | None = None
    """The same for every model; all usable cores by default."""
    timeout: float = 300.0
    """The longest wait for one answer, in seconds."""


@dataclass(kw_only=True)
class _BenchedModel:
    """A model with an engine, and the answers of its workers."""

    model: str
    engine: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    answers: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in error messages."""
        return self.model if self.engine == "torch" else f"{self.model} ({self.engine})"


def bench(
    models: Sequence[str],
    *,
    texts: Iterable[str] | None = None,
    options: BenchOptions | None = None,
    all_engines: bool = False,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure models in one run; the first is the baseline that the others are compared with.

    Pass `texts` to measure with your own words. `all_engines` also runs every exported graph of a model.
    """
    if not models:
        raise BadInput("there is no model to bench; pass at least one folder or hub name")
    options = options or BenchOptions()
    for name, value in asdict(options).items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise BadInput(f"{name} is {value}; pass a number above zero")
    work = workload(texts)
    settings = _BenchSettings(
        **asdict(options) | {"threads": options.threads or _usable_cores()},
        pause=_PAUSE,
        texts_given=texts is not None,
        texts_fingerprint=work.fingerprint(),
        short_texts=len(work.short),
        short_mean_words=_mean_words(work.short),
        long_texts=len(work.long),
        long_mean_words=_mean_words(work.long),
    )
    entries = [
        _BenchedModel(model=model, engine=engine)
        for model in models
        for engine in (_engines_of(model) if all_engines else ["torch"])
    ]
    _measure(entries, work, settings, progress)
    answers = [answer for each in entries for measured in each.answers.values() for answer in measured]
    others = [answer["other_cores"] for answer in answers if answer["other_cores"] is not None]
    return BenchResult(
        models=tuple(_figures(entry) for entry in entries),
        settings=settings,
        machine=this_machine(),
        other_cores=fmean(others) if others else None,
        versions=versions(),
    )


def _measure(
    entries: Sequence[_BenchedModel], work: _Workload, settings: _BenchSettings, progress: Progress
) -> None:
    """Collect the answers of all workers; every worker has ended when this returns or fails."""
    total = len(entries) * (1 + settings.starts + settings.rounds * len(_MEASURES))
    with (
        tempfile.TemporaryDirectory(prefix="trundle-bench-") as scratch,
        progress.task("bench", total) as advance,
        ExitStack() as running,
    ):
        texts = Path(scratch) / "texts.json"
        texts.write_text(work.as_json(), encoding="utf-8")
        for engine in dict.fromkeys(entry.engine for entry in entries):
            same = [entry for entry in entries if entry.engine == engine]
            _warm_disk(same, texts, settings)
            advance(len(same))
        workers: dict[int, _Worker] = {}
        for start in range(settings.starts):
            for index in _rotated(len(entries), start):
                if index in workers:
                    workers.pop(index).close()
                entry = entries[index]
                worker = workers[index] = running.enter_context(_worker(entry, settings))
                answer = worker.ask(_load_request(entry, texts, settings))
                entry.starts.append(time.perf_counter() - worker.started)
                entry.loads.append(answer["load_seconds"])
                entry.facts = answer["facts"]
                advance(1)
        for index, entry in enumerate(entries):
            workers[index].ask({"ask": "warm"})
            entry.answers = {measure: [] for measure in _MEASURES}
        for turn in range(settings.rounds):
            for ask, kind in _MEASURES:
                for index in _rotated(len(entries), turn):
                    time.sleep(settings.pause)
                    answer = workers[index].ask({"ask": ask, "kind": kind, "seconds": settings.seconds})
                    entries[index].answers[ask, kind].append(answer)
                    advance(1)
        for index, entry in enumerate(entries):
            entry.memory = workers[index].ask({"ask": "memory"})


def _warm_disk(entries: Sequence[_BenchedModel], texts: Path, settings: _BenchSettings) -> None:
    """Load each model once in a worker whose times do not count.

    Otherwise the first model would pay for reading the libraries from disk, or for a download. It also finds a model
    that can't be loaded before time is spent on the others.
    """
    with _worker(entries[0], settings) as worker:
        for entry in entries:
            worker.label = entry.label
            worker.ask(_load_request(entry, texts, settings))


def _worker(entry: _BenchedModel, settings: _BenchSettings) -> _Worker:
    return _Worker(entry.label, threads=settings.threads, timeout=settings.timeout)


def _load_request(entry: _BenchedModel, texts: Path, settings: _BenchSettings) -> dict[str, Any]:
    return {
        "ask": "open",
        "model": entry.model,
        "engine": entry.engine,
        "texts": str(texts),
        "threads": settings.threads,
        "batch_size": settings.batch_size,
    }


def _figures(entry: _BenchedModel) -> _ModelFigures:
    """The answers of all rounds, summarised."""

    def rates(kind: str) -> list[float]:
        return [answer["texts"] / answer["seconds"] for answer in entry.answers["throughput", kind]]

    def samples(kind: str) -> list[list[float]]:
        return [answer["samples"] for answer in entry.answers["latency", kind]]

    return _ModelFigures(
        model=entry.model,
        engine=entry.engine,
        **entry.facts,
        start_seconds=_of_rounds(entry.starts),
        load_seconds=_of_rounds(entry.loads),
        short_texts_per_second=_of_rounds(rates("short")),
        long_texts_per_second=_of_rounds(rates("long")),
        short_latency_p50=_of_samples(samples("short"), 50),
        short_latency_p95=_of_samples(samples("short"), 95),
        long_latency_p50=_of_samples(samples("long"), 50),
        long_latency_p95=_of_samples(samples("long"), 95),
        peak_memory_bytes=entry.memory["peak"],
        bare_memory_bytes=entry.memory["bare"],
    )
