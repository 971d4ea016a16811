"""An ONNX graph with four bits a weight, opened to floats by plain operations that every runtime has.

Sixteen bytes hold a block of 32 codes: the first sixteen in the low halves, the others in the high ones. The token table is opened
row by row as texts come, matrices when the file is opened: our runtime folds constants. So a product costs what it costs in float32, or in
int8 if that is asked for, and only the file is small. Which weights these are, and on which grid, is told by `model.rounding`.

Whoever folds constants keeps all that lies between until the end, so as much as can be is done in bytes, and nothing is turned round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export.graph import _save_onnx
from trundle.export.int8 import _is_large_matrix, _second_is_turned, _with_int8_products, _with_int8_tables
from trundle.export.parity import onnx
from trundle.model.matrices import BLOCK, fits_grid, on_grid

_FOUR = "four"
_SIXTEENTH = "sixteenth"
_QUANTISED, _TURNED = "_quantized", "_Transposed"
"""What onnxruntime's quantiser adds to the name of a matrix it has rounded, or turned before."""


def _write_int4(traced: Path, path: Path, *, tokens: int) -> None:
    """Tables of so many rows and all large products in int4, other tables in int8."""
    _save_onnx(_with_int8_tables(_with_int4(onnx.load(traced), tokens=tokens)), path)


def _write_int4_with_int8_products(
    traced: Path, path: Path, *, tokens: int, keep: Sequence[str], older_cpus: bool
) -> None:
    """The same, but all products except those to `keep` are computed in int8."""
    model = onnx.load(traced)
    floats = {
        each.name: onnx.numpy_helper.to_array(each)
        for each in model.graph.initializer
        if _is_large_matrix(each)
    }
    quantised = _with_int8_products(model, path.parent, keep=keep, older_cpus=older_cpus)
    opened = _with_rounded_matrices(quantised, floats)
    _save_onnx(_with_int8_tables(_with_int4(opened, tokens=tokens)), path)


