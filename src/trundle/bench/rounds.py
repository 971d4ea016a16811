"""A fair benchmark: one process per model, one model at a time, in an order that rotates every round."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from statistics import fmean
from typing import IO, Any, Self

from trundle.bench.child import _engines_of
from trundle.bench.workload import (
    BenchResult,
    _BenchSettings,
    _mean_words,
    _ModelFigures,
    _of_rounds,
    _of_samples,
    _Workload,
    this_machine,
    workload,
)
from trundle.errors import BadInput, BadModel, TrundleError, UserError
from trundle.progress import SILENT, Progress
from trundle.records import versions
from trundle.runtime.description import usable_cores

_COMMAND = (sys.executable, "-P", "-m", "trundle.bench.child")
"""-P: a file in the user's folder must not shadow a library of the same name."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
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
    trust: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    starts: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    answers: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    memory: Mapping[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.model if self.engine == "torch" else f"{self.model} ({self.engine})"


def bench(
    models: Sequence[str],
    *,
    texts: Iterable[str] | None = None,
    options: BenchOptions | None = None,
    all_engines: bool = False,
    only: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure models in one run; the first is the baseline that the others are compared with.

    Pass `texts` to measure with your own words. `all_engines` also runs every exported graph of a model,
    `only` runs each model in the one engine that it names for it.
    """
    if not models:
        raise BadInput("there is no model to bench; pass at least one folder or hub name")
    options = options or BenchOptions()
    for name, value in asdict(options).items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise BadInput(f"{name} is {value}; pass a number above zero")
    work = workload(texts)
    settings = _BenchSettings(
        **asdict(options) | {"threads": options.threads or usable_cores()},
        pause=_PAUSE,
        texts_given=texts is not None,
        texts_fingerprint=work.fingerprint(),
        short_texts=len(work.short),
        short_mean_words=_mean_words(work.short),
        long_texts=len(work.long),
        long_mean_words=_mean_words(work.long),
    )
    entries = [
        _BenchedModel(model=model, engine=engine, trust=trust_remote_code)
        for model in models
        for engine in ([only[model]] if only else _engines_of(model) if all_engines else ["torch"])
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


def _rotated(count: int, turn: int) -> list[int]:
    """The order in this round; over the rounds every model is first, second and last equally often."""
    return [(turn + place) % count for place in range(count)]


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
            # Times here do not count: no model must pay for reading libraries from disk or for a download.
            # A model that can't be loaded fails before time is spent on the others.
            with _worker(same[0], settings) as worker:
                for entry in same:
                    worker.label = entry.label
                    worker.ask(_load_request(entry, texts, settings))
                    advance(1)
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


def _worker(entry: _BenchedModel, settings: _BenchSettings) -> _Worker:
    return _Worker(entry.label, threads=settings.threads, timeout=settings.timeout)


def _load_request(entry: _BenchedModel, texts: Path, settings: _BenchSettings) -> dict[str, Any]:
    return {
        "ask": "open",
        "model": entry.model,
        "engine": entry.engine,
        "trust": entry.trust,
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


class _Worker:
    """One worker process. It ends when the `with` block is left."""

    def __init__(
        self, label: str, *, threads: int, timeout: float, command: Sequence[str] = _COMMAND
    ) -> None:
        self.label = label
        self._timeout = timeout
        self._answers: SimpleQueue[str] = SimpleQueue()
        # A file, because a pipe that no one reads would fill up and block the worker.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self.started = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**os.environ, **dict.fromkeys(_THREAD_VARIABLES, str(threads))},
            text=True,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C reaches only the parent, which then ends the workers
        )
        self._reader = threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer; a worker that fails, dies or hangs raises an error."""
        pipe = self._process.stdin
        assert pipe is not None
        with suppress(BrokenPipeError):  # it died: the missing answer is reported below
            pipe.write(json.dumps(request) + "\n")
            pipe.flush()
        try:
            line = self._answers.get(timeout=self._timeout)
        except Empty:
            waited = f"gave no answer within {self._timeout:g} s"
            raise TrundleError(f"{self.label} {waited}; allow it more time, or leave it out") from None
        if not line:
            raise self._died()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            sentence, kind = str(reply["error"]), reply["kind"]
            if kind == "crash":
                sentence = f"{self.label} failed in the benchmark ({sentence}); try the model alone"
            raise {"model": BadModel, "user": UserError}.get(kind, TrundleError)(sentence)
        return reply

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()

    def _died(self) -> TrundleError:
        code, name = self._process.wait(), f"the process of {self.label}"
        if code == -signal.SIGKILL:
            return TrundleError(f"{name} was killed from outside; free some memory, or bench fewer models")
        self._stderr.seek(0)
        said = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        last = said[-1].strip() if said else signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return TrundleError(f"{name} died ({last}); try the model alone to see why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def _read(pipe: IO[str], answers: SimpleQueue[str]) -> None:
    """Collect answers, in a thread so that the parent can time out; an empty answer is the end."""
    for line in pipe:  # other lines are printed while the interpreter starts, or truncated
        if line.startswith("{") and line.endswith("\n"):
            answers.put(line)
    answers.put("")
