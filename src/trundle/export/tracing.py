"""The float graph everything else is made from: traced, compared with torch, the faster of two if asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import nn

from trundle.embedder import Vectors
from trundle.errors import BadModel
from trundle.export.graph import _example_inputs, _plain_attention, _Tracer, _Whole, _whole, _write_onnx
from trundle.export.parity import _FLOAT_COSINE, _compare, onnx, onnxruntime
from trundle.progress import Progress
from trundle.runtime.engines import OnnxRun
from trundle.runtime.tokens import Reader, padded

_TOLERANCE = 1e-3


@contextmanager
def _recorded_outputs(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """What each submodule puts out while the block runs, in the order they finish."""
    seen: dict[str, torch.Tensor] = {}

    def note(name: str) -> object:
        def hook(_module: nn.Module, _inputs: object, output: object) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                seen[name] = first

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _first_difference(graph: _Whole, path: Path) -> str | None:
    """The name of the first submodule whose output is nowhere in the graph, or None if all are."""
    example = _example_inputs(graph)
    with _recorded_outputs(graph) as seen, torch.enable_grad():
        sentences, _ = graph(*example)
    wanted = _that_matter(sentences, seen)
    found = _everything(
        path, {name: each.numpy() for name, each in zip(graph.input_names, example, strict=True)}
    )
    for name, values in wanted.items():
        near = (other for other in found if other.shape == values.shape)
        scale = max(float(np.abs(values).max(initial=0)), 1e-12)
        if not any(float(np.abs(other - values).max(initial=0)) <= _TOLERANCE * scale for other in near):
            return name
    return None


def _that_matter(result: torch.Tensor, seen: Mapping[str, torch.Tensor]) -> dict[str, Vectors]:
    """The outputs that the result depends on; tracers leave out the rest."""
    part_of = {name: each for name, each in seen.items() if each.requires_grad}
    slopes = torch.autograd.grad(result.sum(), list(part_of.values()), allow_unused=True)
    return {
        name: each.detach().float().numpy()
        for (name, each), slope in zip(part_of.items(), slopes, strict=True)
        if slope is not None
    }


def _everything(path: Path, given: dict[str, np.ndarray]) -> list[Vectors]:
    """Every float tensor the graph computes on the way."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    known = {each.name: each.type.tensor_type.elem_type for each in model.graph.value_info}
    there = {each.name for each in model.graph.output}
    extra = [name for name, kind in known.items() if kind == onnx.TensorProto.FLOAT and name not in there]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    inputs = {each.name for each in session.get_inputs()}
    return list(session.run(None, {name: values for name, values in given.items() if name in inputs}))


_ROUNDS = 7


@dataclass(frozen=True, kw_only=True)
class _Tracing:
    """A model to trace, where to, and what torch says of some texts."""

    model: SentenceTransformer
    path: Path
    reader: Reader
    pad_id: int
    texts: Sequence[str]
    reference: Vectors
    progress: Progress


def _trace(tracing: _Tracing, *, try_both: bool) -> dict[str, Any]:
    """Write the graph to `tracing.path` and say how it was made.

    The older tracer gives the graph that runtimes fuse better, so it is asked first, and the newer one only if it
    fails or if both are to be tried.
    """
    seconds: dict[_Tracer, float] = {}
    problems: dict[_Tracer, BadModel] = {}
    tracers: tuple[_Tracer, ...] = ("torchscript", "dynamo")
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


def _folder(tracing: _Tracing, tracer: _Tracer) -> Path:
    return tracing.path.parent.with_name(tracer)


def _traced(tracing: _Tracing, tracer: _Tracer) -> float:
    """Trace with one tracer and compare with torch; returns how long the graph takes."""
    path = _folder(tracing, tracer) / tracing.path.name
    path.parent.mkdir()
    graph = _whole(tracing.model)
    with tracing.progress.task(f"tracing ({tracer})", None), _plain_attention(tracing.model):
        try:
            _write_onnx(graph, path, tracer=tracer)
        except Exception as error:  # the tracers raise what they please
            reason = " ".join(str(error).split())[:200]
            raise BadModel(f"torch can't trace the model ({reason}); report this model") from error
    run = OnnxRun(path, threads=1, streams=1, precision="float32")
    rows = tracing.reader.read(tracing.texts)

    def encode() -> Vectors:
        return np.concatenate([run(*padded([row], len(row), tracing.pad_id)) for row in rows])

    parity = _compare(encode(), tracing.reference, tracing.texts)
    if parity.lowest_cosine < _FLOAT_COSINE:
        with _plain_attention(tracing.model):
            place = _first_difference(graph, path)
        raise BadModel(
            f"the graph does not agree with torch (cosine {parity.lowest_cosine:.4f} for {parity.worst[:40]!r}; "
            f"{f'the first difference is in {place}' if place else 'no module differs by itself'}), "
            "so nothing was written; report this model"
        )
    return _seconds(encode)


def _seconds(encode: Callable[[], object]) -> float:
    """How long a call takes, disturbed rounds left aside."""
    taken = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        encode()
        taken.append(time.perf_counter() - began)
    return median(taken)
