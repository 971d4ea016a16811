"""How long a query takes on this machine: measured on three small cuts of the model, and told from that for any other.

A graph of one layer, one of three, and one of one layer with half its neurons say what a query costs besides layers, what
attention costs and what an MLP costs. Other cuts are told by their FLOPs. Kept in the cache, since neither machine nor shape
change; but not what was timed while the machine was busy with something else.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.artifact import cache_folder, versions, write_whole
from trundle.bench.machine import this_machine
from trundle.bench.workload import workload
from trundle.export import Limits, export_model
from trundle.measure import Cost, cost
from trundle.model import Cut, cut, layout_of, transformer_of
from trundle.planner.candidates import Precision
from trundle.progress import SILENT, Progress
from trundle.runtime import Encoder

ROUNDS, SECONDS = 5, 0.3
UNDISTURBED = 0.9
"""The share of a round in which the thread that waits for the graph must have been running, if nothing held it up."""
ANY_LOSS = Limits(cosine=1.0, agreement=1.0)
"""A cut that is only timed may say anything."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Milliseconds for one short query, as a function of what a model computes."""

    fixed: float
    attention: float
    mlp: float

    def milliseconds(self, of: Cost) -> float:
        """What a query would take."""
        work = _work(of)
        return self.fixed + self.attention * work[0] + self.mlp * work[1]


def measure_speed(model: SentenceTransformer, precision: Precision, *, progress: Progress = SILENT) -> Speed:
    """How fast this machine is with graphs of this model's shape and precision."""
    kept = cache_folder() / "speed" / f"{_key(model, precision)}.json"
    if kept.is_file():
        return Speed(**json.loads(kept.read_text(encoding="utf-8")))
    layout = layout_of(transformer_of(model).model)
    neurons = tuple(range(layout.sizes["mlp"] // 2))
    cuts = [
        Cut(blocks=(0,)),
        Cut(blocks=tuple(range(min(3, layout.layers)))),
        Cut(blocks=(0,), mlp=(neurons,) * layout.layers),
    ]
    with TemporaryDirectory() as scratch, progress.task(f"timing {precision} graphs", len(cuts)) as advance:
        folders, costs = [], []
        for number, what in enumerate(cuts):
            folder = Path(scratch) / str(number)
            small = cut(model, what)
            small.save_pretrained(str(folder), create_model_card=False)
            costs.append(cost(small))
            export_graph(folder, precision, calibrate=workload().long + workload().short, limits=ANY_LOSS)
            folders.append(folder)
            advance(1)
        timed = time_queries(folders)
    speed = fit(costs, [each.milliseconds for each in timed])
    if all(each.undisturbed for each in timed):
        write_whole(kept, json.dumps(asdict(speed)))
    else:
        progress.say("the machine was busy while queries were timed, so what is said of speed is rough")
    return speed


def export_graph(
    folder: Path,
    precision: Precision,
    *,
    calibrate: Sequence[str],
    limits: Limits | None = None,
    progress: Progress = SILENT,
) -> int:
    """Put the graph that is shipped into a model's own folder; the bytes it weighs."""
    return export_model(
        str(folder),
        to="onnx",
        size="full" if precision == "float32" else precision,
        calibrate=calibrate,
        limits=limits,
        force=True,
        progress=progress,
    ).file_bytes


def fit(costs: Sequence[Cost], milliseconds: Sequence[float]) -> Speed:
    """The speed that explains what was timed; no part of it can be negative."""
    rows = np.array([(1.0, *_work(each)) for each in costs])
    scale = rows.max(axis=0)
    solved, *_ = np.linalg.lstsq(rows / scale, np.array(milliseconds), rcond=None)
    fixed, attention, mlp = (max(0.0, float(each)) for each in solved / scale)
    return Speed(fixed=fixed, attention=attention, mlp=mlp)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one short query took, and whether anything else kept the processor from it."""

    milliseconds: float
    undisturbed: bool


def time_queries(folders: Sequence[Path]) -> list[Timed]:
    """One short query with each folder's graph, all in turns, the quietest of rounds."""
    texts = workload().short
    encoders = [Encoder(folder) for folder in folders]
    rounds: list[list[Timed]] = [[] for _ in encoders]
    for encoder in encoders:
        encoder.encode(texts[0])
    for _ in range(ROUNDS):
        for encoder, kept in zip(encoders, rounds, strict=True):
            kept.append(_one_round(encoder, texts))
    return [min(each, key=lambda one: one.milliseconds) for each in rounds]


def _one_round(encoder: Encoder, texts: Sequence[str]) -> Timed:
    taken: list[float] = []
    start, busy = time.perf_counter(), time.thread_time()
    while time.perf_counter() < start + SECONDS:
        began = time.perf_counter()
        encoder.encode(texts[len(taken) % len(texts)])
        taken.append(time.perf_counter() - began)
    running = (time.thread_time() - busy) / (time.perf_counter() - start)
    return Timed(milliseconds=1000 * statistics.median(taken), undisturbed=running >= UNDISTURBED)


def _work(of: Cost) -> tuple[float, float]:
    return of.parts["attention"].flops_per_token, of.parts["mlp"].flops_per_token


def _key(model: SentenceTransformer, precision: Precision) -> str:
    config = transformer_of(model).model.config.to_json_string()
    machine = this_machine()
    known = [config, precision, str(asdict(machine)), str(versions(("onnxruntime", "trundle")))]
    return blake2b("\0".join(known).encode(), digest_size=16).hexdigest()
