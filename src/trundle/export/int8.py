"""Smaller ONNX files: int8 and float16."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from trundle.embedder import Vectors
from trundle.export.tracing import _quiet, _save_onnx, _with_short_names, onnx, onnxruntime

_IN_FLOAT = "_in_float"
"""Ends the names of the matmuls of outliers."""
_EVENING = "_evening"
"""Ends the names of the tensors that inputs of matmuls are multiplied by."""
_SMALLEST = 4096
"""Values from which int8 saves more than its additional nodes cost."""
_SHIFTS = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
"""How far the range of an input's channel may be moved into the matrix; 1: all of it."""
_OUTLIERS = 8
"""Channels that a float matmul may take from an int8 one."""
_WORTH = 0.9
"""The share of the error that may be left for such a matmul to be worth its time."""

_Inputs = Mapping[str, NDArray[np.int64]]


class _Gain(NamedTuple):
    """How an input of matmuls is evened out before it is rounded."""

    channels: Vectors
    """What they are divided by and the matrices' rows multiplied; infinite: left to a float matmul."""
    by_token: bool = False
    """Whether each token is divided by its largest value, and what the matrices make of it multiplied."""


_Gains = Mapping[str, _Gain]


def _write_float16(traced: Path, path: Path) -> None:
    """Weights and arithmetic in float16; inputs and outputs stay unchanged."""
    _save_onnx(convert_float_to_float16(onnx.load(traced), keep_io_types=True), path)


def _write_int8(traced: Path, path: Path, gains: _Gains, *, keep: Sequence[str], older_cpus: bool) -> None:
    """Matrices in int8 with one scale per column, inputs quantised at run time, tables in int8 rows.

    `keep` names matmuls that run in float; only their storage is int8. `older_cpus` gives matrices 7 bits:
    processors without VNNI add two 8-bit products in 16 bits, which can overflow silently.
    """
    model = _with_int8_tables(_with_even_inputs(onnx.load(traced), gains, keep=keep))
    model = _with_int8_matmuls(model, path.parent, keep=keep, older_cpus=older_cpus)
    _save_onnx(_with_short_names(_with_stored_matrices(model)), path)


