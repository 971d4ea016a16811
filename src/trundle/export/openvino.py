"""OpenVINO's pair of files, made from an ONNX graph: float32, half, or int8 calibrated by nncf."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from trundle.errors import BadModel, MissingExtra
from trundle.export.int8 import _Inputs, _with_int8_tables
from trundle.export.tracing import _quiet, _save_onnx, onnx

try:
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix
except ImportError as error:
    raise MissingExtra("export to openvino", "openvino") from error


def _read(graph: Path) -> openvino.Model:
    """Reads an ONNX graph; rejects one that OpenVINO can't run, such as those of DeBERTa."""
    core = openvino.Core()
    found = core.read_model(graph)
    try:
        core.compile_model(found, "CPU")
    except RuntimeError as error:
        raise BadModel("OpenVINO can't run the graph of this model; use --to onnx") from error
    return found


def _write_openvino(traced: Path, path: Path, *, half: bool) -> None:
    """The graph unchanged; `half` stores the weights in 16 bits."""
    openvino.save_model(_read(traced), path, compress_to_fp16=half)


def _write_openvino_int8(
    traced: Path, path: Path, samples: Sequence[_Inputs], *, keep: Sequence[str], older_cpus: bool
) -> None:
    """Matrices and their inputs in int8 with scales calibrated on `samples`, tables in int8 rows.

    `keep` names matmuls that stay in float. `older_cpus` avoids overflow on processors without VNNI.
    """
    tables = path.with_name("tables.onnx")
    _save_onnx(_with_int8_tables(onnx.load(traced)), tables)
    graph = _read(tables)
    there = {operation.get_friendly_name() for operation in graph.get_ops()}
    # stdout is for results: nncf draws progress bars there.
    with _quiet("nncf"), contextlib.redirect_stdout(StringIO()):
        small = nncf.quantize(
            graph,
            nncf.Dataset([dict(sample) for sample in samples]),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=nncf.QuantizationPreset.MIXED,
            subset_size=len(samples),
            ignored_scope=nncf.IgnoredScope(names=[name for name in keep if name in there]),
            advanced_parameters=AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.ENABLE if older_cpus else OverflowFix.DISABLE
            ),
        )
    openvino.save_model(small, path, compress_to_fp16=False)
    for leftover in path.parent.glob("tables.onnx*"):
        leftover.unlink()
