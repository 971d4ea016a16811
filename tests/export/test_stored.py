"""Matrices stored in int8 and multiplied in float: onnxruntime against numpy."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="the extra onnx is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")


def test_matmuls_equal_those_of_the_rounded_matrices() -> None:
    from trundle.export.int8 import _columns_in_int8, _with_stored_matrices

    random = np.random.default_rng(0)
    first = random.normal(size=(64, 96)).astype(np.float32)
    second = random.normal(size=(48, 96)).astype(np.float32) * np.linspace(0.01, 10, 48)[:, None].astype(
        np.float32
    )
    small = random.normal(size=(48, 4)).astype(np.float32)
    bias = np.zeros(48, np.float32)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("MatMul", ["x", "first"], ["a"]),
            onnx.helper.make_node("Gemm", ["a", "second", "bias"], ["b"], transB=1),
            onnx.helper.make_node("MatMul", ["b", "small"], ["y"]),
        ],
        "two products and a small one",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 64])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])],
        [
            onnx.numpy_helper.from_array(array, name)
            for name, array in (("first", first), ("second", second), ("bias", bias), ("small", small))
        ],
    )
    whole = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    before = whole.ByteSize()
    stored = _with_stored_matrices(whole)
    onnx.checker.check_model(stored)
    assert stored.ByteSize() < 0.4 * before
    assert {each.name for each in stored.graph.initializer if each.data_type == onnx.TensorProto.INT8} == {
        "first_stored",
        "second_stored",
    }
    x = random.normal(size=(5, 64)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # as our engine runs it
    session = onnxruntime.InferenceSession(
        stored.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(None, {"x": x})
    numbers, scales = _columns_in_int8(first, 1)
    rows, row_scales = _columns_in_int8(second, 0)
    expected = (x @ (numbers * scales)) @ (rows * row_scales[:, None]).T @ small
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    # Each output keeps its own precision, however small its weights are.
    assert (np.abs(rows * row_scales[:, None] - second).max(axis=1) <= 0.5001 * row_scales).all()