def _with_even_inputs(model: onnx.ModelProto, gains: _Gains, *, keep: Sequence[str]) -> onnx.ModelProto:
    """The same function, with the inputs of matmuls divided by their gains and the matrices multiplied.

    An input has one int8 scale for all channels, so one channel with outliers costs all others their
    precision (SmoothQuant, https://arxiv.org/abs/2211.10438). One multiplication serves all matmuls that
    read the same input. The same for tokens: a decoder's first token can be twenty times as large as all
    others. Matmuls in `keep` stay as they are.
    """
    users = Counter(name for node in model.graph.node for name in node.input)
    known = {name: source for name, (source, _) in _matmuls(model).items() if name not in keep}
    stored = {each.name: each for each in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    evened: set[str] = set()
    for node in model.graph.node:
        source = known.get(node.name, "")
        if source not in gains or users[node.input[1]] > 1:
            nodes.append(node)
            continue
        gain = gains[source]
        outliers = np.flatnonzero(np.isinf(gain.channels))
        if source not in evened:
            evened.add(source)
            nodes += _even_input(model, source, gain)
        tensor = stored[node.input[1]]
        matrix = onnx.numpy_helper.to_array(tensor)
        columns = matrix.T if _is_transposed(node) else matrix
        scaled = _scaled_rows(columns, gain.channels)
        scaled = np.ascontiguousarray(scaled.T if _is_transposed(node) else scaled)
        tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
        node.input[0] = f"{source}_even"
        nodes.append(node)
        out = node.output[0]
        node.output[0] = rest = f"{out}_rest" if outliers.size else out
        if gain.by_token:
            node.output[0] = f"{out}_even"
            nodes.append(_node("Mul", [node.output[0], f"{source}_largest"], rest))
        if outliers.size:
            rows = f"{node.name}_rows"
            _store(model, {rows: np.ascontiguousarray(columns[outliers])})
            nodes += [
                _node("MatMul", [f"{source}_outliers", rows], f"{out}_outliers", f"{node.name}{_IN_FLOAT}"),
                _node("Add", [rest, f"{out}_outliers"], out),
            ]
    return _replace_nodes(model, nodes)


def _even_input(model: onnx.ModelProto, source: str, gain: _Gain) -> list[onnx.NodeProto]:
    """The nodes that divide an input by its gain, and that pick its outliers before that."""
    even, tokens = f"{source}_even", f"{source}_tokens"
    _store(model, {f"{source}{_EVENING}": (1 / gain.channels).astype(np.float32)})
    nodes = [_node("Mul", [source, f"{source}{_EVENING}"], tokens if gain.by_token else even)]
    if gain.by_token:
        _store(model, {f"{source}_axis": np.array([-1]), f"{source}_least": np.array([1e-12], np.float32)})
        nodes += [
            _node("Abs", [tokens], f"{source}_sizes"),
            _node("ReduceMax", [f"{source}_sizes", f"{source}_axis"], f"{source}_top", keepdims=1),
            _node("Max", [f"{source}_top", f"{source}_least"], f"{source}_largest"),
            _node("Div", [tokens, f"{source}_largest"], even),
        ]
    if (outliers := np.flatnonzero(np.isinf(gain.channels))).size:
        _store(model, {f"{source}_channels": outliers})
        nodes.append(_node("Gather", [source, f"{source}_channels"], f"{source}_outliers", axis=-1))
    return nodes


def _scaled_rows(matrix: Vectors, gain: Vectors) -> Vectors:
    """A matrix (in, out) for an input that is divided by the gain; rows of outliers are zero."""
    return np.asarray(matrix * np.where(np.isinf(gain), 0, gain)[:, None], dtype=np.float32)


def _with_int8_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large lookup table stored as int8 rows and dequantised after the lookup."""
    stored = {each.name: each for each in model.graph.initializer}
    users = Counter(name for node in model.graph.node for name in node.input)
    nodes = []
    for node in model.graph.node:
        table = stored.get(node.input[0]) if node.op_type == "Gather" else None
        if table is None or not _is_large_matrix(table) or users[table.name] > 1:
            nodes.append(node)
            continue
        rows, scales = _rows_in_int8(onnx.numpy_helper.to_array(table))
        name, ids, out = table.name, node.input[1], node.output[0]
        model.graph.initializer.remove(table)
        _store(model, {f"{name}_int8": rows, f"{name}_scale": scales})
        nodes += [
            _node("Gather", [f"{name}_int8", ids], f"{out}_int8", axis=0),
            _node("Gather", [f"{name}_scale", ids], f"{out}_scale", axis=0),
            _node("Cast", [f"{out}_int8"], f"{out}_cast", to=onnx.TensorProto.FLOAT),
            _node("Mul", [f"{out}_cast", f"{out}_scale"], out),
        ]
    return _replace_nodes(model, nodes)


def _with_int8_matmuls(
    model: onnx.ModelProto, folder: Path, *, keep: Sequence[str], older_cpus: bool
) -> onnx.ModelProto:
    """The graph with every matmul in int8 except those in `keep` and those of outliers.

    The library needs files, in `folder`.
    """
    floats = [node.name for node in model.graph.node if node.name.endswith(_IN_FLOAT)]
    plain, quantised = folder / "making-whole.onnx", folder / "making-int8.onnx"
    try:
        _save_onnx(model, plain)
        with _quiet("root"):  # its advice to prepare the graph: it is prepared
            quantize_dynamic(
                plain,
                quantised,
                per_channel=True,
                reduce_range=older_cpus,
                weight_type=QuantType.QInt8,
                op_types_to_quantize=["MatMul", "Gemm"],
                nodes_to_exclude=[*keep, *floats],
                use_external_data_format=(folder / f"{plain.name}_data").exists(),
            )
        return onnx.load(quantised)
    finally:
        for leftover in folder.glob("making-*"):
            leftover.unlink()


def _with_stored_matrices(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph with every large float matrix of a matmul stored as int8."""
    floats = {each.name: each for each in model.graph.initializer if _is_large_matrix(each)}
    nodes, stored = [], set()
    for node in model.graph.node:
        name = node.input[1] if node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 else ""
        if name in floats and name not in stored:
            stored.add(name)
            axis = 0 if _is_transposed(node) else 1
            codes, scales = _columns_in_int8(onnx.numpy_helper.to_array(floats[name]), axis)
            model.graph.initializer.remove(floats[name])
            _store(model, {f"{name}_stored": codes, f"{name}_stored_scale": scales})
            inputs = [f"{name}_stored", f"{name}_stored_scale"]
            nodes.append(_node("DequantizeLinear", inputs, name, axis=axis))
        nodes.append(node)
    return _replace_nodes(model, nodes)


def _rows_in_int8(table: Vectors) -> tuple[NDArray[np.int8], Vectors]:
    """Each row in int8 with its own scale, so that a row of outliers does not affect the others."""
    scales = np.maximum(np.abs(table).max(axis=1, keepdims=True), 1e-12) / 127
    return np.rint(table / scales).astype(np.int8), scales.astype(np.float32)


def _columns_in_int8(matrix: Vectors, axis: int) -> tuple[NDArray[np.int8], Vectors]:
    """int8 with one scale per place along `axis`, the outputs of the matmul."""
    rows, scales = _rows_in_int8(matrix if axis == 0 else matrix.T)
    return np.ascontiguousarray(rows if axis == 0 else rows.T), scales[:, 0]


def _is_large_matrix(table: onnx.TensorProto) -> bool:
    floats = table.data_type == onnx.TensorProto.FLOAT and len(table.dims) == 2
    return floats and table.dims[0] * table.dims[1] >= _SMALLEST


def _is_transposed(node: onnx.NodeProto) -> bool:
    """Whether a matmul's matrix has the shape (outputs, inputs)."""
    return any(each.name == "transB" and each.i for each in node.attribute)


def _node(
    kind: str, inputs: Sequence[str], output: str, name: str = "", **attributes: object
) -> onnx.NodeProto:
    return onnx.helper.make_node(kind, inputs, [output], name or f"{output}_{kind}", **attributes)


def _store(model: onnx.ModelProto, tensors: Mapping[str, NDArray[np.generic]]) -> None:
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(content, name) for name, content in tensors.items()
    )


