"""From a SentenceTransformer to a folder that the runtime loads: trace, quantise, check, then replace files.

A pair becomes two such folders in one, `query` and `document`; both are made before either is put in place.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer

from trundle.cache import cache_key
from trundle.errors import BadInput, BadModel, WriteFailed
from trundle.export import tracing
from trundle.export.quantise import ExportOptions, _make_float, _make_quantised, _prepared
from trundle.folders import (
    atomic_folder,
    check_free,
    locked_folder,
    scratch_folder,
    swap_folders,
    write_atomic,
)
from trundle.model.heads import is_pair, normalises, one_route
from trundle.model.load import load
from trundle.model.save import weights_digest
from trundle.model.static import static_table
from trundle.precision import EngineName, GraphFormat, Precision, graph_format, preference
from trundle.progress import SILENT, Progress
from trundle.records import CALIBRATION_FILE, LINEAGE_FILE
from trundle.runtime.description import FILE, SIDES, Description, Graph, read_description, read_weights
from trundle.runtime.engines import is_x86
from trundle.runtime.model import Reader

_TOKENIZER = "tokenizer.json"
_OWN_TOKENIZER = "encoder_tokenizer.json"
"""For a model that changes its tokenizer on loading, so that the file in its folder is not enough."""
_MARK = "marked place"
_UNLIMITED = 1_000_000
"""Tokens after which a text is truncated if the model has no limit."""
_NOT_TOKENIZING = {"padding", "truncation"}
"""Settings of the tokenizer's last call; the runtime has its own."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A graph that was written, and how close it is to the torch model."""

    folder: Path
    graph: Graph
    closeness: tracing._Closeness
    file_bytes: int
    float_bytes: int
    """Bytes of the torch weights in float32."""
    documents: Exported | None = None
    """In a pair: the graph of the teacher; the other fields describe the student's."""

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
    precision: Precision = "float32",
    output: str | Path | None = None,
    options: ExportOptions | None = None,
    force: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Exported:
    """Write a graph of the model into its own folder, or into a new folder `output` without torch weights.

    The graph is made and checked in a scratch folder; it is put in place only if it agrees with torch. A pair
    gets two graphs, in the folders `query` and `document`. `force` replaces an existing graph or folder.
    """
    options = options or ExportOptions()
    row = graph_format(to, precision)
    home = Path(source).expanduser()
    if row.x86_only and not is_x86(platform.machine()):
        raise BadInput(f"{row.name} graphs fail on this kind of processor; use --to onnx, or export on x86")
    if row.is_quantised and not options.calibrate:
        raise BadInput(f"{precision} is measured on texts like yours; pass them with --data")
    if output is None:
        if not home.is_dir():
            raise BadInput(f"{source!r} is not a folder; choose one for the graph with -o FOLDER")
        there = [path for part in ("", *SIDES) if (path := home / part / row.file).exists()]
        if there and not force:
            raise BadInput(f"{there[0]} exists already; pass --force to replace it, or -o FOLDER")
    else:
        check_free(output, replace=force, read=[source])
    model = load(source, trust_remote_code=trust_remote_code, device="cpu").float().eval()
    export_into = _export_sides if is_pair(model) else _export_into
    if output is None:
        return export_into(home, model, row, options, progress, source=home)
    with atomic_folder(output, replace=force, keep=True) as scratch:
        if not is_pair(model):
            _write_standalone(model, scratch)
        exported = export_into(scratch, model, row, options, progress)
        for name in (LINEAGE_FILE, CALIBRATION_FILE):
            if (home / name).is_file():
                shutil.copy(home / name, scratch / name)
    return _moved(exported, scratch, Path(output))


def _moved(exported: Exported, scratch: Path, output: Path) -> Exported:
    documents = exported.documents
    return replace(
        exported,
        folder=output / exported.folder.relative_to(scratch),
        documents=None if documents is None else _moved(documents, scratch, output),
    )


