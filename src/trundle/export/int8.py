"""Smaller ONNX files: int8 and float16."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from trundle.embedder import Vectors
from trundle.export.graph import _save_onnx
from trundle.export.parity import onnx, onnxruntime

_SMALLEST = 4096
"""Numbers in a table worth the three more nodes."""


def _rows_in_int8(table: Vectors) -> tuple[NDArray[np.int8], Vectors]:
    """Each row as int8 with a scale of its own, so that one row of outliers can't coarsen the others."""
    scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127
    return np.rint(table / scales).astype(np.int8), scales.astype(np.float32)


def _with_int8_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large lookup table stored as int8 rows; what is looked up is the same to 8 bits."""
    stored = {each.name: each for each in model.graph.initializer}
    users: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            users[name] = users.get(name, 0) + 1
    nodes = []
    for node in model.graph.node:
        table = stored.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or not _is_large_matrix(table) or users[table.name] > 1:
            nodes.append(node)
            continue
        rows, scales = _rows_in_int8(onnx.numpy_helper.to_array(table))
        name, out = table.name, node.output[0]
        model.graph.initializer.remove(table)
        model.graph.initializer.extend(
            [
                onnx.numpy_helper.from_array(rows, f"{name}_int8"),
                onnx.numpy_helper.from_array(scales, f"{name}_scale"),
            ]
        )
        ids = node.input[1]
        nodes += [
            onnx.helper.make_node(
                "Gather", [f"{name}_int8", ids], [f"{out}_int8"], f"{node.name}_int8", axis=0
            ),
            onnx.helper.make_node(
                "Gather", [f"{name}_scale", ids], [f"{out}_scale"], f"{node.name}_scale", axis=0
            ),
            onnx.helper.make_node(
                "Cast", [f"{out}_int8"], [f"{out}_cast"], f"{node.name}_cast", to=onnx.TensorProto.FLOAT
            ),
            onnx.helper.make_node("Mul", [f"{out}_cast", f"{out}_scale"], [out], f"{node.name}_scaled"),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _is_large_matrix(table: onnx.TensorProto) -> bool:
    """Whether these are floats in rows, and enough of them for int8 to pay."""
    floats = table.data_type == onnx.TensorProto.FLOAT and len(table.dims) == 2
    return floats and table.dims[0] * table.dims[1] >= _SMALLEST


def _with_stored_matrices(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large float matrix that is multiplied by stored as int8."""
    floats = {each.name: each for each in model.graph.initializer if _is_large_matrix(each)}
    nodes, stored = [], set()
    for node in model.graph.node:
        name = node.input[1] if node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 else ""
        if name in floats:
            axis = 0 if _second_is_turned(node) else 1
            if name not in stored:
                stored.add(name)
                numbers, scales = _columns_in_int8(onnx.numpy_helper.to_array(floats[name]), axis)
                model.graph.initializer.remove(floats[name])
                model.graph.initializer.extend(
                    [
                        onnx.numpy_helper.from_array(numbers, f"{name}_stored"),
                        onnx.numpy_helper.from_array(scales, f"{name}_stored_scale"),
                    ]
                )
                inputs = [f"{name}_stored", f"{name}_stored_scale"]
                nodes.append(
                    onnx.helper.make_node("DequantizeLinear", inputs, [name], f"{name}_opened", axis=axis)
                )
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _columns_in_int8(matrix: Vectors, axis: int) -> tuple[NDArray[np.int8], Vectors]:
    """Int8 with one scale for each place along `axis`, the outputs of the product."""
    rows, scales = _rows_in_int8(matrix if axis == 0 else matrix.T)
    return np.ascontiguousarray(rows if axis == 0 else rows.T), scales[:, 0]


def _second_is_turned(node: onnx.NodeProto) -> bool:
    """Whether a product's matrix stands as (outputs, inputs)."""
    return any(each.name == "transB" and each.i for each in node.attribute)


def _write_int8(traced: Path, path: Path, *, keep: Sequence[str], older_cpus: bool) -> None:
    """Matrices as int8 with a scale per column, inputs quantised as they come, tables as int8 rows.

    `keep` names products left in float, of which only the storage is int8. `older_cpus` gives matrices 7 bits: processors without VNNI add two
    products in 16 bits, where 8-bit ones can overflow without a word.
    """
    model = _with_int8_products(
        _with_int8_tables(onnx.load(traced)), path.parent, keep=keep, older_cpus=older_cpus
    )
    _save_onnx(_with_stored_matrices(model), path)


def _with_int8_products(
    model: onnx.ModelProto, folder: Path, *, keep: Sequence[str], older_cpus: bool
) -> onnx.ModelProto:
    """The graph with every product in int8 but those to `keep`; the library works on files, in `folder`."""
    whole, quantised = folder / "making-whole.onnx", folder / "making-int8.onnx"
    try:
        _save_onnx(model, whole)
        logging.getLogger().addFilter(_no_advice)
        quantize_dynamic(
            whole,
            quantised,
            per_channel=True,
            reduce_range=older_cpus,
            weight_type=QuantType.QInt8,
            op_types_to_quantize=["MatMul", "Gemm"],
            nodes_to_exclude=list(keep),
            use_external_data_format=(folder / f"{whole.name}_data").exists(),
        )
        return onnx.load(quantised)
    finally:
        logging.getLogger().removeFilter(_no_advice)
        for leftover in folder.glob("making-*"):
            leftover.unlink()


def _write_float16(traced: Path, path: Path) -> None:
    """Weights and arithmetic in float16; inputs and outputs stay as they are."""
    model = convert_float_to_float16(onnx.load(traced), keep_io_types=True)
    _save_onnx(model, path)


def _no_advice(record: logging.LogRecord) -> bool:
    """Drop the quantiser's advice to prepare the graph: it has been."""
    return "pre-processing" not in record.getMessage()


_Inputs = Mapping[str, NDArray[np.int64]]


def _products(model: onnx.ModelProto) -> dict[str, tuple[str, Vectors]]:
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


def _int8_error(activations: Vectors, matrix: Vectors) -> float:
    """Relative error of a product whose input has one int8 scale and whose matrix has one per column."""
    step = max(float(activations.max(initial=0) - activations.min(initial=0)), 1e-12) / 255
    scales = np.maximum(np.abs(matrix).max(axis=0, keepdims=True), 1e-12) / 127
    exact = activations @ matrix
    rounded = (np.rint(activations / step) * step) @ (np.rint(matrix / scales) * scales)
    return float(np.linalg.norm(exact - rounded) / max(float(np.linalg.norm(exact)), 1e-12))


def _worst_products(path: Path, samples: Sequence[_Inputs]) -> list[str]:
    """Names of all products with fixed matrices, the one that int8 distorts most first."""
    model = onnx.load(path)
    known = _products(model)
    if not known:
        return []
    wanted = {source for source, _ in known.values()}
    present = {each.name for each in model.graph.output} | {each.name for each in model.graph.input}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted - present))
    probed = path.with_name("probed.onnx")
    try:
        _save_onnx(model, probed)
        session = onnxruntime.InferenceSession(str(probed), providers=["CPUExecutionProvider"])
    finally:
        for leftover in path.parent.glob("probed.onnx*"):
            leftover.unlink()
    errors = dict.fromkeys(known, 0.0)
    names = sorted(wanted)
    for sample in samples:
        seen = dict(zip(names, session.run(names, dict(sample)), strict=True))
        for node, (source, matrix) in known.items():
            errors[node] += _int8_error(seen[source].reshape(-1, matrix.shape[0]), matrix)
    return sorted(errors, key=lambda node: (-errors[node], node))
