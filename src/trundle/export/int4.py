"""An ONNX graph with four bits a weight, opened to floats by plain operations that every runtime has.

Sixteen bytes hold a block of 32 codes: the first sixteen in the low halves, the others in the high ones. The token table is opened
row by row as texts come, matrices when the file is opened: our runtime folds constants. So a product costs what it costs in float32, or in
int8 if that is asked for, and only the file is small. Which weights these are, and on which grid, is told by `model.rounding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export.large import save_onnx
from trundle.export.onnx_file import with_int8_products
from trundle.export.packages import onnx
from trundle.export.stored import second_is_turned
from trundle.export.tables import is_large_matrix, with_int8_tables
from trundle.model import BLOCK, fits_grid, on_grid

SIXTEEN = "sixteen"
SIXTEENTH = "sixteenth"
EIGHT = "eight"
QUANTISED, TURNED = "_quantized", "_Transposed"
"""What onnxruntime's quantiser adds to the name of a matrix it has rounded, or turned before."""


def write_int4(traced: Path, path: Path, *, tokens: int) -> None:
    """Tables of so many rows and all large products in int4, other tables in int8."""
    save_onnx(with_int8_tables(with_int4(onnx.load(traced), tokens=tokens)), path)


def write_int4_with_int8_products(
    traced: Path, path: Path, *, tokens: int, keep: Sequence[str], older_cpus: bool
) -> None:
    """The same, but all products except those to `keep` are computed in int8."""
    model = onnx.load(traced)
    floats = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in model.graph.initializer
        if is_large_matrix(each)
    }
    quantised = with_int8_products(model, path.parent, keep=keep, older_cpus=older_cpus)
    opened = with_rounded_matrices(quantised, floats)
    save_onnx(with_int8_tables(with_int4(opened, tokens=tokens)), path)


