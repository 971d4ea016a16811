"""What a bench found: records that turn into JSON, and the table a person reads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from statistics import median
from typing import Any

from trundle.bench.workload import _Machine


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure, how far the rounds lie from it (median absolute deviation), and the rounds themselves."""

    value: float
    spread: float
    rounds: tuple[float, ...]


def _percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed, interpolated between neighbours."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def _of_rounds(rounds: Sequence[float]) -> Measured:
    """One value a round: their median, which one disturbed round can't move far."""
    middle = median(rounds)
    return Measured(value=middle, spread=median(abs(each - middle) for each in rounds), rounds=tuple(rounds))


def _of_samples(rounds: Sequence[Sequence[float]], percent: float) -> Measured:
    """Many samples a round: the median of the rounds' percentiles.

    Not the percentile of all samples together: a fast round has more of them, so it would count for more.
    """
    return _of_rounds([_percentile(samples, percent) for samples in rounds])


def _rotated(count: int, turn: int) -> list[int]:
    """Who goes when in this round: everyone is first, second and last equally often."""
    return [(turn + place) % count for place in range(count)]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """How the bench was run: with the same models and texts it can be run again."""

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
    """One contestant's figures. Short texts are encoded as queries, long ones as documents."""

    model: str
    engine: str
    device: str
    dimensions: int
    max_tokens: int | None
    parameters: int
    weights_bytes: int | None
    folder_bytes: int | None
    start_seconds: Measured
    load_seconds: Measured
    short_texts_per_second: Measured
    long_texts_per_second: Measured
    short_latency_p50: Measured
    short_latency_p95: Measured
    long_latency_p50: Measured
    long_latency_p95: Measured
    peak_memory_bytes: int
    bare_memory_bytes: int

    @property
    def own_memory_bytes(self) -> int:
        """Peak memory beyond a bare interpreter."""
        return self.peak_memory_bytes - self.bare_memory_bytes


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Models measured side by side in one run.

    `other_cores` is how many cores programs outside the bench kept busy meanwhile, on average.
    """

    models: tuple[_ModelFigures, ...]
    settings: _Settings
    machine: _Machine
    other_cores: float | None
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, with each model's ratios to the first."""
        whole = asdict(self)
        for entry, figures in zip(whole["models"], self.models, strict=True):
            entry["own_memory_bytes"] = figures.own_memory_bytes
            entry["ratios_to_first"] = {
                row.label: _ratio(row.get(figures), row.get(self.models[0])) for row in _TABLE
            }
        return whole


_NOTICEABLE_CORES = 0.2

_Figure = Measured | int | None


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One line of the table: what it shows and how a number of it is written."""

    label: str
    get: Callable[[_ModelFigures], _Figure]
    write: Callable[[float], str]


def _ratio(mine: _Figure, first: _Figure) -> float | None:
    """How many times the first contestant's figure, where both are known."""
    if mine is None or first is None:
        return None
    return _number(mine) / _number(first) if _number(first) else None


def _short_number(value: float) -> str:
    """Three significant digits or all digits before the point, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _megabytes(value: float) -> str:
    """Bytes as a person reads them; 1 MB is a million bytes."""
    return f"{_short_number(value / 1e6)} MB"


def _millions(value: float) -> str:
    """A count of parameters."""
    return f"{_short_number(value / 1e6)} M" if value >= 1e6 else f"{value:,.0f}"


def _milliseconds(value: float) -> str:
    """A short time, given in seconds."""
    return f"{_short_number(value * 1e3)} ms"


def _whole_seconds(value: float) -> str:
    """A longer time."""
    return f"{_short_number(value)} s"


_TABLE = (
    _Row(label="parameters", get=lambda figures: figures.parameters, write=_millions),
    _Row(label="weights on disk", get=lambda figures: figures.weights_bytes, write=_megabytes),
    _Row(label="folder on disk", get=lambda figures: figures.folder_bytes, write=_megabytes),
    _Row(label="short texts/s", get=lambda figures: figures.short_texts_per_second, write=_short_number),
    _Row(label="long texts/s", get=lambda figures: figures.long_texts_per_second, write=_short_number),
    _Row(label="short latency p50", get=lambda figures: figures.short_latency_p50, write=_milliseconds),
    _Row(label="short latency p95", get=lambda figures: figures.short_latency_p95, write=_milliseconds),
    _Row(label="long latency p50", get=lambda figures: figures.long_latency_p50, write=_milliseconds),
    _Row(label="long latency p95", get=lambda figures: figures.long_latency_p95, write=_milliseconds),
    _Row(label="peak memory", get=lambda figures: figures.peak_memory_bytes, write=_megabytes),
    _Row(label="peak beyond bare Python", get=lambda figures: figures.own_memory_bytes, write=_megabytes),
    _Row(label="load the model", get=lambda figures: figures.load_seconds, write=_whole_seconds),
    _Row(label="start to first vector", get=lambda figures: figures.start_seconds, write=_whole_seconds),
)


def rows(result: BenchResult) -> list[tuple[str, ...]]:
    """The table: a heading, then one row per measure and one column per model, with its ratio to the first."""
    first = result.models[0]
    engines = ["" if figures.engine == "torch" else f" {figures.engine}" for figures in result.models]
    known = _names([figures.model for figures in result.models])
    table = [("", *(name + engine for name, engine in zip(known, engines, strict=True)))]
    for row in _TABLE:
        cells = [_cell(row, first)]
        for figures in result.models[1:]:
            times = _ratio(row.get(figures), row.get(first))
            cells.append(_cell(row, figures) + ("" if times is None else f" ({times:.2f}×)"))
        table.append((row.label, *cells))
    return table


def caution(result: BenchResult) -> str | None:
    """A sentence when other programs took cores that the models were to have."""
    spare = result.machine.cores - result.settings.threads
    if result.other_cores is None or result.other_cores - spare < _NOTICEABLE_CORES:
        return None
    return (
        f"other programs kept {result.other_cores:.1f} of {result.machine.cores} cores busy during the bench; "
        "stop them and run again for figures to rely on"
    )


def _names(models: list[str]) -> list[str]:
    """The last part of each folder or hub name; the whole of it where two would read the same."""
    last = [PurePath(model).name or model for model in models]
    uses = Counter(PurePath(model).name or model for model in set(models))
    return [short if uses[short] == 1 else model for short, model in zip(last, models, strict=True)]


def _number(figure: Measured | int) -> float:
    return figure.value if isinstance(figure, Measured) else figure


def _cell(row: _Row, figures: _ModelFigures) -> str:
    figure = row.get(figures)
    if figure is None:
        return "–"
    if isinstance(figure, int):
        return row.write(figure)
    return row.write(figure.value) + (
        f" ±{row.write(figure.spread).split()[0]}" if len(figure.rounds) > 1 else ""
    )
