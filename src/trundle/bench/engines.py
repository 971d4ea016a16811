"""Which engines can be benched, and how a worker opens a model with each.

An engine is a row here and a file with `open_model(model, threads, batch_size)`, and `graph` where it has several. The
file is imported only inside a worker that was asked for it, so that no engine pays for the memory and start of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from trundle.runtime.description import installed, is_exported, read_description, side_folders
from trundle.runtime.encoder import Encoder

if TYPE_CHECKING:
    from trundle.embedder import Embedder


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """One way to run a model: the file that opens it, and which files on disk are its weights."""

    module: str
    weights: tuple[str, ...]
    graph: str | None = None
    """Which graph of an exported folder is run, by its engine and precision."""


_RUNTIME = "trundle.bench.engines"
_ENGINES: Mapping[str, _Engine] = {
    "torch": _Engine(module="trundle.bench.torch_engine", weights=("*.safetensors",)),
    "onnx-float32": _Engine(module=_RUNTIME, weights=("model.onnx*",), graph="onnx-float32"),
    "onnx-float16": _Engine(module=_RUNTIME, weights=("model_fp16.onnx*",), graph="onnx-float16"),
    "onnx-int8": _Engine(module=_RUNTIME, weights=("model_quantized.onnx*",), graph="onnx-int8"),
    "onnx-int4": _Engine(module=_RUNTIME, weights=("model_q4.onnx*",), graph="onnx-int4"),
    "onnx-int4+int8": _Engine(module=_RUNTIME, weights=("model_q4_int8.onnx*",), graph="onnx-int4+int8"),
    "openvino-float32": _Engine(module=_RUNTIME, weights=("openvino_model.*",), graph="openvino-float32"),
    "openvino-bfloat16": _Engine(
        module=_RUNTIME, weights=("openvino_model_half.*",), graph="openvino-bfloat16"
    ),
    "openvino-int8": _Engine(
        module=_RUNTIME, weights=("*_quantized.xml", "*_quantized.bin"), graph="openvino-int8"
    ),
}


def _engines_of(model: str) -> list[str]:
    """Everything that can run a model here: torch, if it has torch weights, and each of its exported graphs.

    In a pair, those graphs that both of its models have.
    """
    folder = Path(model).expanduser()
    if not is_exported(folder):
        return ["torch"]
    queries, documents = (
        [
            f"{graph.engine}-{graph.precision}"
            for graph in read_description(place).graphs
            if installed(graph.engine)
        ]
        for place in side_folders(folder).values()
    )
    torch = ["torch"] if any(folder.rglob("*.safetensors")) else []
    return [*torch, *(engine for engine in documents if engine in queries)]


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A model that is ready to encode, and what it says of itself."""

    embedder: Embedder
    parameters: int
    max_tokens: int | None
    device: str
    folder: Path | None


class _OpenModel(Protocol):
    """What every engine file offers."""

    def __call__(self, model: str, *, threads: int, batch_size: int) -> _Opened:
        """Open `model` so that it runs on `threads` threads."""
        ...


def _opener(engine: str) -> _OpenModel:
    """Import the engine's libraries; what comes back opens a model without importing anything more."""
    row = _ENGINES[engine]
    open_model = import_module(row.module).open_model
    return cast("_OpenModel", open_model if row.graph is None else partial(open_model, graph=row.graph))


def _bytes_on_disk(folder: Path, patterns: tuple[str, ...]) -> int:
    """What the files in `folder` and below that match one of `patterns` weigh."""
    files = {file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}
    return sum(file.stat().st_size for file in files)


def _open_model(model: str, *, threads: int, batch_size: int, graph: str) -> _Opened:
    """Open one graph of an exported folder; the runtime cuts its batches by itself."""
    encoder = Encoder(model, graph=graph, threads=threads)
    return _Opened(
        embedder=encoder.embedder(model),
        parameters=encoder.parameters,
        max_tokens=encoder.max_tokens,
        device="cpu",
        folder=Path(model).expanduser(),
    )
