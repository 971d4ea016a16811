"""Exported graphs in the bench, without torch in their process."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from trundle.bench.child import _WEIGHT_FILES, _engines_of
from trundle.bench.results import rows
from trundle.bench.rounds import BenchOptions, bench
from trundle.export.exporting import export_model
from trundle.precision import FORMATS


def test_an_exported_folder_is_benched_by_its_graphs(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = pico_folders("bert")
    exported = export_model(str(source), to="onnx", output=tmp_path / "small")
    assert _engines_of(str(source)) == ["torch"]
    assert _engines_of(str(tmp_path / "small")) == ["onnx-float32"]
    result = bench(
        [str(tmp_path / "small")], options=BenchOptions(rounds=1, seconds=0.02, threads=1), all_engines=True
    )
    figures = result.models[0]
    assert figures.engine == "onnx-float32"
    assert figures.dimensions == 32
    assert figures.weights_bytes == exported.file_bytes
    assert figures.parameters * 4 == exported.float_bytes
    assert rows(result)[0] == ("", "small onnx-float32")


def test_every_graph_that_can_be_exported_can_be_benched() -> None:
    for row in FORMATS:
        assert fnmatch(row.file, _WEIGHT_FILES[row.name])