def with_rounded_matrices(model: onnx.ModelProto, floats: Mapping[str, Vectors]) -> onnx.ModelProto:
    """The matrices of int8 products stored in four bits, and rounded to int8 by the scales of the graph when it is opened."""
    stored = {each.name: each for each in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        name = node.input[1] if node.op_type == "MatMulInteger" else ""
        weight = name.removesuffix(QUANTISED)
        matrix = floats.get(weight.removesuffix(TURNED))
        if matrix is not None and name in stored:
            numbers, scales = (onnx.numpy_helper.to_array(stored[each]) for each in (name, f"{weight}_scale"))
            columns = as_it_stands(matrix, numbers, scales)
            if columns is not None and fits_grid(*columns.T.shape):
                model.graph.initializer.remove(stored.pop(name))
                nodes += _opened_matrix(model, f"{weight}_grid", columns.T, turned=False)
                nodes += [
                    _node("Div", [f"{weight}_grid", f"{weight}_scale"], f"{weight}_ratio"),
                    _node("Round", [f"{weight}_ratio"], f"{weight}_whole"),
                    _node("Cast", [f"{weight}_whole"], name, to=onnx.TensorProto.INT8),
                ]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def as_it_stands(matrix: Vectors, numbers: NDArray[np.int8], scales: Vectors) -> Vectors | None:
    """The matrix or its transpose, whichever these int8 numbers are of; the quantiser turns some and does not always say so."""
    return next(
        (
            one
            for one in (matrix, matrix.T)
            if one.shape == numbers.shape and np.abs(np.rint(one / scales) - numbers).max() <= 1
        ),
        None,
    )


def with_int4(model: onnx.ModelProto, *, tokens: int) -> onnx.ModelProto:
    """The graph with its token table and the matrices it multiplies by on the grid of four bits."""
    floats = {each.name: each for each in model.graph.initializer if is_large_matrix(each)}
    opened: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        table = floats.get(node.input[0]) if node.op_type == "Gather" else None
        if table is not None and table.dims[0] == tokens and fits_grid(*table.dims):
            nodes += _opened_rows(model, node, _taken(model, table, opened))
            continue
        matrix = floats.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if matrix is not None and matrix.name not in opened:
            turned = second_is_turned(node)
            shape = tuple(matrix.dims) if turned else tuple(reversed(matrix.dims))
            if fits_grid(*shape):
                content = _taken(model, matrix, opened)
                nodes += _opened_matrix(model, matrix.name, content if turned else content.T, turned=turned)
        nodes.append(node)
    for name, value in ((SIXTEEN, 16.0), (SIXTEENTH, 1 / 16), (EIGHT, 8.0)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(value), name))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def packed(matrix: Vectors) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes as (rows, blocks, 16) bytes, and scales as (rows, blocks, 1)."""
    codes, scales = on_grid(torch.tensor(matrix))
    raised = (codes.numpy() + 8).astype(np.uint8)
    low, high = raised[..., : BLOCK // 2], raised[..., BLOCK // 2 :]
    both: NDArray[np.uint8] = low + 16 * high
    return both, scales.numpy().astype(np.float16)


def _taken(model: onnx.ModelProto, tensor: onnx.TensorProto, opened: set[str]) -> Vectors:
    """The content of a tensor that leaves the graph."""
    content: Vectors = onnx.numpy_helper.to_array(tensor)
    if tensor.name not in opened:
        opened.add(tensor.name)
        model.graph.initializer.remove(tensor)
    return content


def _opened_rows(model: onnx.ModelProto, node: onnx.NodeProto, table: Vectors) -> list[onnx.NodeProto]:
    """Look up codes and scales, then open what was looked up."""
    name, ids, out = node.input[0], node.input[1], node.output[0]
    codes, scales = packed(table)
    _store(
        model, {f"{name}_int4": codes, f"{name}_scale": scales, f"{name}_width": np.array([table.shape[1]])}
    )
    return [
        _node("Gather", [f"{name}_int4", ids], f"{out}_codes", axis=0),
        _node("Gather", [f"{name}_scale", ids], f"{out}_scales", axis=0),
        *_floats(f"{out}_codes", f"{out}_scales", f"{out}_blocks"),
        _node("Shape", [ids], f"{out}_ids"),
        _node("Concat", [f"{out}_ids", f"{name}_width"], f"{out}_shape", axis=0),
        _node("Reshape", [f"{out}_blocks", f"{out}_shape"], out),
    ]


def _opened_matrix(
    model: onnx.ModelProto, name: str, matrix: Vectors, *, turned: bool
) -> list[onnx.NodeProto]:
    """A matrix of (outputs, inputs), given to the graph the way it stood there."""
    codes, scales = packed(matrix)
    shape = np.array(matrix.shape, dtype=np.int64)
    _store(model, {f"{name}_int4": codes, f"{name}_scale": scales, f"{name}_shape": shape})
    whole = name if turned else f"{name}_rows"
    nodes = [
        *_floats(f"{name}_int4", f"{name}_scale", f"{name}_blocks"),
        _node("Reshape", [f"{name}_blocks", f"{name}_shape"], whole),
    ]
    return nodes if turned else [*nodes, _node("Transpose", [whole], name, perm=[1, 0])]


def _floats(codes: str, scales: str, out: str) -> list[onnx.NodeProto]:
    """(code − 8) · scale for both halves of every byte."""
    single = onnx.TensorProto.FLOAT
    return [
        _node("Cast", [codes], f"{out}_bytes", to=single),
        _node("Mul", [f"{out}_bytes", SIXTEENTH], f"{out}_ratio"),
        _node("Floor", [f"{out}_ratio"], f"{out}_high"),
        _node("Mul", [f"{out}_high", SIXTEEN], f"{out}_raised"),
        _node("Sub", [f"{out}_bytes", f"{out}_raised"], f"{out}_low"),
        _node("Concat", [f"{out}_low", f"{out}_high"], f"{out}_both", axis=-1),
        _node("Sub", [f"{out}_both", EIGHT], f"{out}_codes"),
        _node("Cast", [scales], f"{out}_factor", to=single),
        _node("Mul", [f"{out}_codes", f"{out}_factor"], out),
    ]


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: object) -> onnx.NodeProto:
    return onnx.helper.make_node(kind, inputs, [output], f"{output}_{kind}", **attributes)


def _store(model: onnx.ModelProto, tensors: dict[str, NDArray[np.generic]]) -> None:
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(content, name) for name, content in tensors.items()
    )
