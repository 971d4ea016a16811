"""Products computed in float whose matrices are stored in int8: what hurts in int8 is the rounded input, not the weights.

A matrix with a scale per output loses next to nothing, and weighs a quarter. A runtime that folds constants when it opens
the file, as ours does, multiplies floats as fast as before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export.packages import onnx
from trundle.export.tables import is_large_matrix, rows_in_int8


def with_stored_matrices(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large float matrix that is multiplied by stored as int8."""
    floats = {each.name: each for each in model.graph.initializer if is_large_matrix(each)}
    nodes, stored = [], set()
    for node in model.graph.node:
        name = node.input[1] if node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 else ""
        if name in floats:
            axis = 0 if second_is_turned(node) else 1
            if name not in stored:
                stored.add(name)
                numbers, scales = columns_in_int8(onnx.numpy_helper.to_array(floats[name]), axis)
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


def columns_in_int8(matrix: Vectors, axis: int) -> tuple[NDArray[np.int8], Vectors]:
    """Int8 with one scale for each place along `axis`, the outputs of the product."""
    rows, scales = rows_in_int8(matrix if axis == 0 else matrix.T)
    return np.ascontiguousarray(rows if axis == 0 else rows.T), scales[:, 0]


def second_is_turned(node: onnx.NodeProto) -> bool:
    """Whether a product's matrix stands as (outputs, inputs)."""
    return any(each.name == "transB" and each.i for each in node.attribute)