def _with_rounded_matrices(model: onnx.ModelProto, floats: Mapping[str, Vectors]) -> onnx.ModelProto:
    """The matrices of int8 products stored in four bits, and rounded to int8 by the scales of the graph when it is opened."""
    stored = {each.name: each for each in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        name = node.input[1] if node.op_type == "MatMulInteger" else ""
        weight = name.removesuffix(_QUANTISED)
        matrix = floats.get(weight.removesuffix(_TURNED))
        if matrix is not None and name in stored:
            numbers, scales = (onnx.numpy_helper.to_array(stored[each]) for each in (name, f"{weight}_scale"))
            columns = _as_it_stands(matrix, numbers, scales)
            if columns is not None and fits_grid(*columns.T.shape):
                model.graph.initializer.remove(stored.pop(name))
                codes, scale, shape = _stored_matrix(model, f"{weight}_grid", columns.T, turned=False)
                nodes += [
                    *_opened(codes, scale, f"{weight}_ratio", axis=1, over=f"{weight}_scale"),
                    _node("Round", [f"{weight}_ratio"], f"{weight}_whole"),
                    _node("Cast", [f"{weight}_whole"], f"{weight}_blocks", to=onnx.TensorProto.INT8),
                    _node("Reshape", [f"{weight}_blocks", shape], name),
                ]
        nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _as_it_stands(matrix: Vectors, numbers: NDArray[np.int8], scales: Vectors) -> Vectors | None:
    """The matrix or its transpose, whichever these int8 numbers are of; the quantiser turns some and does not always say so."""
    return next(
        (
            one
            for one in (matrix, matrix.T)
            if one.shape == numbers.shape and np.abs(np.rint(one / scales) - numbers).max() <= 1
        ),
        None,
    )


def _with_int4(model: onnx.ModelProto, *, tokens: int) -> onnx.ModelProto:
    """The graph with its token table and the matrices it multiplies by on the grid of four bits."""
    floats = {each.name: each for each in model.graph.initializer if _is_large_matrix(each)}
    opened: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        table = floats.get(node.input[0]) if node.op_type == "Gather" else None
        if table is not None and table.dims[0] == tokens and fits_grid(*table.dims):
            nodes += _opened_rows(model, node, _taken(model, table, opened))
            continue
        matrix = floats.get(node.input[1]) if node.op_type in ("MatMul", "Gemm") else None
        if matrix is not None and matrix.name not in opened:
            turned = _second_is_turned(node)
            shape = tuple(matrix.dims) if turned else tuple(reversed(matrix.dims))
            if fits_grid(*shape):
                content = _taken(model, matrix, opened)
                codes, scale, whole = _stored_matrix(
                    model, matrix.name, content if turned else content.T, turned=turned
                )
                nodes += [
                    *_opened(codes, scale, f"{matrix.name}_blocks", axis=-1 if turned else 1),
                    _node("Reshape", [f"{matrix.name}_blocks", whole], matrix.name),
                ]
        nodes.append(node)
    _store(model, {_FOUR: np.array(4, dtype=np.uint8), _SIXTEENTH: np.array(1 / 16, dtype=np.float32)})
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _packed(matrix: Vectors) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes as (rows, blocks, 16) bytes, and scales as (rows, blocks, 1)."""
    codes, scales = on_grid(torch.tensor(matrix))
    halves = codes.numpy().astype(np.int8).view(np.uint8) & 15
    both = halves[..., : BLOCK // 2] | halves[..., BLOCK // 2 :] << 4
    return both.astype(np.uint8), scales.numpy().astype(np.float16)


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
    codes, scales = _packed(table)
    _store(
        model, {f"{name}_int4": codes, f"{name}_scale": scales, f"{name}_width": np.array([table.shape[1]])}
    )
    return [
        _node("Gather", [f"{name}_int4", ids], f"{out}_codes", axis=0),
        _node("Gather", [f"{name}_scale", ids], f"{out}_scales", axis=0),
        *_opened(f"{out}_codes", f"{out}_scales", f"{out}_blocks", axis=-1),
        _node("Shape", [ids], f"{out}_ids"),
        _node("Concat", [f"{out}_ids", f"{name}_width"], f"{out}_shape", axis=0),
        _node("Reshape", [f"{out}_blocks", f"{out}_shape"], out),
    ]


def _stored_matrix(
    model: onnx.ModelProto, name: str, matrix: Vectors, *, turned: bool
) -> tuple[str, str, str]:
    """A matrix of (outputs, inputs), laid down the way it is multiplied by; the names of codes, scales and shape."""
    codes, scales = _packed(matrix)
    if not turned:
        codes, scales = codes.transpose(1, 2, 0), scales.transpose(1, 2, 0)
    shape = np.array(matrix.shape if turned else matrix.T.shape, dtype=np.int64)
    names = f"{name}_int4", f"{name}_scale", f"{name}_shape"
    _store(model, dict(zip(names, (codes, scales, shape), strict=True)))
    return names


def _opened(codes: str, scales: str, out: str, *, axis: int, over: str | None = None) -> list[onnx.NodeProto]:
    """Code · scale of blocks whose halves lie along the axis, `over` another scale if there is one.

    A code in the upper half of a byte is sixteen times itself once the byte has a sign.
    """
    single, signed = onnx.TensorProto.FLOAT, onnx.TensorProto.INT8
    factor = f"{out}_factor" if over is None else f"{out}_part"
    nodes = [
        _node("BitShift", [codes, _FOUR], f"{out}_first", direction="LEFT"),
        _node("BitShift", [codes, _FOUR], f"{out}_upper", direction="RIGHT"),
        _node("BitShift", [f"{out}_upper", _FOUR], f"{out}_second", direction="LEFT"),
        _node("Cast", [f"{out}_first"], f"{out}_first_codes", to=signed),
        _node("Cast", [f"{out}_second"], f"{out}_second_codes", to=signed),
        _node("Concat", [f"{out}_first_codes", f"{out}_second_codes"], f"{out}_both", axis=axis),
        _node("Cast", [f"{out}_both"], f"{out}_sixteenfold", to=single),
        _node("Cast", [scales], f"{out}_scale", to=single),
        _node("Mul", [f"{out}_scale", _SIXTEENTH], factor),
    ]
    if over is not None:
        nodes.append(_node("Div", [factor, over], f"{out}_factor"))
    return [*nodes, _node("Mul", [f"{out}_sixteenfold", f"{out}_factor"], out)]


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: object) -> onnx.NodeProto:
    return onnx.helper.make_node(kind, inputs, [output], f"{output}_{kind}", **attributes)


def _store(model: onnx.ModelProto, tensors: dict[str, NDArray[np.generic]]) -> None:
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(content, name) for name, content in tensors.items()
    )