def _export_into(
    home: Path,
    model: SentenceTransformer,
    row: GraphFormat,
    options: ExportOptions,
    progress: Progress,
    *,
    source: Path | None = None,
) -> Exported:
    """Make and check the graph in a scratch folder inside `home`, then put it in place by renames.

    `source` is the folder of the model's torch weights, if they stay with the graph.
    """
    tokenizer = _place_tokenizer(model, home)
    digest, files = ("", {}) if source is None else read_weights(source)
    description = replace(_describe(model), tokenizer=tokenizer, weights=digest, weight_files=files)
    reader = Reader(home, description)
    probes = [text for text, ids in zip(tracing._PROBES, reader.read(tracing._PROBES), strict=True) if ids]
    tracing._check_tokens(model, reader.read, probes)
    traced = _prepared(model, row, reader, options, progress)
    with _scratch(home) as scratch:
        shutil.copy(home / description.tokenizer, scratch / description.tokenizer)
        job = tracing._GraphJob(
            model=traced,
            exact=model,
            folder=scratch,
            description=description,
            reader=reader,
            graph=Graph(
                path=row.file, engine=row.engine, precision=row.precision, facts={"opset": tracing._OPSET}
            ),
            progress=progress,
        )
        job.path.parent.mkdir()
        job = job.with_facts(
            tracing._trace(job, probes, tracing._torch_vectors(traced, probes), try_both=options.try_both)
        )
        graph, closeness = _make_quantised(job, options) if row.is_quantised else _make_float(job, probes)
        size = sum(file.stat().st_size for file in job.path.parent.iterdir())
        with locked_folder(home, lambda: progress.say(f"{home} is being exported by another process")):
            graphs = _put_in_place(home, job.path.parent, description, graph).graphs
    if (default := min(graphs, key=lambda each: preference(each.precision))).precision != graph.precision:
        chosen = f"graph={graph.engine + '-' + graph.precision!r}"
        progress.say(f"{default.path} still runs by default; choose the new one with Encoder(…, {chosen})")
    return Exported(
        folder=home,
        graph=graph,
        closeness=closeness,
        file_bytes=size,
        float_bytes=sum(weight.numel() * 4 for weight in model.parameters()),
    )


def _export_sides(
    home: Path,
    pair: SentenceTransformer,
    row: GraphFormat,
    options: ExportOptions,
    progress: Progress,
    *,
    source: Path | None = None,
) -> Exported:
    """One folder per side of a pair, which keeps the graphs it has; either both are written or neither."""
    made = []
    for place in (home / side for side in SIDES):
        if place.is_dir() and any(place.iterdir()) and not (place / FILE).is_file():
            raise BadInput(f"{place} was not made by trundle export; move it away, or use -o FOLDER")
    with _scratch(home) as scratch:
        for side in SIDES:
            model = one_route(pair, side)
            if (home / side / FILE).is_file():
                shutil.copytree(home / side, scratch / side)
            else:
                _write_standalone(model, scratch / side)
            made.append(_export_into(scratch / side, model, row, options, progress, source=source))
        for side in SIDES:
            swap_folders(scratch / side, home / side)
        queries, documents = (_moved(each, scratch, home) for each in made)
    return replace(queries, documents=documents)


@contextmanager
def _scratch(home: Path) -> Iterator[Path]:
    try:
        with scratch_folder(home, "export") as scratch:
            yield scratch
    except OSError as error:
        reason = error.strerror or error
        raise WriteFailed(f"{home} can't be written ({reason}); free some space, or use -o") from error


def _write_standalone(model: SentenceTransformer, folder: Path) -> None:
    model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for weights in folder.rglob("*.safetensors*"):
        weights.unlink()


