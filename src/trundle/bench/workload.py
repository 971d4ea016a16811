"""The texts of a benchmark, the machine it runs on, and its results, as JSON and as a table.

All texts of a kind (short ones like queries, long ones like documents) have about the same number of words,
so that a faster model does not get easier or harder texts. With a BERT-like tokenizer a short text is about
10 tokens and a long one about 200.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, cycle, islice
from operator import add
from pathlib import Path
from statistics import median
from typing import Any

from trundle.errors import BadInput
from trundle.runtime.description import usable_cores

_SHORT_WORDS = range(6, 10)
_LONG_WORDS = range(165, 196, 5)
_SHORT_TEXTS = 256
_LONG_TEXTS = 64
_LONGEST_WORD = 30
_PIECE = 2
"""Longer words are a script without spaces or no language: they are divided into pieces of this length."""

_PATTERNS = (
    "The {adjective} {noun} {verb} the {noun} {where}.",
    "When a {noun} {verb} the {adjective} {noun}, the {noun} {verb} it {where}.",
    "Most people think that the {noun} {verb} some {adjective} {noun}.",
    "How often does one {noun} change what the {adjective} {noun} costs {where}?",
    "In that year the {noun} with the {noun} {verb} every {adjective} {noun} {where}.",
)
_WORDS = {
    "noun": (
        "bank book bridge child city company country doctor engine family farmer field garden house "
        "island language law letter market model morning music paper patient plan price problem river "
        "road room school science season story student system teacher team train village war water "
        "window winter worker world"
    ),
    "verb": (
        "becomes brings builds buys carries changes contains explains finds follows helps holds joins "
        "keeps leads makes moves needs opens pays reaches sees sells serves shows supports takes teaches "
        "tests uses visits wants"
    ),
    "adjective": (
        "bright common early empty famous free full great heavy important large late little local long "
        "modern new old open poor public quiet real rich short simple small strong warm young"
    ),
    "where": (
        "again|at night|by the sea|during the summer|for many years|from the north|in the old town|"
        "near the station|on the other side|over time|under the new rules|without much help"
    ),
}
_NOTICEABLE_CORES = 0.2


@dataclass(frozen=True, kw_only=True)
class _Workload:
    short: tuple[str, ...]
    long: tuple[str, ...]

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    def fingerprint(self) -> str:
        return hashlib.sha256(self.as_json().encode()).hexdigest()


def workload(texts: Iterable[str] | None = None) -> _Workload:
    """Short and long texts made of the words of `texts`, or of generated English; deterministic."""
    words = _invented_words() if texts is None else _given_words(texts)
    return _Workload(
        short=_cut(words, islice(cycle(_SHORT_WORDS), _SHORT_TEXTS)),
        long=_cut(words, islice(cycle(_LONG_WORDS), _LONG_TEXTS)),
    )


def _mean_words(texts: tuple[str, ...]) -> float:
    return sum(len(text.split()) for text in texts) / len(texts)


def _cut(words: Iterator[str], counts: Iterable[int]) -> tuple[str, ...]:
    return tuple(" ".join(islice(words, count)) for count in counts)


def _given_words(texts: Iterable[str]) -> Iterator[str]:
    """The words of the user's texts, repeated without end."""

    def split(text: object) -> Iterator[str]:
        if not isinstance(text, str):
            raise BadInput(f"a text is a {type(text).__name__}, not a string; convert it first")
        for word in text.split():
            length = len(word) if len(word) <= _LONGEST_WORD else _PIECE
            yield from (word[start : start + length] for start in range(0, len(word), length))

    enough = _SHORT_TEXTS * max(_SHORT_WORDS) + _LONG_TEXTS * max(_LONG_WORDS)
    words = list(islice(chain.from_iterable(map(split, texts)), enough))
    if not words:
        raise BadInput("the texts hold no words; pass at least one sentence, or no texts at all")
    return cycle(words)


