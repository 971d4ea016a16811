"""What a bench found: records that turn into JSON, and the table a person reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from trundle.bench.machine import Machine
from trundle.bench.summary import Measured


@dataclass(frozen=True, kw_only=True)
class Settings:
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
class ModelFigures:
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

    models: tuple[ModelFigures, ...]
    settings: Settings
    machine: Machine
    other_cores: float | None
    versions: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON, with each model's ratios to the first."""
        whole = asdict(self)
        for entry, figures in zip(whole["models"], self.models, strict=True):
            entry["own_memory_bytes"] = figures.own_memory_bytes
            entry["ratios_to_first"] = {
                row.label: ratio(row.get(figures), row.get(self.models[0])) for row in TABLE
            }
        return whole


NOTICEABLE_CORES = 0.2

Figure = Measured | int | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: what it shows and how a number of it is written."""

    label: str
    get: Callable[[ModelFigures], Figure]
    write: Callable[[float], str]


def ratio(mine: Figure, first: Figure) -> float | None:
    """How many times the first contestant's figure, where both are known."""
    if mine is None or first is None:
        return None
    return _number(mine) / _number(first) if _number(first) else None


def short_number(value: float) -> str:
    """Three significant digits or all digits before the point, whichever is more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def megabytes(value: float) -> str:
    """Bytes as a person reads them; 1 MB is a million bytes."""
    return f"{short_number(value / 1e6)} MB"


def millions(value: float) -> str:
    """A count of parameters."""
    return f"{short_number(value / 1e6)} M" if value >= 1e6 else f"{value:,.0f}"


def milliseconds(value: float) -> str:
    """A short time, given in seconds."""
    return f"{short_number(value * 1e3)} ms"


def whole_seconds(value: float) -> str:
    """A longer time."""
    return f"{short_number(value)} s"


TABLE = (
    Row(label="parameters", get=lambda figures: figures.parameters, write=millions),
    Row(label="weights on disk", get=lambda figures: figures.weights_bytes, write=megabytes),
    Row(label="folder on disk", get=lambda figures: figures.folder_bytes, write=megabytes),
    Row(label="short texts/s", get=lambda figures: figures.short_texts_per_second, write=short_number),
    Row(label="long texts/s", get=lambda figures: figures.long_texts_per_second, write=short_number),
    Row(label="short latency p50", get=lambda figures: figures.short_latency_p50, write=milliseconds),
    Row(label="short latency p95", get=lambda figures: figures.short_latency_p95, write=milliseconds),
    Row(label="long latency p50", get=lambda figures: figures.long_latency_p50, write=milliseconds),
    Row(label="long latency p95", get=lambda figures: figures.long_latency_p95, write=milliseconds),
    Row(label="peak memory", get=lambda figures: figures.peak_memory_bytes, write=megabytes),
    Row(label="peak beyond bare Python", get=lambda figures: figures.own_memory_bytes, write=megabytes),
    Row(label="load the model", get=lambda figures: figures.load_seconds, write=whole_seconds),
    Row(label="start to first vector", get=lambda figures: figures.start_seconds, write=whole_seconds),
)


def rows(result: BenchResult) -> list[tuple[str, ...]]:
    """The table: a heading, then one row per measure and one column per model, with its ratio to the first."""
    first = result.models[0]
    engines = ["" if figures.engine == "torch" else f" {figures.engine}" for figures in result.models]
    known = names([figures.model for figures in result.models])
    table = [("", *(name + engine for name, engine in zip(known, engines, strict=True)))]
    for row in TABLE:
        cells = [_cell(row, first)]
        for figures in result.models[1:]:
            times = ratio(row.get(figures), row.get(first))
            cells.append(_cell(row, figures) + ("" if times is None else f" ({times:.2f}×)"))
        table.append((row.label, *cells))
    return table


def caution(result: BenchResult) -> str | None:
    """A sentence when other programs took cores that the models were to have."""
    spare = result.machine.cores - result.settings.threads
    if result.other_cores is None or result.other_cores - spare < NOTICEABLE_CORES:
        return None
    return (
        f"other programs kept {result.other_cores:.1f} of {result.machine.cores} cores busy during the bench; "
        "stop them and run again for figures to rely on"
    )


def names(models: list[str]) -> list[str]:
    """The last part of each folder or hub name; the whole of it where two would read the same."""
    last = [PurePath(model).name or model for model in models]
    uses = Counter(PurePath(model).name or model for model in set(models))
    return [short if uses[short] == 1 else model for short, model in zip(last, models, strict=True)]


def _number(figure: Measured | int) -> float:
    return figure.value if isinstance(figure, Measured) else figure


def _cell(row: Row, figures: ModelFigures) -> str:
    figure = row.get(figures)
    if figure is None:
        return "–"
    if isinstance(figure, int):
        return row.write(figure)
    return row.write(figure.value) + (
        f" ±{row.write(figure.spread).split()[0]}" if len(figure.rounds) > 1 else ""
    )
