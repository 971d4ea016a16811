"""ONNX files of any size: over 2 GB the weights must lie in a file beside the graph, which runtimes then map."""

from __future__ import annotations

from pathlib import Path

from trundle.export.packages import onnx

LARGEST_IN_ONE_FILE = 1_800_000_000
"""Bytes; the format itself ends at 2 GB."""


def save_onnx(model: onnx.ModelProto, path: Path) -> None:
    """Write a graph to `path`, with its weights in `path`_data if they are large."""
    if model.ByteSize() <= LARGEST_IN_ONE_FILE:
        onnx.save(model, path)
        return
    data = path.with_name(f"{path.name}_data")
    data.unlink(missing_ok=True)  # the library would append to it
    onnx.save(
        model,
        path,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=data.name,
        size_threshold=0,
    )


def gather_weights(path: Path) -> None:
    """Put weights that a tracer scattered over many files beside `path` into one."""
    model = onnx.load(path)
    for file in path.parent.iterdir():
        file.unlink()
    save_onnx(model, path)
