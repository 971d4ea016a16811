"""Predictions before anything is made: the size and speed of every candidate, and which are worth a trial.

The time of a query is predicted from timings of four small cuts of the model: graphs with one layer, three
layers, half the neurons and half the width determine the fixed cost, the cost of a layer and the cost per
FLOP of attention and MLP. A static model is timed on its own. Timings are cached, unless the
machine was busy.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from sentence_transformers import SentenceTransformer

from trundle.bench.workload import this_machine, workload
from trundle.cache import cache_entry
from trundle.data.corpus import Corpus
from trundle.errors import BadInput, BadModel, ImpossibleCut, MissingExtra
from trundle.export.exporting import export_model
from trundle.export.quantise import ExportOptions, Limits
from trundle.folders import write_atomic
from trundle.model.cost import Cost, cost
from trundle.model.encode import labelling_embedder
from trundle.model.heads import copy_of
from trundle.model.layout import Layout, layout_of
from trundle.model.matrices import token_rows
from trundle.model.static import static_shape, static_with
from trundle.model.surgery import Cut, cut, transformer_of
from trundle.model.token_map import has_token_map, read_vocabulary
from trundle.precision import Precision, graph_format
from trundle.progress import SILENT, Progress
from trundle.records import versions
from trundle.runtime.encoder import Encoder
from trundle.search.candidates import _Candidate, _Coverage, _edge, _list_candidates, _smallest
from trundle.search.limits import _Budget

_ROUNDS, _SECONDS = 5, 0.3
_UNDISTURBED = 0.9
"""The machine was idle if the waiting thread ran for this share of a round."""
_TIMED_TEXTS, _MOST_TIMED_TEXTS, _TIMED_SECONDS = 32, 65_536, 1.0
_LENGTHS = 4
_COUNTED_TEXTS = 5000


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


def _one_round(encoder: Encoder | SentenceTransformer, texts: Sequence[str]) -> _Timed:
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


@dataclass(kw_only=True)
class _Prospects:
    """The models of one search, and what arithmetic and a few seconds of timing predict about them."""

    source: str
    bases: Mapping[str, SentenceTransformer]
    """The source and the students by name, each loaded once."""
    corpus: Corpus
    progress: Progress
    fast: bool = False
    """Whether matmuls of int4 candidates run in int8, also without a limit in milliseconds."""
    owner: str | None = ""
    """The model that made the vector space, None if it is not here; the source unless told otherwise."""
    width: int = 0
    """The number of dimensions of that space; the owner's unless told otherwise."""

    def __post_init__(self) -> None:
        self.owner = self.source if self.owner == "" else self.owner
        if self.owner is not None:
            self.width = self.width or self.bases[self.owner].get_embedding_dimension() or 0

    @cached_property
    def makes_graphs(self) -> bool:
        """Whether the packages for graphs are installed."""
        if find_spec("onnxruntime") is None or find_spec("onnx") is None:
            self.progress.say("int8 graphs and speeds need more packages: pip install 'trundle[compress]'")
            return False
        return True

    def speeds(self) -> dict[tuple[str, Precision], _Speed]:
        """Measures int8 and float graphs of each base, for a budget in milliseconds."""
        if not self.makes_graphs:
            raise MissingExtra("a budget in milliseconds", "compress")
        wanted: tuple[Precision, ...] = ("float32", "int8")
        found = {
            (base, precision): _measure_speed(model, precision, progress=self.progress)
            for base, model in self.bases.items()
            for precision in wanted
        }
        if not all(speed.undisturbed for speed in found.values()):
            self.progress.say("the machine was busy while queries were timed, so predicted speeds are rough")
        return found

    def promising(
        self, limits: _Budget, speeds: Mapping[tuple[str, Precision], _Speed], *, before: Cost | None
    ) -> list[_Candidate]:
        """Returns the candidates worth a trial; rejects a budget that none of them, or the model, meets."""
        found = self.candidates(speeds, limits)
        slow = self.slowest(speeds, before)
        if before is not None and limits.allows(
            file_bytes=before.file_bytes, parameters=before.parameters, milliseconds=slow
        ):
            raise BadInput(
                f"{self.source} is already within {limits} ({before.file_bytes / 1e6:.4g} MB, "
                f"{before.parameters / 1e6:.4g}M parameters), so nothing was done; pass a smaller budget"
            )
        promising = _edge(found, limits, self.coverages())
        if not promising:
            least = _smallest(found)
            speed = "" if least.milliseconds is None else f", {_raised(least.milliseconds)} ms a query"
            bases = " or ".join(self.bases)
            raise BadInput(
                f"nothing trundle can make of {bases} is within {limits}: the smallest is {least.name} "
                f"with {_raised(least.bytes / 1e6)} MB, {_raised(least.cost.parameters / 1e6)}M parameters"
                f"{speed}; allow that much"
                + ("" if len(self.bases) > 1 else ", or pass a smaller backbone with --student")
            )
        # If the model itself fits once it is int8, no cut of it is closer to it.
        return [each for each in promising if each.untouched] or promising

    def slowest(self, speeds: Mapping[tuple[str, Precision], _Speed], before: Cost | None) -> float | None:
        speed = None if self.owner is None else speeds.get((self.owner, "float32"))
        return None if speed is None or before is None else speed.milliseconds(before)

    def source_milliseconds(self) -> float | None:
        """Measures a query with the owner in torch on the CPU; None if the owner is not here."""
        if self.owner is None:
            return None
        model, texts = self.bases[self.owner], workload().short
        if model.device.type != "cpu":
            model = copy_of(model).to("cpu")
        _one_round(model, texts[:1])  # to warm up
        return _one_round(model, texts).milliseconds

    def candidates(self, speeds: Mapping[tuple[str, Precision], _Speed], limits: _Budget) -> list[_Candidate]:
        """Lists all cuts of the source and the students with predicted sizes and speeds."""
        # If time is limited, int4 weights are multiplied in int8: twice as fast, for a little less agreement.
        grid: Precision = "int4+int8" if self.fast or limits.milliseconds is not None else "int4"
        rounded: tuple[Precision, ...] = ("int8", "int8+int4_tokens", grid)
        precisions: tuple[Precision, ...] = rounded if self.makes_graphs else ("float32",)
        found = [
            candidate
            for base, model in self.bases.items()
            for candidate in _list_candidates(
                model,
                base,
                dimensions=self.width,
                precisions=precisions,
                is_teacher=base == self.owner,
                budget=limits,
            )
        ]
        if not speeds:
            return found
        timings = [speeds[each.base, graph_format("onnx", each.precision).matmuls] for each in found]
        return [
            replace(each, milliseconds=speed.milliseconds(each.cost))
            for each, speed in zip(found, timings, strict=True)
        ]

    def coverages(self) -> dict[str, _Coverage]:
        texts = [text.text for text in self.corpus.distinct_train(_COUNTED_TEXTS, 0)]
        return {base: _coverage(model, texts) for base, model in self.bases.items()}

    def text_count(self) -> float:
        return sum(int(fact["texts"]) for fact in self.corpus.facts()) or math.inf

    def reading_rate(self) -> float:
        """Measures for about a second how many texts a second the teacher, or the first student, encodes."""
        most = _MOST_TIMED_TEXTS if torch.cuda.is_available() else _MOST_TIMED_TEXTS // 8
        texts = [text.text for text in self.corpus.distinct_train(most, 0)]
        if not texts:
            raise BadInput("there are no texts to learn from; pass them with --data")
        encode = labelling_embedder(self.bases[self.owner or next(iter(self.bases))], name="teacher").text
        encode(sorted(texts, key=len)[:64])  # the shortest: 64 others take a slow machine 40 s
        count, taken, read = _TIMED_TEXTS, 0.0, 0
        while taken < _TIMED_SECONDS and read < len(texts):
            groups = _of_all_lengths(texts, count)
            began = time.monotonic()
            for group in groups:
                encode(group)
            taken, count = time.monotonic() - began, 4 * count
            read = sum(map(len, groups))
        return read / taken


