"""From a SentenceTransformer to a folder the runtime opens: trace, check, then put in place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.artifact import check_free, swap_folders, whole_folder, write_whole
from trundle.errors import BadInput, BadModel, WriteFailed
from trundle.export.describing import describe, place_tokenizer, write_standalone
from trundle.export.graph import OPSET, plain_attention, whole, write_onnx
from trundle.export.parity import PROBES, Parity, check_float, check_tokens, compare, torch_vectors
from trundle.model import load
from trundle.progress import SILENT, Progress
from trundle.runtime.describe import FILE, Description, EngineName, Graph, read_description
from trundle.runtime.encoder import Encoder
from trundle.runtime.tokens import Reader

PLACES: dict[EngineName, str] = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}
"""Where sentence-transformers, fastembed, text-embeddings-inference and transformers.js look."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how near it is to the torch model."""

    folder: Path
    graph: Graph
    parity: Parity
    file_bytes: int
    float_bytes: int
    """What the weights weigh in float32."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "folder": str(self.folder),
            "graph": self.graph.path,
            "engine": self.graph.engine,
            "precision": self.graph.precision,
            "file_bytes": self.file_bytes,
            "float_bytes": self.float_bytes,
            **self.graph.facts,
        }


def export_model(
    source: str,
    *,
    to: EngineName,
    output: str | Path | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Exported:
    """Write a graph of the model into its own folder, or into a new folder `output` that has no torch weights.

    Everything is made and checked in a folder beside; only a graph that agrees with torch is put in place.
    """
    home = Path(source).expanduser()
    if output is None:
        if not home.is_dir():
            raise BadInput(
                f"{source!r} is no folder here to put the graph into; say where it goes with -o FOLDER"
            )
        if (home / PLACES[to]).exists() and not force:
            raise BadInput(f"{home / PLACES[to]} exists already; say --force to replace it, or -o FOLDER")
    else:
        check_free(output, replace=force)
    model = load(source, trust_remote_code=trust_remote_code, device="cpu").eval()
    if output is None:
        return _export_into(home, model, to, progress)
    with whole_folder(output, replace=force) as scratch:
        write_standalone(model, scratch)
        exported = _export_into(scratch, model, to, progress)
    return replace(exported, folder=Path(output))


def _export_into(home: Path, model: SentenceTransformer, to: EngineName, progress: Progress) -> Exported:
    """Make the graph in a scratch folder inside `home`, check it there, and put it in place by renames."""
    description = replace(describe(model), tokenizer=place_tokenizer(model, home))
    check_tokens(model, Reader(home, description).read, PROBES)
    with _scratch(home) as scratch:
        shutil.copy(home / description.tokenizer, scratch / description.tokenizer)
        path = scratch / PLACES[to]
        path.parent.mkdir()
        with progress.task("tracing", None), plain_attention(model):
            write_onnx(whole(model), path, tracer="torchscript")
        graph = Graph(path=PLACES[to], engine=to, precision="float32", facts={"opset": OPSET})
        parity = _measure(scratch, description.with_graph(graph), model)
        check_float(parity)
        graph = replace(graph, facts={**graph.facts, **parity.as_json()})
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        _put_in_place(home, path.parent, description, graph)
    return Exported(
        folder=home,
        graph=graph,
        parity=parity,
        file_bytes=size,
        float_bytes=sum(weight.numel() * 4 for weight in model.parameters()),
    )


def _measure(folder: Path, description: Description, model: SentenceTransformer) -> Parity:
    """Run the graph as a user will, with the runtime, beside torch."""
    (folder / FILE).write_text(description.as_text(), encoding="utf-8")
    encoder = Encoder(folder)
    return compare(lambda texts: encoder.encode(texts, prompt=""), torch_vectors(model, PROBES), PROBES)


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    try:
        with TemporaryDirectory(prefix=".export.", suffix=".part", dir=home) as scratch:
            yield Path(scratch)
    except OSError as error:
        raise WriteFailed(
            f"{home} could not be written ({error.strerror or error}); free some space, or choose another folder"
        ) from error


def _put_in_place(home: Path, made: Path, description: Description, graph: Graph) -> None:
    """Swap the folder of graphs for one that has the new graph too, then tell the runtime of it."""
    there = home / made.name
    if there.is_dir():
        for file in there.iterdir():
            if file.is_file() and not (made / file.name).exists():
                os.link(file, made / file.name)
    swap_folders(made, there)
    write_whole(home / FILE, _with_older_graphs(home, description).with_graph(graph).as_text())


def _with_older_graphs(home: Path, description: Description) -> Description:
    """Keep what was exported before, unless the model has changed since."""
    try:
        older = read_description(home)
    except BadModel:
        return description
    if replace(older, graphs=()) != description:
        return description
    return replace(
        description, graphs=tuple(graph for graph in older.graphs if (home / graph.path).is_file())
    )
