"""From a SentenceTransformer to a folder the runtime opens: trace, check, make small, check again, put in place.

A pair becomes two such folders in one, `query` and `document`; both are made before either is put in place.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from sentence_transformers import SentenceTransformer

from trundle.artifact import check_free, keep_records, swap_folders, whole_folder, write_whole
from trundle.errors import BadInput, BadModel, WriteFailed
from trundle.export.describing import describe, place_tokenizer, write_standalone
from trundle.export.graph import OPSET
from trundle.export.loss import Limits
from trundle.export.parity import PROBES, Parity, check_tokens, torch_vectors
from trundle.export.shrinking import Making, make_float, make_int4, make_int8
from trundle.export.tracing import trace
from trundle.model import is_pair, load, one_route
from trundle.progress import SILENT, Progress
from trundle.runtime.describe import (
    FILE,
    SIDES,
    Description,
    EngineName,
    Graph,
    Precision,
    read_description,
)
from trundle.runtime.engines import is_x86
from trundle.runtime.tokens import Reader

Size = Literal["full", "half", "int8", "int4", "int4+int8"]

PLACES: dict[tuple[EngineName, Size], tuple[str, Precision]] = {
    ("onnx", "full"): ("onnx/model.onnx", "float32"),
    ("onnx", "half"): ("onnx/model_fp16.onnx", "float16"),
    ("onnx", "int8"): ("onnx/model_quantized.onnx", "int8"),
    ("onnx", "int4"): ("onnx/model_q4.onnx", "int4"),
    ("onnx", "int4+int8"): ("onnx/model_q4_int8.onnx", "int4+int8"),
    ("openvino", "full"): ("openvino/openvino_model.xml", "float32"),
    ("openvino", "half"): ("openvino/openvino_model_half.xml", "bfloat16"),
    ("openvino", "int8"): ("openvino/openvino_model_qint8_quantized.xml", "int8"),
}
"""Where sentence-transformers, fastembed, text-embeddings-inference and transformers.js look."""
MEASURED: tuple[Size, ...] = ("int8", "int4", "int4+int8")
"""Those that lose something. The last is stored in int4 and multiplied in int8."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how near it is to the torch model."""

    folder: Path
    graph: Graph
    parity: Parity
    file_bytes: int
    float_bytes: int
    """What the weights weigh in float32."""
    documents: Exported | None = None
    """Of a pair: what was made of the teacher; all else here is then of the student."""

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
            **({"documents": self.documents.as_json()} if self.documents else {}),
        }


def export_model(
    source: str,
    *,
    to: EngineName,
    size: Size = "full",
    output: str | Path | None = None,
    calibrate: Sequence[str] = (),
    limits: Limits | None = None,
    older_cpus: bool = False,
    try_both: bool = False,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Exported:
    """Write a graph of the model into its own folder, or into a new folder `output` that has no torch weights.

    Everything is made and checked in a folder beside; only a graph that agrees with torch is put in place. Of a pair
    there are two graphs, in the folders `query` and `document`. Int8 is
    calibrated on every second text of `calibrate` and measured on the others; it is refused beyond `limits`.
    `try_both` traces with both of torch's tracers and keeps the faster graph.
    """
    if (to, size) not in PLACES:
        raise BadInput(f"{size} is not written for {to}; use --to onnx")
    if (to, size) == ("openvino", "int8") and not is_x86(platform.machine()):
        raise BadInput(
            "openvino's int8 fails on some graphs on this kind of processor; use --to onnx, which is faster here, or export on x86"
        )
    home, place = Path(source).expanduser(), PLACES[to, size][0]
    if size in MEASURED and not calibrate:
        raise BadInput(f"{size} is measured on texts like yours; give them with --calibrate texts.txt")
    if output is None:
        if not home.is_dir():
            raise BadInput(
                f"{source!r} is no folder here to put the graph into; say where it goes with -o FOLDER"
            )
        there = [path for part in ("", *SIDES) if (path := home / part / place).exists()]
        if there and not force:
            raise BadInput(f"{there[0]} exists already; say --force to replace it, or -o FOLDER")
    else:
        check_free(output, replace=force)
    model = load(source, trust_remote_code=trust_remote_code, device="cpu").float().eval()
    order = Order(
        to=to,
        size=size,
        calibrate=tuple(calibrate),
        limits=limits or Limits(),
        older_cpus=older_cpus,
        try_both=try_both,
    )
    export_into = _export_sides if is_pair(model) else _export_into
    if output is None:
        return export_into(home, model, order, progress)
    with whole_folder(output, replace=force) as scratch:
        if not is_pair(model):
            write_standalone(model, scratch)
        exported = export_into(scratch, model, order, progress)
        keep_records(home, scratch)
    return _moved(exported, scratch, Path(output))


def _moved(exported: Exported, scratch: Path, output: Path) -> Exported:
    """The same, told of where it lies now."""
    documents = exported.documents
    return replace(
        exported,
        folder=output / exported.folder.relative_to(scratch),
        documents=None if documents is None else _moved(documents, scratch, output),
    )


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked for."""

    to: EngineName
    size: Size
    calibrate: tuple[str, ...]
    limits: Limits
    older_cpus: bool
    try_both: bool


def _export_into(home: Path, model: SentenceTransformer, order: Order, progress: Progress) -> Exported:
    """Make the graph in a scratch folder inside `home`, check it there, and put it in place by renames."""
    description = replace(describe(model), tokenizer=place_tokenizer(model, home))
    reader = Reader(home, description)
    probes = [text for text, ids in zip(PROBES, reader.read(PROBES), strict=True) if ids]
    check_tokens(model, reader.read, probes)
    place, precision = PLACES[order.to, order.size]
    with _scratch(home) as scratch:
        shutil.copy(home / description.tokenizer, scratch / description.tokenizer)
        path = scratch / place
        path.parent.mkdir()
        making = Making(
            model=model,
            folder=scratch,
            description=description,
            graph=Graph(path=place, engine=order.to, precision=precision, facts={"opset": OPSET}),
            traced=scratch / "traced" / "model.onnx",
            progress=progress,
        )
        facts = trace(making.tracing(probes, torch_vectors(model, probes)), try_both=order.try_both)
        making = making.with_facts(facts)
        if order.size in ("int8", "int4+int8"):
            made = make_int8(making, order.calibrate, limits=order.limits, older_cpus=order.older_cpus)
        elif order.size == "int4":
            made = make_int4(making, order.calibrate, limits=order.limits)
        else:
            made = make_float(making, probes, half=order.size == "half")
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        _put_in_place(home, path.parent, description, made.graph)
    return Exported(
        folder=home,
        graph=made.graph,
        parity=made.parity,
        file_bytes=size,
        float_bytes=sum(weight.numel() * 4 for weight in model.parameters()),
    )


def _export_sides(home: Path, pair: SentenceTransformer, order: Order, progress: Progress) -> Exported:
    """A folder for each side of a pair, beside graphs they may have already; both or neither."""
    made = []
    with _scratch(home) as scratch:
        for side in SIDES:
            model = one_route(pair, side)
            if (home / side / FILE).is_file():
                shutil.copytree(home / side, scratch / side)
            else:
                write_standalone(model, scratch / side)
            made.append(_export_into(scratch / side, model, order, progress))
        for side in SIDES:
            swap_folders(scratch / side, home / side)
        queries, documents = (_moved(each, scratch, home) for each in made)
    return replace(queries, documents=documents)


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
