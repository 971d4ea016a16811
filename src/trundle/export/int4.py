"""ONNX graphs with int4 weights, dequantised by plain operations that every runtime has.

Sixteen bytes hold a block of 32 codes: the first sixteen in the low halves, the others in the high ones. Rows
of the token table are dequantised after each lookup, matrices once on loading, because runtimes fold
constants. So only the file is small. Folding keeps all intermediate results, so most operations work on bytes
and none transposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.export import int8
from trundle.export.int8 import _node
from trundle.export.tracing import _save_onnx, _with_short_names, onnx
from trundle.model.matrices import BLOCK, fits_grid, on_grid

_FOUR = "four"
_SIXTEENTH = "sixteenth"
_BY_BLOCK = "by_block"
_MATMULS = ("MatMul", "Gemm")
_QUANTISED, _TRANSPOSED = "_quantized", "_Transposed"
"""What onnxruntime's quantiser appends to the name of a matrix it has quantised, or transposed before."""


def _write_int4(traced: Path, path: Path, *, tokens: int) -> None:
    """The token table (of `tokens` rows) and all large matrices in int4, other tables in int8."""
    model = int8._with_int8_tables(_with_int4(onnx.load(traced), tokens=tokens))
    _save_onnx(_with_short_names(model), path)


def _write_int8_with_int4_tokens(
    traced: Path, path: Path, gains: int8._Gains, *, tokens: int, keep: Sequence[str], older_cpus: bool
) -> None:
    """An int8 graph with its token table in int4."""
    model = int8._with_even_inputs(onnx.load(traced), gains, keep=keep)
    model = int8._with_int8_matmuls(model, path.parent, keep=keep, older_cpus=older_cpus)
    model = int8._with_int8_tables(_with_int4(model, tokens=tokens, matrices=False))
    _save_onnx(_with_short_names(int8._with_stored_matrices(model)), path)


def _write_int4_with_int8_matmuls(
    traced: Path, path: Path, gains: int8._Gains, *, tokens: int, keep: Sequence[str], older_cpus: bool
) -> None:
    """The same, but all matmuls except those in `keep` run in int8."""
    model = onnx.load(traced)
    large = [each for each in model.graph.initializer if int8._is_large_matrix(each)]
    floats = {each.name: onnx.numpy_helper.to_array(each) for each in large}
    sources = {node.input[1]: node.input[0] for node in model.graph.node if node.op_type in _MATMULS}
    model = int8._with_even_inputs(model, gains, keep=keep)
    quantised = int8._with_int8_matmuls(model, path.parent, keep=keep, older_cpus=older_cpus)
    model = _with_requantised_matrices(quantised, floats, sources)
    model = int8._with_int8_tables(_with_int4(model, tokens=tokens))
    _save_onnx(_with_short_names(model), path)


def _with_requantised_matrices(
    model: onnx.ModelProto, floats: Mapping[str, Vectors], sources: Mapping[str, str]
) -> onnx.ModelProto:
    """Store the matrices of int8 matmuls in int4; on loading, the graph's scales quantise them to int8.

    `sources` names the input of each matrix. If that is evened out, the int8 matrix is as well.
    """
    stored = {each.name: each for each in model.graph.initializer}
    int8._store(model, {_BY_BLOCK: np.array([-1, BLOCK, 1])})
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        name = node.input[1] if node.op_type == "MatMulInteger" else ""
        weight = name.removesuffix(_QUANTISED)
        matrix = floats.get(plain := weight.removesuffix(_TRANSPOSED))
        if matrix is not None and name in stored:
            codes, scales = (onnx.numpy_helper.to_array(stored[each]) for each in (name, f"{weight}_scale"))
            evening = stored.get(f"{sources[plain]}{int8._EVENING}")
            factors = None if evening is None else onnx.numpy_helper.to_array(evening)
            columns = _as_stored(matrix, factors, codes, scales)
            if columns is not None and fits_grid(*columns.T.shape):
                model.graph.initializer.remove(stored.pop(name))
                ratio = f"{weight}_ratio" if evening is None else f"{weight}_uneven"
                nodes += _dequantised_matrix(
                    model, f"{weight}_grid", columns.T, ratio, over=f"{weight}_scale"
                )
                if evening is not None:
                    nodes += [
                        _node("Reshape", [evening.name, _BY_BLOCK], f"{weight}_evening"),
                        _node("Div", [ratio, f"{weight}_evening"], f"{weight}_ratio"),
                    ]
                nodes += [
                    _node("Round", [f"{weight}_ratio"], f"{weight}_whole"),
                    _node("Cast", [f"{weight}_whole"], f"{weight}_blocks", to=onnx.TensorProto.INT8),
                    _node("Reshape", [f"{weight}_blocks", f"{weight}_grid_shape"], name),
                ]
        nodes.append(node)
    return int8._replace_nodes(model, nodes)


