"""The precisions of exported graphs: one table that export, runtime, bench, search and the report read.

A new precision is a row here and the function in `trundle.export` that writes its file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trundle.errors import BadInput

EngineName = Literal["onnx", "openvino"]
Precision = Literal["float32", "float16", "bfloat16", "int8", "int8+int4_tokens", "int4", "int4+int8"]


@dataclass(frozen=True, kw_only=True)
class GraphFormat:
    """One kind of graph file: how it stores weights, how it computes, and its place in a model's folder."""

    engine: EngineName
    precision: Precision
    file: str
    """The path where sentence-transformers, fastembed, text-embeddings-inference and transformers.js look."""
    weights: Precision
    """What the file stores."""
    matmuls: Precision
    """What matmuls run in, which decides the speed."""
    tokens: Precision | None = None
    """What the file stores the token table in, if not as the other weights."""
    bytes_per_layer: int = 0
    """Bytes of a layer's operations, measured on BERT-like models; 0: the file is as large as its weights."""
    other_bytes: int = 9_100
    """Bytes of the operations outside of the layers, if the size of the file is predicted."""
    fallbacks: tuple[Precision, ...] = ()
    """Precisions to export instead if this one loses too much, the preferred one first."""
    x86_only: bool = False

    @property
    def name(self) -> str:
        """Engine and precision, such as `onnx-int8`."""
        return f"{self.engine}-{self.precision}"

    @property
    def is_quantised(self) -> bool:
        """Whether the loss depends on the texts, so that export needs texts to measure it on."""
        return self.weights in ("int8", "int4")


FORMATS: Sequence[GraphFormat] = (
    GraphFormat(
        engine="onnx",
        precision="int8",
        file="onnx/model_quantized.onnx",
        weights="int8",
        matmuls="int8",
        bytes_per_layer=1_250,
        fallbacks=("float32",),
    ),
    GraphFormat(
        engine="onnx",
        precision="int8+int4_tokens",
        file="onnx/model_quantized_q4_tokens.onnx",
        weights="int8",
        matmuls="int8",
        tokens="int4",
        bytes_per_layer=1_250,
        fallbacks=("float32",),
    ),
    GraphFormat(
        engine="openvino",
        precision="int8",
        file="openvino/openvino_model_qint8_quantized.xml",
        weights="int8",
        matmuls="int8",
        x86_only=True,  # on other processors some int8 graphs fail
    ),
    GraphFormat(
        engine="onnx",
        precision="int4+int8",
        file="onnx/model_q4_int8.onnx",
        weights="int4",
        matmuls="int8",
        bytes_per_layer=4_850,
        fallbacks=("int4", "float32"),
    ),
    GraphFormat(
        engine="onnx",
        precision="int4",
        file="onnx/model_q4.onnx",
        weights="int4",
        matmuls="float32",
        bytes_per_layer=5_900,
        fallbacks=("float32",),
    ),
    GraphFormat(
        engine="openvino",
        precision="bfloat16",
        file="openvino/openvino_model_half.xml",
        weights="bfloat16",
        matmuls="bfloat16",
    ),
    GraphFormat(
        engine="onnx", precision="float16", file="onnx/model_fp16.onnx", weights="float16", matmuls="float16"
    ),
    GraphFormat(
        engine="onnx", precision="float32", file="onnx/model.onnx", weights="float32", matmuls="float32"
    ),
    GraphFormat(
        engine="openvino",
        precision="float32",
        file="openvino/openvino_model.xml",
        weights="float32",
        matmuls="float32",
    ),
)
"""All formats. The runtime prefers a precision that comes earlier."""


def graph_format(engine: str, precision: str) -> GraphFormat:
    """The row of the table; a combination that export does not write raises BadInput."""
    for row in FORMATS:
        if (row.engine, row.precision) == (engine, precision):
            return row
    raise BadInput(f"there are no {precision} graphs for {engine}; use --to onnx")


def preference(precision: str) -> int:
    """The rank of a precision: the runtime prefers the lowest."""
    return next(place for place, row in enumerate(FORMATS) if row.precision == precision)