def _replace_nodes(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def _matmuls(model: onnx.ModelProto) -> dict[str, tuple[str, Vectors]]:
    """Every matmul with a fixed matrix: node name → the name of its input and the matrix as (in, out)."""
    stored = {each.name: each for each in model.graph.initializer}
    found: dict[str, tuple[str, Vectors]] = {}
    for node in model.graph.node:
        if node.op_type in {"MatMul", "Gemm"} and node.input[1] in stored:
            matrix = onnx.numpy_helper.to_array(stored[node.input[1]])
            if matrix.ndim == 2:
                found[node.name] = (node.input[0], matrix.T if _is_transposed(node) else matrix)
    return found


def _inputs_with_bias(model: onnx.ModelProto) -> set[str]:
    """The inputs of matmuls that add a bias, which runtimes fuse unless something comes in between."""
    stored = {each.name for each in model.graph.initializer}
    adding = [{*node.input} for node in model.graph.node if node.op_type == "Add"]
    added = set().union(*(names - stored for names in adding if names & stored))
    return {node.input[0] for node in model.graph.node if node.op_type == "Gemm" or added & {*node.output}}


def _int8_error(texts: Sequence[Vectors], matrix: Vectors, gain: _Gain) -> float:
    """Relative error of a matmul with one int8 scale for each text's input and one per column."""
    scaled = _scaled_rows(matrix, gain.channels)
    scales = np.maximum(np.abs(scaled).max(axis=0, keepdims=True), 1e-12) / 127
    inputs = [each / gain.channels for each in texts]
    rounded = np.concatenate([_rounded_input(each, by_token=gain.by_token) for each in inputs])
    lost = np.linalg.norm(np.concatenate(inputs) @ scaled - rounded @ (np.rint(scaled / scales) * scales))
    return float(lost / max(float(np.linalg.norm(np.concatenate(texts) @ matrix)), 1e-12))


def _rounded_input(values: Vectors, *, by_token: bool) -> Vectors:
    largest = np.maximum(np.abs(values).max(axis=1, keepdims=True), 1e-12) if by_token else np.float32(1)
    even = values / largest
    step = max(float(even.max(initial=0) - even.min(initial=0)), 1e-12) / 255
    return np.asarray(np.rint(even / step) * step * largest, dtype=np.float32)


def _best_gain(
    range_: Vectors, matrices: Sequence[Vectors], inputs: Sequence[Vectors], *, outliers: int, by_token: bool
) -> tuple[_Gain, list[float]]:
    """The gain of an input with the least error, from the ranges of its channels, and its matrices' errors.

    If the matrix has more inputs than outputs, as the second one of an MLP, `outliers` of the channels get an
    infinite gain where that is worth its time.
    """
    rows = np.max([np.abs(matrix).max(axis=1) for matrix in matrices], axis=0)

    def moved(shift: float) -> Vectors:
        if shift == 0:
            return np.ones_like(range_)
        raw = _floored(range_) ** shift / _floored(rows) ** (1 - shift)
        return np.asarray(raw / np.exp(np.log(raw).mean()), dtype=np.float32)

    def best(channels: Sequence[Vectors]) -> tuple[_Gain, list[float]]:
        tried = [_Gain(each, by_token) for each in channels]
        errors = [[_int8_error(inputs, matrix, gain) for matrix in matrices] for gain in tried]
        return min(zip(tried, errors, strict=True), key=lambda one: sum(one[1]))

    plain = list(map(moved, _SHIFTS))
    whole = best(plain)
    if outliers == 0 or len(matrices) > 1 or matrices[0].shape[0] <= matrices[0].shape[1]:
        return whole  # to add as many outputs as there are inputs, or more, takes too long
    left_out = np.isin(np.arange(len(range_)), np.argsort(-range_, kind="stable")[:outliers])
    split = best([np.where(left_out, np.float32(np.inf), each) for each in plain])
    return split if sum(split[1]) < _WORTH * sum(whole[1]) else whole


def _floored(values: Vectors) -> Vectors:
    """Channels that are hardly used count like small ones, so that their gain is not extreme."""
    return np.maximum(values, max(1e-2 * float(values.mean()), 1e-12))


def _calibrated(
    path: Path, samples: Sequence[_Inputs], probes: Sequence[_Inputs], *, split: bool
) -> tuple[list[str], _Gains]:
    """Names of all matmuls with fixed matrices, the largest int8 error first, and the gains of their inputs.

    Ranges are measured on the `samples`, errors on the `probes`. `split` allows infinite gains.
    """
    model = onnx.load(path)
    known = _matmuls(model)
    if not known:
        return [], {}
    names = sorted({source for source, _ in known.values()})
    present = {each.name for each in (*model.graph.output, *model.graph.input)}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
    probed = path.with_name("probed.onnx")
    try:
        _save_onnx(model, probed)
        session = onnxruntime.InferenceSession(str(probed), providers=["CPUExecutionProvider"])
    finally:
        for leftover in path.parent.glob("probed.onnx*"):
            leftover.unlink()
    widths, with_bias = {source: len(matrix) for source, matrix in known.values()}, _inputs_with_bias(model)
    ranges = {name: np.zeros(widths[name], dtype=np.float32) for name in names}
    for sample in samples:
        for name, values in zip(names, session.run(names, dict(sample)), strict=True):
            np.maximum(ranges[name], np.abs(values.reshape(-1, widths[name])).max(axis=0), out=ranges[name])
    runs = [session.run(names, dict(sample)) for sample in probes]
    errors: dict[str, float] = {}
    gains: dict[str, _Gain] = {}
    for place, name in enumerate(names):
        readers = {node: matrix for node, (source, matrix) in known.items() if source == name}
        gains[name], lost = _best_gain(
            ranges[name],
            list(readers.values()),
            [values[place].reshape(-1, widths[name]) for values in runs],
            outliers=_OUTLIERS if split else 0,
            by_token=name not in with_bias,
        )
        errors |= zip(readers, lost, strict=True)
    needed = {name: gain for name, gain in gains.items() if gain.by_token or (gain.channels != 1).any()}
    return sorted(errors, key=lambda node: (-errors[node], node)), needed
