"""Which products suffer most from int8: measured on real activations, one product at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export.large import save_onnx
from trundle.export.packages import onnx, onnxruntime

Inputs = Mapping[str, NDArray[np.int64]]


def products(model: onnx.ModelProto) -> dict[str, tuple[str, Vectors]]:
    """Every product with a fixed matrix: node name → the name of its input and the matrix as (in, out)."""
    stored = {each.name: each for each in model.graph.initializer}
    found: dict[str, tuple[str, Vectors]] = {}
    for node in model.graph.node:
        if node.op_type not in {"MatMul", "Gemm"} or node.input[1] not in stored:
            continue
        matrix = onnx.numpy_helper.to_array(stored[node.input[1]])
        turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        if matrix.ndim == 2:
            found[node.name] = (node.input[0], matrix.T if turned else matrix)
    return found


def int8_error(activations: Vectors, matrix: Vectors) -> float:
    """Relative error of a product whose input has one int8 scale and whose matrix has one per column."""
    step = max(float(activations.max(initial=0) - activations.min(initial=0)), 1e-12) / 255
    scales = np.maximum(np.abs(matrix).max(axis=0, keepdims=True), 1e-12) / 127
    exact = activations @ matrix
    rounded = (np.rint(activations / step) * step) @ (np.rint(matrix / scales) * scales)
    return float(np.linalg.norm(exact - rounded) / max(float(np.linalg.norm(exact)), 1e-12))


def worst_products(path: Path, samples: Sequence[Inputs]) -> list[str]:
    """Names of all products with fixed matrices, the one that int8 distorts most first."""
    model = onnx.load(path)
    known = products(model)
    if not known:
        return []
    wanted = {source for source, _ in known.values()}
    present = {each.name for each in model.graph.output} | {each.name for each in model.graph.input}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted - present))
    probed = path.with_name("probed.onnx")
    try:
        save_onnx(model, probed)
        session = onnxruntime.InferenceSession(str(probed), providers=["CPUExecutionProvider"])
    finally:
        for leftover in path.parent.glob("probed.onnx*"):
            leftover.unlink()
    errors = dict.fromkeys(known, 0.0)
    names = sorted(wanted)
    for sample in samples:
        seen = dict(zip(names, session.run(names, dict(sample)), strict=True))
        for node, (source, matrix) in known.items():
            errors[node] += int8_error(seen[source].reshape(-1, matrix.shape[0]), matrix)
    return sorted(errors, key=lambda node: (-errors[node], node))