def _invented_words() -> Iterator[str]:
    """An endless stream of English sentences, word by word."""
    choices = {kind: words.split("|" if "|" in words else None) for kind, words in _WORDS.items()}
    rng = random.Random(0)
    while True:
        sentence = re.sub(r"{(\w+)}", lambda gap: rng.choice(choices[gap[1]]), rng.choice(_PATTERNS))
        yield from sentence.split()


@dataclass(frozen=True, kw_only=True)
class _Machine:
    cpu: str
    cores: int
    usable_cores: int
    memory_bytes: int
    system: str


def this_machine() -> _Machine:
    """The machine this process runs on."""
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.is_file() else None
    return _Machine(
        cpu=named[1] if named else platform.processor() or platform.machine(),
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        system=platform.platform(),
    )


_CpuClock = tuple[float, float, float | None]
"""Wall time, CPU seconds of this process, and CPU seconds of the full machine if it reports them."""


def _cpu_clock() -> _CpuClock:
    stat, busy = Path("/proc/stat"), None
    if stat.is_file():
        user, nice, system, _idle, _waiting, *rest = map(int, stat.read_text().split("\n", 1)[0].split()[1:9])
        busy = (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), time.process_time(), busy


def _other_cores(before: _CpuClock, after: _CpuClock) -> float | None:
    """Cores that other programs kept busy between two readings."""
    (wall, own, machine), (later, later_own, later_machine) = before, after
    if machine is None or later_machine is None:
        return None
    return max(0.0, ((later_machine - machine) - (later_own - own)) / (later - wall))


@dataclass(frozen=True, kw_only=True)
class _Measurement:
    """A figure, its spread over the rounds (median absolute deviation), and the value of each round."""

    value: float
    spread: float
    rounds: tuple[float, ...]


def _of_rounds(rounds: Sequence[float]) -> _Measurement:
    """One value per round: their median, so that one disturbed round has little influence."""
    middle = median(rounds)
    spread = median(abs(each - middle) for each in rounds)
    return _Measurement(value=middle, spread=spread, rounds=tuple(rounds))


def _of_samples(rounds: Sequence[Sequence[float]], percent: float) -> _Measurement:
    import numpy as np  # not in a worker, whose memory is measured

    # A percentile of all samples together would give more weight to fast rounds, which have more samples.
    return _of_rounds([float(np.percentile(samples, percent)) for samples in rounds])


@dataclass(frozen=True, kw_only=True)
class _BenchSettings:
    """How the benchmark was run: with the same models and texts it can be repeated."""

    rounds: int
    seconds: float
    starts: int
    batch_size: int
    threads: int
    pause: float
    timeout: float
    texts_given: bool
    texts_fingerprint: str
    short_texts: int
    short_mean_words: float
    long_texts: int
    long_mean_words: float


@dataclass(frozen=True, kw_only=True)
class _ModelFigures:
    """One model's figures. Short texts are encoded as queries, long ones as documents."""

    model: str
    engine: str
    device: str
    dimensions: int
    max_tokens: int | None
    parameters: int
    weights_bytes: int | None
    folder_bytes: int | None
    start_seconds: _Measurement
    load_seconds: _Measurement
    short_texts_per_second: _Measurement
    long_texts_per_second: _Measurement
    short_latency_p50: _Measurement
    short_latency_p95: _Measurement
    long_latency_p50: _Measurement
    long_latency_p95: _Measurement
    peak_memory_bytes: int
    bare_memory_bytes: int

    @property
    def own_memory_bytes(self) -> int:
        return self.peak_memory_bytes - self.bare_memory_bytes


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Models measured in one run."""

    models: tuple[_ModelFigures, ...]
    settings: _BenchSettings
    machine: _Machine
    other_cores: float | None
    """Cores that other programs kept busy meanwhile, on average."""
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, with each model's ratios to the first."""
        result = asdict(self)
        for entry, figures in zip(result["models"], self.models, strict=True):
            entry["own_memory_bytes"] = figures.own_memory_bytes
            entry["ratios_to_first"] = {
                label: _ratio(figures, self.models[0], field) for label, (field, _) in _TABLE.items()
            }
        return result


