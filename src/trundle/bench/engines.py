"""Which engines can be benched, and how a worker opens a model with each.

An engine is a row here and a file with `open_model(model, threads, batch_size)`. The file is imported only inside
a worker that was asked for it, so that no engine pays for the memory and start of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:  # numpy must not be in a worker before its bare memory is read
    from trundle.embedder import Embedder


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to run a model: the file that opens it, and which files on disk are its weights."""

    module: str
    weights: tuple[str, ...]


ENGINES: Mapping[str, Engine] = {
    "torch": Engine(module="trundle.bench.torch_engine", weights=("*.safetensors",)),
}


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A model that is ready to encode, and what it says of itself."""

    embedder: Embedder
    parameters: int
    max_tokens: int | None
    device: str
    folder: Path | None


class OpenModel(Protocol):
    """What every engine file offers."""

    def __call__(self, model: str, *, threads: int, batch_size: int) -> Opened:
        """Open `model` so that it runs on `threads` threads."""
        ...


def opener(engine: str) -> OpenModel:
    """Import the engine's libraries; what comes back opens a model without importing anything more."""
    return cast("OpenModel", import_module(ENGINES[engine].module).open_model)


def bytes_on_disk(folder: Path, patterns: tuple[str, ...]) -> int:
    """What the files in `folder` and below that match one of `patterns` weigh."""
    files = {file for pattern in patterns for file in folder.rglob(pattern) if file.is_file()}
    return sum(file.stat().st_size for file in files)
