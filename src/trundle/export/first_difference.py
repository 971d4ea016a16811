"""Where a graph first leaves the torch model: found by values, so that no architecture needs to be known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from trundle.embedder import Vectors
from trundle.export.graph import Whole, example_inputs
from trundle.export.packages import onnx, onnxruntime

TOLERANCE = 1e-3


@contextmanager
def recorded_outputs(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
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


def first_difference(graph: Whole, path: Path) -> str | None:
    """The name of the first submodule whose output is nowhere in the graph, or None if all are."""
    example = example_inputs(graph)
    with recorded_outputs(graph) as seen, torch.enable_grad():
        sentences, _ = graph(*example)
    wanted = _that_matter(sentences, seen)
    found = _everything(
        path, {name: each.numpy() for name, each in zip(graph.input_names, example, strict=True)}
    )
    for name, values in wanted.items():
        near = (other for other in found if other.shape == values.shape)
        scale = max(float(np.abs(values).max(initial=0)), 1e-12)
        if not any(float(np.abs(other - values).max(initial=0)) <= TOLERANCE * scale for other in near):
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