def _of_all_lengths(texts: Sequence[str], count: int) -> list[list[str]]:
    """Draws `count` texts in groups of similar length; a few random ones would be padded to the longest."""
    ordered = sorted(texts, key=len)
    each = max(1, count // _LENGTHS)
    if len(ordered) <= each * _LENGTHS:
        return [ordered]
    middles = [len(ordered) * (2 * number + 1) // (2 * _LENGTHS) for number in range(_LENGTHS)]
    return [ordered[middle - each // 2 : middle - each // 2 + each] for middle in middles]


def _coverage(model: SentenceTransformer, texts: Sequence[str]) -> _Coverage:
    """Ranks tokens by every second text and measures what they cover of the others.

    All tokens that occur in a few texts cover those texts, but not the texts that are encoded later.
    """
    rows = model.tokenizer(list(texts), truncation=True)["input_ids"]
    ranked, held_out = (np.fromiter(chain.from_iterable(part), np.int64) for part in (rows[::2], rows[1::2]))
    if not len(held_out):
        held_out = ranked
    most = max(token_rows(model), int(max(ranked.max(initial=0), held_out.max(initial=0))) + 1)
    order = np.lexsort((_is_unreachable(model, most), -np.bincount(ranked, minlength=most)))
    covered = np.bincount(held_out, minlength=most)[order]
    shares = np.cumsum(covered) / max(1, covered.sum())
    return lambda tokens: float(shares[min(tokens, len(shares)) - 1])


def _is_unreachable(model: SentenceTransformer, count: int) -> NDArray[np.bool_]:
    """For each of `count` ids, whether no text becomes that token."""
    found = np.zeros(count, dtype=bool)
    with suppress(BadModel):  # a tokenizer that can't be rebuilt
        found[sorted(read_vocabulary(model).unreachable())] = True
    return found


def _raised(value: float) -> str:
    """Rounds up to three digits, so that a budget of that size is enough."""
    step = 10.0 ** (math.floor(math.log10(value)) - 2) if value > 0 else 1.0
    return f"{math.ceil(value / step - 1e-9) * step:.3g}"
