"""Predicts how long a query takes on this machine, from timings of four small cuts of the model.

Graphs with one layer, three layers, half the neurons and half the width determine the fixed cost, the cost of
a layer and the cost per FLOP of attention and MLP. A static model is timed on its own. Timings are cached,
unless the machine was busy.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from scipy.optimize import nnls
from sentence_transformers import SentenceTransformer

from trundle.bench.workload import this_machine, workload
from trundle.cache import cache_entry
from trundle.errors import BadModel, ImpossibleCut
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions, Limits
from trundle.folders import write_atomic
from trundle.model.cost import Cost, cost
from trundle.model.layout import Layout, layout_of
from trundle.model.static import static_shape, static_with
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.model.token_map import has_token_map
from trundle.precision import Precision
from trundle.progress import SILENT, Progress
from trundle.records import versions
from trundle.runtime.encoder import Encoder

_ROUNDS, _SECONDS = 5, 0.3
_UNDISTURBED = 0.9
"""The machine was idle if the waiting thread ran for this share of a round."""


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """Milliseconds of one short query as a function of what a model computes."""

    fixed: float
    attention: float
    mlp: float
    layer: float = 0.0
    static: float | None = None
    """Of a model without layers; None if there is none of this model."""
    undisturbed: bool = True
    """Whether the machine was idle otherwise."""

    def milliseconds(self, of: Cost) -> float:
        if of.layers == 0 and self.static is not None:
            return self.static
        attention, mlp, layers = _work(of)
        return self.fixed + self.attention * attention + self.mlp * mlp + self.layer * layers


def _measure_speed(
    model: SentenceTransformer, precision: Precision, *, progress: Progress = SILENT
) -> _Speed:
    """Measures how fast this machine runs graphs of this model's shape and precision."""
    kept = _cached(model, precision)
    if kept.is_file():
        return _Speed(**json.loads(kept.read_text(encoding="utf-8")))
    cuts, static = _timed_cuts(layout_of(transformer_of(model).model)), _static(model)
    costs, timed = _timed_graphs(chain((cut(model, what) for what in cuts), static), precision, progress)
    taken = [each.milliseconds for each in timed]
    speed = _fit(costs[: len(cuts)], taken[: len(cuts)])
    if static:
        speed = replace(speed, static=taken[-1])
    if all(each.undisturbed for each in timed):
        write_atomic(kept, json.dumps(asdict(speed)))
        return speed
    return replace(speed, undisturbed=False)


def _extrapolated_milliseconds(
    model: SentenceTransformer, whole: Cost, *, progress: Progress = SILENT
) -> float:
    """Estimates a query with the model's float graph from those of its first layer and its first three."""
    cuts = _timed_cuts(layout_of(transformer_of(model).model))[:2]
    costs, timed = _timed_graphs((cut(model, what) for what in cuts), "float32", progress)
    (few, short), (more, long) = (
        (each.layers, one.milliseconds) for each, one in zip(costs, timed, strict=True)
    )
    return short + (whole.layers - few) * max(0.0, long - short) / max(1, more - few)


def _timed_graphs(
    models: Iterable[SentenceTransformer], precision: Precision, progress: Progress
) -> tuple[list[Cost], list[_Timed]]:
    """Exports the models, and times one query with each of the graphs in turns."""
    with TemporaryDirectory() as scratch, progress.task(f"timing {precision} graphs", None) as advance:
        folders, costs = [], []
        for number, small in enumerate(models):
            folder = Path(scratch) / str(number)
            small.save_pretrained(str(folder), create_model_card=False)
            costs.append(cost(small))
            _export_graph(folder, precision, calibrate=workload().long + workload().short, timed_only=True)
            folders.append(folder)
            advance(1)
        return costs, _time_queries(folders)


def _static(model: SentenceTransformer) -> list[SentenceTransformer]:
    """A static model of this model's size with random vectors; empty if there is none."""
    if has_token_map(model):
        return []
    try:
        rows, width = static_shape(model)
    except BadModel:
        return []
    return [static_with(model, torch.randn(rows, width, generator=torch.Generator().manual_seed(0)))]


def _timed_cuts(layout: Layout) -> list[Cut]:
    """Cuts that separate the parts of a query's time; no narrow one if the model can't be narrowed."""
    few = tuple(range(min(3, layout.layers)))
    sizes = layout.sizes
    wanted = [
        Cut(blocks=(0,)),
        Cut(blocks=few),
        Cut(blocks=(0,), mlp=(tuple(range(sizes["mlp"] // 2)),) * layout.layers),
        Cut(blocks=few, hidden=tuple(range(sizes["hidden"] // 2)), head=tuple(range(sizes["head"] // 2))),
    ]
    try:
        wanted[-1].apply_to(layout)
    except ImpossibleCut:
        return wanted[:-1]
    return wanted


def _export_graph(
    folder: Path,
    precision: Precision,
    *,
    calibrate: Sequence[str],
    timed_only: bool = False,
    progress: Progress = SILENT,
) -> int:
    """Writes a graph and returns its size; one that is `timed_only` may lose any accuracy."""
    limits = Limits(cosine=1.0, agreement=1.0) if timed_only else Limits()
    options = ExportOptions(calibrate=tuple(calibrate), limits=limits, fit=not timed_only)
    return export_model(
        str(folder), to="onnx", precision=precision, options=options, force=True, progress=progress
    ).file_bytes


def _fit(costs: Sequence[Cost], milliseconds: Sequence[float]) -> _Speed:
    """Fits the parts of a query's time, none negative; three timings determine three parts."""
    rows = np.array([(1.0, *_work(each))[: len(costs)] for each in costs])
    scale = rows.max(axis=0)
    solved, _ = nnls(rows / scale, np.array(milliseconds))
    names = ("fixed", "attention", "mlp", "layer")
    return _Speed(**dict(zip(names, (solved / scale).tolist(), strict=False)))


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """The time of one short query, and whether the processor was idle otherwise."""

    milliseconds: float
    undisturbed: bool


def _time_queries(folders: Sequence[Path]) -> list[_Timed]:
    """Times one short query with each folder's graph, in turns; the fastest round counts."""
    texts = workload().short
    encoders = [Encoder(folder) for folder in folders]
    rounds: list[list[_Timed]] = [[] for _ in encoders]
    for encoder in encoders:
        encoder.encode(texts[0])
    for _ in range(_ROUNDS):
        for encoder, kept in zip(encoders, rounds, strict=True):
            kept.append(_one_round(encoder, texts))
    return [min(each, key=lambda one: one.milliseconds) for each in rounds]


def _one_round(encoder: Encoder, texts: Sequence[str]) -> _Timed:
    taken: list[float] = []
    start, busy = time.perf_counter(), time.thread_time()
    while not taken or time.perf_counter() < start + _SECONDS:
        began = time.perf_counter()
        encoder.encode(texts[len(taken) % len(texts)])
        taken.append(time.perf_counter() - began)
    running = (time.thread_time() - busy) / (time.perf_counter() - start)
    return _Timed(milliseconds=1000 * statistics.median(taken), undisturbed=running >= _UNDISTURBED)


def _work(of: Cost) -> tuple[float, float, float]:
    return of.parts["attention"].flops_per_token, of.parts["mlp"].flops_per_token, float(of.layers)


def _cached(model: SentenceTransformer, precision: Precision) -> Path:
    config = transformer_of(model).model.config.to_json_string()
    machine, used = asdict(this_machine()), versions(("onnxruntime", "trundle"))
    names = [each.name for each in fields(_Speed)]
    return cache_entry("speed", config, precision, machine, used, names).with_suffix(".json")