def _as_stored(
    matrix: Vectors, evening: Vectors | None, codes: NDArray[np.int8], scales: Vectors
) -> Vectors | None:
    """The matrix or its transpose, whichever the int8 codes belong to; the quantiser may not name it."""
    for one in (matrix, matrix.T):
        if one.shape == codes.shape:
            evened = one if evening is None else one / evening[:, None]
            if np.abs(np.rint(evened / scales) - codes).max() <= 1:
                return one
    return None


def _with_int4(model: onnx.ModelProto, *, tokens: int, matrices: bool = True) -> onnx.ModelProto:
    """The graph with its token table and the `matrices` of its float matmuls in int4."""
    floats = {each.name: each for each in model.graph.initializer if int8._is_large_matrix(each)}
    done: set[str] = set()
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        table = floats.get(node.input[0]) if node.op_type == "Gather" else None
        if table is not None and table.dims[0] == tokens and fits_grid(*table.dims):
            nodes += _dequantised_rows(model, node, _removed(model, table, done))
            continue
        matrix = floats.get(node.input[1]) if matrices and node.op_type in _MATMULS else None
        if matrix is not None and matrix.name not in done:
            transposed = int8._is_transposed(node)
            if fits_grid(*(matrix.dims if transposed else reversed(matrix.dims))):
                name, content = matrix.name, _removed(model, matrix, done)
                rows = content if transposed else content.T
                nodes += [
                    *_dequantised_matrix(model, name, rows, f"{name}_blocks", transposed=transposed),
                    _node("Reshape", [f"{name}_blocks", f"{name}_shape"], name),
                ]
        nodes.append(node)
    int8._store(model, {_FOUR: np.array(4, dtype=np.uint8), _SIXTEENTH: np.array(1 / 16, dtype=np.float32)})
    return int8._replace_nodes(model, nodes)


def _packed(matrix: Vectors) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes as (rows, blocks, 16) bytes, and scales as (rows, blocks, 1)."""
    codes, scales = on_grid(torch.tensor(matrix))
    halves = codes.numpy().astype(np.int8).view(np.uint8) & 15
    both = halves[..., : BLOCK // 2] | halves[..., BLOCK // 2 :] << 4
    return both.astype(np.uint8), scales.numpy().astype(np.float16)


def _removed(model: onnx.ModelProto, tensor: onnx.TensorProto, done: set[str]) -> Vectors:
    """The content of a tensor, which is removed from the graph if it is still there."""
    content: Vectors = onnx.numpy_helper.to_array(tensor)
    if tensor.name not in done:
        done.add(tensor.name)
        model.graph.initializer.remove(tensor)
    return content


def _dequantised_rows(model: onnx.ModelProto, node: onnx.NodeProto, table: Vectors) -> list[onnx.NodeProto]:
    """Look up codes and scales, then dequantise the rows that were looked up."""
    name, ids, out = node.input[0], node.input[1], node.output[0]
    codes, scales = _packed(table)
    int8._store(
        model, {f"{name}_int4": codes, f"{name}_scale": scales, f"{name}_width": np.array([table.shape[1]])}
    )
    return [
        _node("Gather", [f"{name}_int4", ids], f"{out}_codes", axis=0),
        _node("Gather", [f"{name}_scale", ids], f"{out}_scales", axis=0),
        *_dequantised(f"{out}_codes", f"{out}_scales", f"{out}_blocks", axis=-1),
        _node("Shape", [ids], f"{out}_ids"),
        _node("Concat", [f"{out}_ids", f"{name}_width"], f"{out}_shape", axis=0),
        _node("Reshape", [f"{out}_blocks", f"{out}_shape"], out),
    ]


def _dequantised_matrix(
    model: onnx.ModelProto,
    name: str,
    matrix: Vectors,
    out: str,
    *,
    transposed: bool = False,
    over: str | None = None,
) -> list[onnx.NodeProto]:
    """Store a matrix of (outputs, inputs) in its matmul's layout; returns the nodes that compute `out`."""
    codes, scales = _packed(matrix)
    if not transposed:
        codes, scales = codes.transpose(1, 2, 0), scales.transpose(1, 2, 0)
    shape = np.array(matrix.shape if transposed else matrix.T.shape, dtype=np.int64)
    int8._store(model, {f"{name}_int4": codes, f"{name}_scale": scales, f"{name}_shape": shape})
    return _dequantised(f"{name}_int4", f"{name}_scale", out, axis=-1 if transposed else 1, over=over)


def _dequantised(
    codes: str, scales: str, out: str, *, axis: int, over: str | None = None
) -> list[onnx.NodeProto]:
    """Code · scale of blocks whose halves lie along the axis, divided by the scale `over` if there is one."""
    # A code in the upper half of a byte is sixteen times itself once the byte has a sign.
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
