"""Results of a benchmark: records that become JSON, and the table that is printed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from trundle.bench.workload import _Machine

_NOTICEABLE_CORES = 0.2


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A figure, its spread over the rounds (median absolute deviation), and the value of each round."""

    value: float
    spread: float
    rounds: tuple[float, ...]


def _percentile(samples: Sequence[float], percent: float) -> float:
    """The value that `percent` of the samples do not exceed, interpolated between neighbours."""
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    below, above = ordered[math.floor(place)], ordered[math.ceil(place)]
    return below + (above - below) * (place - math.floor(place))


def _of_rounds(rounds: Sequence[float]) -> Measurement:
    """One value per round: their median, so that one disturbed round has little influence."""
    middle = median(rounds)
    spread = median(abs(each - middle) for each in rounds)
    return Measurement(value=middle, spread=spread, rounds=tuple(rounds))


def _of_samples(rounds: Sequence[Sequence[float]], percent: float) -> Measurement:
    # A percentile of all samples together would give more weight to fast rounds, which have more samples.
    return _of_rounds([_percentile(samples, percent) for samples in rounds])


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
    start_seconds: Measurement
    load_seconds: Measurement
    short_texts_per_second: Measurement
    long_texts_per_second: Measurement
    short_latency_p50: Measurement
    short_latency_p95: Measurement
    long_latency_p50: Measurement
    long_latency_p95: Measurement
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


_Figure = Measurement | int | None
_Write = Callable[[float], str]


def _short_number(value: float) -> str:
    """Three significant digits or all digits before the point, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _millions(value: float) -> str:
    return f"{_short_number(value / 1e6)} M" if value >= 1e6 else f"{value:,.0f}"


def _in_units(per_one: float, unit: str) -> _Write:
    return lambda value: f"{_short_number(value * per_one)} {unit}"


_MEGABYTES, _MILLISECONDS, _SECONDS = _in_units(1e-6, "MB"), _in_units(1e3, "ms"), _in_units(1, "s")
_TABLE: Mapping[str, tuple[str, _Write]] = {
    "parameters": ("parameters", _millions),
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
        cells = [_cell(getattr(first, field), write)]
        for figures in result.models[1:]:
            times = _ratio(figures, first, field)
            cells.append(
                _cell(getattr(figures, field), write) + ("" if times is None else f" ({times:.2f}×)")
            )
        table.append((label, *cells))
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


def _number(figure: Measurement | int) -> float:
    return figure.value if isinstance(figure, Measurement) else figure


def _ratio(figures: _ModelFigures, first: _ModelFigures, field: str) -> float | None:
    mine, base = getattr(figures, field), getattr(first, field)
    return None if mine is None or base is None or not _number(base) else _number(mine) / _number(base)


def _cell(figure: _Figure, write: _Write) -> str:
    if figure is None:
        return "–"
    spread = ""
    if isinstance(figure, Measurement) and len(figure.rounds) > 1:
        spread = f" ±{write(figure.spread).split()[0]}"
    return write(_number(figure)) + spread
