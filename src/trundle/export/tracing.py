"""The float graph everything else is made from: traced, compared with torch, the faster of two if asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.embedder import Vectors
from trundle.errors import BadModel
from trundle.export.first_difference import first_difference
from trundle.export.graph import Tracer, plain_attention, whole, write_onnx
from trundle.export.parity import FLOAT_COSINE, compare
from trundle.progress import Progress
from trundle.runtime.onnx_engine import OnnxRun
from trundle.runtime.tokens import Reader, padded

ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class Tracing:
    """A model to trace, where to, and what torch says of some texts."""

    model: SentenceTransformer
    path: Path
    reader: Reader
    pad_id: int
    texts: Sequence[str]
    reference: Vectors
    progress: Progress


def trace(tracing: Tracing, *, try_both: bool) -> dict[str, Any]:
    """Write the graph to `tracing.path` and say how it was made.

    The older tracer gives the graph that runtimes fuse better, so it is asked first, and the newer one only if it
    fails or if both are to be tried.
    """
    seconds: dict[Tracer, float] = {}
    problems: dict[Tracer, BadModel] = {}
    tracers: tuple[Tracer, ...] = ("torchscript", "dynamo")
    for tracer in tracers:
        if seconds and not try_both:
            break
        try:
            seconds[tracer] = _traced(tracing, tracer)
        except BadModel as problem:
            problems[tracer] = problem
    if not seconds:
        raise problems["torchscript"]
    fastest = min(seconds, key=seconds.__getitem__)
    _folder(tracing, fastest).rename(tracing.path.parent)
    facts: dict[str, Any] = {"tracer": fastest}
    if len(seconds) > 1:
        facts["dynamo / torchscript, seconds"] = round(seconds["dynamo"] / seconds["torchscript"], 3)
    return facts


def _folder(tracing: Tracing, tracer: Tracer) -> Path:
    return tracing.path.parent.with_name(tracer)


def _traced(tracing: Tracing, tracer: Tracer) -> float:
    """Trace with one tracer and compare with torch; returns how long the graph takes."""
    path = _folder(tracing, tracer) / tracing.path.name
    path.parent.mkdir()
    graph = whole(tracing.model)
    with tracing.progress.task(f"tracing ({tracer})", None), plain_attention(tracing.model):
        try:
            write_onnx(graph, path, tracer=tracer)
        except Exception as error:  # the tracers raise what they please
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"torch can't trace the model ({reason}); report this model") from error
    run = OnnxRun(path, threads=1, streams=1, precision="float32")
    rows = tracing.reader.read(tracing.texts)

    def encode() -> Vectors:
        return np.concatenate([run(*padded([row], len(row), tracing.pad_id)) for row in rows])

    parity = compare(encode(), tracing.reference, tracing.texts)
    if parity.lowest_cosine < FLOAT_COSINE:
        with plain_attention(tracing.model):
            place = first_difference(graph, path)
        raise BadModel(
            f"the graph does not agree with torch (cosine {parity.lowest_cosine:.4f} for {parity.worst[:40]!r}; "
            f"{f'the first difference is in {place}' if place else 'no module differs by itself'}), "
            "so nothing was written; report this model"
        )
    return _seconds(encode)


def _seconds(encode: Callable[[], object]) -> float:
    """How long a call takes, disturbed rounds left aside."""
    taken = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        encode()
        taken.append(time.perf_counter() - began)
    return median(taken)