_Figure = _Measurement | int | None
_Write = Callable[[float], str]


def _short_number(value: float) -> str:
    """Three significant digits or all digits before the point, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _in_units(per_one: float, unit: str) -> _Write:
    return lambda value: f"{_short_number(value * per_one)} {unit}"


_MEGABYTES, _MILLISECONDS, _SECONDS = _in_units(1e-6, "MB"), _in_units(1e3, "ms"), _in_units(1, "s")
_TABLE: Mapping[str, tuple[str, _Write]] = {
    "parameters": ("parameters", _in_units(1e-6, "M")),
    "weights on disk": ("weights_bytes", _MEGABYTES),
    "folder on disk": ("folder_bytes", _MEGABYTES),
    "short texts/s": ("short_texts_per_second", _short_number),
    "long texts/s": ("long_texts_per_second", _short_number),
    "short latency p50": ("short_latency_p50", _MILLISECONDS),
    "short latency p95": ("short_latency_p95", _MILLISECONDS),
    "long latency p50": ("long_latency_p50", _MILLISECONDS),
    "long latency p95": ("long_latency_p95", _MILLISECONDS),
    "peak memory": ("peak_memory_bytes", _MEGABYTES),
    "peak beyond bare Python": ("own_memory_bytes", _MEGABYTES),
    "load the model": ("load_seconds", _SECONDS),
    "start to first vector": ("start_seconds", _SECONDS),
}
"""The field of each row, and how its figures are formatted."""


def rows(result: BenchResult) -> list[tuple[str, ...]]:
    """The table: a heading, then one row per metric and one column per model, with its ratio to the first."""
    first = result.models[0]
    engines = ["" if figures.engine == "torch" else f" {figures.engine}" for figures in result.models]
    models = list(dict.fromkeys(figures.model for figures in result.models))
    names = dict(zip(models, short_names(models), strict=True))
    titles = (names[figures.model] + engine for figures, engine in zip(result.models, engines, strict=True))
    table = [("", *titles)]
    for label, (field, write) in _TABLE.items():
        cells = [_cell(getattr(figures, field), write) for figures in result.models]
        ratios = [_ratio(figures, first, field) for figures in result.models[1:]]
        shown = ["", *("" if times is None else f" ({times:.2f}×)" for times in ratios)]
        table.append((label, *map(add, cells, shown)))
    return table


def caution(result: BenchResult) -> str | None:
    """A warning if other programs used cores that the models needed."""
    spare = result.machine.cores - result.settings.threads
    if result.other_cores is None or result.other_cores - spare < _NOTICEABLE_CORES:
        return None
    busy = f"{result.other_cores:.1f} of {result.machine.cores} cores"
    return f"other programs kept {busy} busy; stop them and run it again for reliable figures"


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the end of each path, long enough to differ from the others."""
    parts = [Path(path).resolve().parts for path in paths]
    shown = []
    for own in parts:
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in set(parts)) > 1:
            length += 1
        shown.append("/".join(own[-length:]))
    return [
        f"{name} ({shown[:place].count(name) + 1})" if name in shown[:place] else name
        for place, name in enumerate(shown)
    ]


def _number(figure: _Measurement | int) -> float:
    return figure.value if isinstance(figure, _Measurement) else figure


def _ratio(figures: _ModelFigures, first: _ModelFigures, field: str) -> float | None:
    mine, base = getattr(figures, field), getattr(first, field)
    return None if mine is None or base is None or not _number(base) else _number(mine) / _number(base)


def _cell(figure: _Figure, write: _Write) -> str:
    if figure is None:
        return "–"
    spread = ""
    if isinstance(figure, _Measurement) and len(figure.rounds) > 1:
        spread = f" ±{write(figure.spread).split()[0]}"
    return write(_number(figure)) + spread
