"""Smaller ONNX files: int8 and float16."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from onnxruntime.quantization import QuantType, quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from trundle.export.large import save_onnx
from trundle.export.packages import onnx
from trundle.export.stored import with_stored_matrices
from trundle.export.tables import with_int8_tables


def write_int8(traced: Path, path: Path, *, keep: Sequence[str], older_cpus: bool) -> None:
    """Matrices as int8 with a scale per column, inputs quantised as they come, tables as int8 rows.

    `keep` names products left in float, of which only the storage is int8. `older_cpus` gives matrices 7 bits: processors without VNNI add two
    products in 16 bits, where 8-bit ones can overflow without a word.
    """
    model = with_int8_products(
        with_int8_tables(onnx.load(traced)), path.parent, keep=keep, older_cpus=older_cpus
    )
    save_onnx(with_stored_matrices(model), path)


def with_int8_products(
    model: onnx.ModelProto, folder: Path, *, keep: Sequence[str], older_cpus: bool
) -> onnx.ModelProto:
    """The graph with every product in int8 but those to `keep`; the library works on files, in `folder`."""
    whole, quantised = folder / "making-whole.onnx", folder / "making-int8.onnx"
    try:
        save_onnx(model, whole)
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


def write_float16(traced: Path, path: Path) -> None:
    """Weights and arithmetic in float16; inputs and outputs stay as they are."""
    model = convert_float_to_float16(onnx.load(traced), keep_io_types=True)
    save_onnx(model, path)


def _no_advice(record: logging.LogRecord) -> bool:
    """Drop the quantiser's advice to prepare the graph: it has been."""
    return "pre-processing" not in record.getMessage()
