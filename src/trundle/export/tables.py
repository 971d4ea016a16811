"""Lookup tables in int8: half of a small model's bytes, and no arithmetic to slow down."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export.packages import onnx

SMALLEST = 4096
"""Numbers in a table worth the three more nodes."""


def rows_in_int8(table: Vectors) -> tuple[NDArray[np.int8], Vectors]:
    """Each row as int8 with a scale of its own, so that one row of outliers can't coarsen the others."""
    scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127
    return np.rint(table / scales).astype(np.int8), scales.astype(np.float32)


def with_int8_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large lookup table stored as int8 rows; what is looked up is the same to 8 bits."""
    stored = {each.name: each for each in model.graph.initializer}
    users: dict[str, int] = {}
    for node in model.graph.node:
        for name in node.input:
            users[name] = users.get(name, 0) + 1
    nodes = []
    for node in model.graph.node:
        table = stored.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or not is_large_matrix(table) or users[table.name] > 1:
            nodes.append(node)
            continue
        rows, scales = rows_in_int8(onnx.numpy_helper.to_array(table))
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


def is_large_matrix(table: onnx.TensorProto) -> bool:
    """Whether these are floats in rows, and enough of them for int8 to pay."""
    floats = table.data_type == onnx.TensorProto.FLOAT and len(table.dims) == 2
    return floats and table.dims[0] * table.dims[1] >= SMALLEST
