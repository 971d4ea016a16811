"""Exported graphs in the bench, without torch in their process."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from trundle.bench.engines import _ENGINES, _engines_of
from trundle.bench.results import rows
from trundle.bench.rounds import bench
from trundle.export.exporting import _PLACES, export_model


def test_an_exported_folder_is_benched_by_its_graphs(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    source = pico_folders("bert")
    exported = export_model(str(source), to="onnx", output=tmp_path / "small")
    assert _engines_of(str(source)) == ["torch"]
    assert _engines_of(str(tmp_path / "small")) == ["onnx-float32"]
    result = bench([str(tmp_path / "small")], rounds=1, seconds=0.02, threads=1, all_engines=True)
    figures = result.models[0]
    assert figures.engine == "onnx-float32"
    assert figures.dimensions == 32
    assert figures.weights_bytes == exported.file_bytes
    assert figures.parameters * 4 == exported.float_bytes
    assert rows(result)[0] == ("", "small onnx-float32")


def test_every_graph_that_can_be_exported_can_be_benched() -> None:
    for (engine, _), (place, precision) in _PLACES.items():
        row = _ENGINES[f"{engine}-{precision}"]
        assert any(fnmatch(Path(place).name, pattern) for pattern in row.weights)
