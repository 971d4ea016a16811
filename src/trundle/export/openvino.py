"""openvino's own pair of files, from an ONNX graph: float32, half, or int8 calibrated by nncf."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path

from trundle.errors import MissingExtra
from trundle.export.graph import _save_onnx
from trundle.export.int8 import _Inputs, _with_int8_tables
from trundle.export.parity import onnx

try:
    import nncf
    import openvino
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, OverflowFix
except ImportError as error:
    raise MissingExtra("export to openvino", "openvino") from error


def _write_openvino(traced: Path, path: Path, *, half: bool) -> None:
    """The graph as it is; `half` stores the weights in 16 bits."""
    openvino.save_model(openvino.Core().read_model(traced), path, compress_to_fp16=half)


def _write_calibrated(
    traced: Path, path: Path, samples: Sequence[_Inputs], *, keep: Sequence[str], older_cpus: bool
) -> None:
    """Matrices and their inputs in int8 with scales fixed by what `samples` showed, tables as int8 rows.

    `keep` names products left in float. `older_cpus` avoids sums that overflow on processors without VNNI.
    """
    tables = path.with_name("tables.onnx")
    _save_onnx(_with_int8_tables(onnx.load(traced)), tables)
    graph = openvino.Core().read_model(tables)
    there = {operation.get_friendly_name() for operation in graph.get_ops()}
    with _calm():
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


@contextlib.contextmanager
def _calm() -> Iterator[None]:
    """Keep stdout for results: nncf draws bars there, and logs every phase."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(StringIO()):
            yield
    finally:
        logger.setLevel(level)
