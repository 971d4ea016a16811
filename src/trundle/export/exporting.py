"""From a SentenceTransformer to a folder the runtime opens: trace, check, make small, check again, put in place.

A pair becomes two such folders in one, `query` and `document`; both are made before either is put in place.
"""

from __future__ import annotations

import json
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
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from trundle.errors import BadInput, BadModel, WriteFailed
from trundle.export.graph import _OPSET
from trundle.export.parity import _PROBES, Limits, _check_tokens, _Parity, _torch_vectors
from trundle.export.shrinking import _make_float, _make_int4, _make_int8, _Making
from trundle.export.tracing import _trace
from trundle.folders import check_free, swap_folders, whole_folder, write_whole
from trundle.model.heads import is_pair, normalises, one_route
from trundle.model.load import load
from trundle.model.static import static_table
from trundle.progress import SILENT, Progress
from trundle.records import keep_records
from trundle.runtime.description import (
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

_TOKENIZER = "tokenizer.json"
_OWN_TOKENIZER = "encoder_tokenizer.json"
"""For a model that changes its tokenizer as it is opened, so that the file in its folder does not tell all."""

_MARK = "marked place"

_UNLIMITED = 1_000_000
"""Tokens of a text that a model without a limit reads; the rest is left out."""

_NOT_TOKENIZING = {"padding", "truncation"}
"""How the tokenizer was last asked to fill up and cut; the runtime asks in its own way."""


def _describe(model: SentenceTransformer) -> Description:
    """Everything but the graphs."""
    if any(isinstance(module, Pooling) and not module.include_prompt for module in model) and any(
        model.prompts.values()
    ):
        raise BadModel(
            "the model leaves its prompts out of pooling, which a graph of token ids can't know; "
            "set include_prompt to true"
        )
    static = static_table(model)
    width = model.get_embedding_dimension()
    longest = (
        model.max_seq_length
        if static is None
        else (static.tokenizer.truncation or {}).get("max_length", _UNLIMITED)
    )
    if width is None or longest is None:
        raise BadModel(
            "the model does not say how wide its vectors are and how many tokens it takes; set both"
        )
    before, after = _chat_frame(model)
    if (before or after) and any(model.prompts.values()):
        raise BadModel(
            "the model has both a chat template and prompts, which can't be told to a graph; remove its prompts"
        )
    return Description(
        before=before,
        after=after,
        dimensions=width,
        normalised=normalises(model),
        max_tokens=longest,
        special_tokens=static is None,
        pad_id=0 if static is not None else int(model.tokenizer.pad_token_id or 0),
        prompts={name: prompt or "" for name, prompt in model.prompts.items()},
        parameters=sum(weight.numel() for weight in model.parameters()),
        default_prompt=model.default_prompt_name,
    )


def _chat_frame(model: SentenceTransformer) -> tuple[str, str]:
    """What the model's chat template puts before and after a text; nothing where it has none."""
    features = model.preprocess([_MARK])
    if features.get("modality") != "message":
        return "", ""
    rendered = str(model.tokenizer.decode(features["input_ids"][0].tolist()))
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        raise BadModel("the model's chat template changes the text itself; remove chat_template.jinja")
    return before, after


def _place_tokenizer(model: SentenceTransformer, folder: Path) -> str:
    """The name of a file in `folder` that reads texts as the model does; written if there is none yet."""
    own = model.tokenizer
    backend = own if isinstance(own, Tokenizer) else getattr(own, "backend_tokenizer", None)
    if backend is None:
        raise BadModel(
            "the model's tokenizer is not one of the tokenizers library; save it as tokenizer.json"
        )
    content = _what_it_does(json.loads(backend.to_str()))
    for name in (_TOKENIZER, _OWN_TOKENIZER):
        path = folder / name
        if path.is_file() and _what_it_does(json.loads(path.read_text(encoding="utf-8"))) == content:
            return name
    name = _OWN_TOKENIZER if (folder / _TOKENIZER).is_file() else _TOKENIZER
    (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return name


def _what_it_does(tokenizer: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key in _NOT_TOKENIZING else value for key, value in tokenizer.items()}


def _write_standalone(model: SentenceTransformer, folder: Path) -> None:
    """The standard folder without its torch weights: what a machine that only encodes needs."""
    model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for weights in folder.rglob("*.safetensors*"):
        weights.unlink()


Size = Literal["full", "half", "int8", "int4", "int4+int8"]

_PLACES: dict[tuple[EngineName, Size], tuple[str, Precision]] = {
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
_MEASURED: tuple[Size, ...] = ("int8", "int4", "int4+int8")
"""Those that lose something. The last is stored in int4 and multiplied in int8."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how near it is to the torch model."""

    folder: Path
    graph: Graph
    parity: _Parity
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
    if (to, size) not in _PLACES:
        raise BadInput(f"{size} is not written for {to}; use --to onnx")
    if (to, size) == ("openvino", "int8") and not is_x86(platform.machine()):
        raise BadInput(
            "openvino's int8 fails on some graphs on this kind of processor; use --to onnx, which is faster here, or export on x86"
        )
    home, place = Path(source).expanduser(), _PLACES[to, size][0]
    if size in _MEASURED and not calibrate:
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
    order = _Order(
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
            _write_standalone(model, scratch)
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
class _Order:
    """What was asked for."""

    to: EngineName
    size: Size
    calibrate: tuple[str, ...]
    limits: Limits
    older_cpus: bool
    try_both: bool


def _export_into(home: Path, model: SentenceTransformer, order: _Order, progress: Progress) -> Exported:
    """Make the graph in a scratch folder inside `home`, check it there, and put it in place by renames."""
    description = replace(_describe(model), tokenizer=_place_tokenizer(model, home))
    reader = Reader(home, description)
    probes = [text for text, ids in zip(_PROBES, reader.read(_PROBES), strict=True) if ids]
    _check_tokens(model, reader.read, probes)
    place, precision = _PLACES[order.to, order.size]
    with _scratch(home) as scratch:
        shutil.copy(home / description.tokenizer, scratch / description.tokenizer)
        path = scratch / place
        path.parent.mkdir()
        making = _Making(
            model=model,
            folder=scratch,
            description=description,
            graph=Graph(path=place, engine=order.to, precision=precision, facts={"opset": _OPSET}),
            traced=scratch / "traced" / "model.onnx",
            progress=progress,
        )
        facts = _trace(making.tracing(probes, _torch_vectors(model, probes)), try_both=order.try_both)
        making = making.with_facts(facts)
        if order.size in ("int8", "int4+int8"):
            made = _make_int8(making, order.calibrate, limits=order.limits, older_cpus=order.older_cpus)
        elif order.size == "int4":
            made = _make_int4(making, order.calibrate, limits=order.limits)
        else:
            made = _make_float(making, probes, half=order.size == "half")
        size = sum(file.stat().st_size for file in path.parent.iterdir())
        _put_in_place(home, path.parent, description, made.graph)
    return Exported(
        folder=home,
        graph=made.graph,
        parity=made.parity,
        file_bytes=size,
        float_bytes=sum(weight.numel() * 4 for weight in model.parameters()),
    )


def _export_sides(home: Path, pair: SentenceTransformer, order: _Order, progress: Progress) -> Exported:
    """A folder for each side of a pair, beside graphs they may have already; both or neither."""
    made = []
    with _scratch(home) as scratch:
        for side in SIDES:
            model = one_route(pair, side)
            if (home / side / FILE).is_file():
                shutil.copytree(home / side, scratch / side)
            else:
                _write_standalone(model, scratch / side)
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