def _put_in_place(home: Path, made: Path, description: Description, graph: Graph) -> Description:
    """Swap the folder of graphs; graphs exported before stay, unless the model has changed since.

    Returns the description of all graphs.
    """
    there = home / made.name
    try:
        older: Description | None = read_description(home)
    except BadModel:
        older = None
    wrong = {graph.path}
    if older is not None:
        same = replace(older, graphs=()) == description
        graphs = tuple(each for each in older.graphs if same and (home / each.path).is_file())
        wrong = {each.path for each in older.graphs} - {each.path for each in graphs}
        description = replace(description, graphs=graphs)
    if there.is_dir():
        for each in there.iterdir():
            if not (made / each.name).exists() and not _belongs(f"{made.name}/{each.name}", wrong):
                _carry_over(each, made / each.name)
    # A kill must not leave a graph under the description of another model. A new graph is named before it is
    # there, which readers ignore. One of a model that has changed since is named when it is in its place.
    complete = description.with_graph(graph)
    if not (home / graph.path).exists():
        write_atomic(home / FILE, complete.as_text())
    elif older is not None and graph.path in wrong:
        write_atomic(home / FILE, description.as_text())
    swap_folders(made, there)
    write_atomic(home / FILE, complete.as_text())
    return complete


def _belongs(name: str, graphs: set[str]) -> bool:
    """Whether a file is one of the graphs, or one that lies next to it: its weights."""
    return any(name in (graph, f"{graph}_data", str(Path(graph).with_suffix(".bin"))) for graph in graphs)


def _carry_over(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
        return
    try:
        os.link(source, target)
    except OSError:  # file systems without hard links
        shutil.copy2(source, target)


def _describe(model: SentenceTransformer) -> Description:
    has_prompts = any(model.prompts.values())
    if has_prompts and any(isinstance(module, Pooling) and not module.include_prompt for module in model):
        raise BadModel("graphs can't exclude prompts from pooling; set the model's include_prompt to true")
    static = static_table(model)
    width = model.get_embedding_dimension()
    longest = model.max_seq_length
    if static is not None:
        longest = (static.tokenizer.truncation or {}).get("max_length", _UNLIMITED)
    if width is None or longest is None:
        raise BadModel("the model does not declare its dimensions and its limit of tokens; set both")
    before, after = _chat_frame(model)
    if (before or after) and has_prompts:
        raise BadModel("graphs can't have both a chat template and prompts; remove the model's prompts")
    described = Description(
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
    settings = [described.prompts, described.default_prompt, before, after, longest, described.normalised]
    identity = cache_key(weights_digest(model), settings)
    return replace(described, identity=identity)


def _chat_frame(model: SentenceTransformer) -> tuple[str, str]:
    """What the model's chat template puts before and after a text; empty without a template."""
    features = model.preprocess([_MARK])
    if features.get("modality") != "message":
        return "", ""
    rendered = str(model.tokenizer.decode(features["input_ids"][0].tolist()))
    before, mark, after = rendered.partition(_MARK)
    if not mark:
        raise BadModel("the model's chat template changes the text itself; remove chat_template.jinja")
    return before, after


def _place_tokenizer(model: SentenceTransformer, folder: Path) -> str:
    """The name of a file in `folder` with the model's tokenizer; it is written if there is none."""
    own = model.tokenizer
    backend = own if isinstance(own, Tokenizer) else getattr(own, "backend_tokenizer", None)
    if backend is None:
        raise BadModel("the tokenizer is not of the tokenizers library; save it as tokenizer.json")
    content = _without_call_settings(json.loads(backend.to_str()))
    for name in (_TOKENIZER, _OWN_TOKENIZER):
        path = folder / name
        if path.is_file() and _without_call_settings(json.loads(path.read_text(encoding="utf-8"))) == content:
            return name
    name = _OWN_TOKENIZER if (folder / _TOKENIZER).is_file() else _TOKENIZER
    write_atomic(folder / name, json.dumps(content, ensure_ascii=False))
    return name


def _without_call_settings(tokenizer: dict[str, Any]) -> dict[str, Any]:
    return {key: None if key in _NOT_TOKENIZING else value for key, value in tokenizer.items()}
