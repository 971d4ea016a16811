"""Open any teacher: a model, an exported graph, an endpoint, a table, a store of targets, or an index."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from trundle.cache import cache_entry
from trundle.embedder import Embedder, Similarity, Vectors
from trundle.errors import BadInput
from trundle.index.readers import open_reader
from trundle.progress import SILENT, Progress, is_first
from trundle.records import THE_ORIGINAL
from trundle.runtime.description import read_description
from trundle.runtime.encoder import Encoder
from trundle.teacher import MANIFEST, teacher_kind
from trundle.teacher.shards import _DIGEST_BYTES, _UNIT_TOLERANCE, Dtype, Manifest, _content_digest
from trundle.teacher.stored import ROWS, IndexRows, _TableTeacher, _teacher_from_parquet
from trundle.teacher.targets import Targets, _finished_manifest, open_targets, wait_for_targets

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_PROBE = "What does the teacher's vector of a text look like?"


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A source of vectors with an identity."""

    name: str
    identity: Callable[[], str]
    """Computes what distinguishes it from other teachers: a checksum, or the address of an endpoint."""
    width: int
    normalises: bool
    prompts: Mapping[str, str | None] = field(default_factory=dict)
    """The prompts that a student needs to be called the same way."""
    default_prompt_name: str | None = None
    model: SentenceTransformer | None = None
    """None for a teacher that is not a loaded model: a graph, an endpoint, a table, a store, an index."""
    embedder: Embedder | None = None
    """None for a table, store or index, which has vectors of its own texts only."""
    rows: _TableTeacher | IndexRows | None = None
    """The texts and vectors of a table or an index, which are copied into a store."""
    store: Path | None = None
    """A folder that `trundle targets build` wrote."""
    similarity: Similarity | None = None
    """How the index compares its vectors; None if there is no index."""

    @property
    def brings_texts(self) -> bool:
        """Whether it has vectors of its own texts only."""
        return self.rows is not None or self.store is not None

    def stored(self, *, cache: Path | None = None, progress: Progress = SILENT) -> Targets:
        """Return its own texts with their vectors; those of a table or an index are read into the cache."""
        if self.store is not None:
            return open_targets(self.store)
        assert self.rows is not None
        folder = cache_entry("targets", "table", self.identity(), dict(self.prompts), root=cache)
        return self.rows.targets(folder, progress=progress) if is_first() else wait_for_targets(folder)

    @property
    def used_prompts(self) -> dict[str, str]:
        """The prompts that are not empty, as a store records them."""
        return {name: prompt for name, prompt in self.prompts.items() if prompt}

    def manifest(self, dtype: Dtype, shard_size: int) -> Manifest:
        """Return the manifest of a new store of its vectors."""
        return Manifest(
            teacher=self.identity(),
            prompts=self.used_prompts,
            dtype=dtype,
            shard_size=shard_size,
            default_prompt=self.default_prompt_name,
        )


class _TeacherContext(Protocol):
    """What `find_teacher` needs of the context that a method runs in."""

    @property
    def original(self) -> SentenceTransformer: ...
    @property
    def trust_remote_code(self) -> bool: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def models(self) -> Mapping[str, SentenceTransformer]: ...
    @property
    def opened(self) -> dict[str, Any]: ...


def find_teacher(
    student: SentenceTransformer, name: str | None, endpoint_model: str | None, context: _TeacherContext
) -> Teacher:
    """Return the named teacher, opened once per context, or the original model if `name` is None."""
    if name is None:
        if context.original is student:
            raise BadInput("a student needs another model as its teacher; name it with --teacher")
        return original_teacher(context)
    if name in context.models:
        return _model_teacher(context.models[name], name, progress=context.progress)
    key = opened_key(name, endpoint_model)
    if key not in context.opened:
        trust, progress = context.trust_remote_code, context.progress
        context.opened[key] = open_teacher(name, endpoint_model, trust_remote_code=trust, progress=progress)
    found: Teacher = context.opened[key]
    return found


def opened_key(name: str, endpoint_model: str | None = None) -> str:
    """Return the key of an opened teacher among the objects that the runs of a search share."""
    return f"teacher {name} {endpoint_model}"


def original_teacher(context: _TeacherContext) -> Teacher:
    """Return the original model as a teacher."""
    return _model_teacher(context.original, THE_ORIGINAL, progress=context.progress)


def open_teacher(
    name: str,
    endpoint_model: str | None = None,
    *,
    calls: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Teacher:
    """Open the teacher that a folder, hub name, URL, parquet file or address of a database stands for.

    `endpoint_model` names the model of an endpoint, which gets at most `calls` texts; `trust_remote_code`
    applies to models.
    """
    match teacher_kind(name):
        case "endpoint":
            return _endpoint_teacher(name, endpoint_model, calls)
        case "table":
            table = _teacher_from_parquet(name)
            vector = next((vector for _, vector in table.items()), None)
            if vector is None:
                raise BadInput(f"{name} has no rows; pass a table that holds vectors")
            width, unit = len(vector), _is_unit(vector)
            return Teacher(
                name=name, identity=lambda: table.teacher_id, width=width, normalises=unit, rows=table
            )
        case "index":
            return open_index(name, progress=progress)
        case "store":
            folder = Path(name)
            manifest = _finished_manifest(folder)
            return Teacher(
                name=str(folder),
                identity=lambda: f"store {_content_digest(folder / MANIFEST)}",
                width=manifest.width,
                normalises=manifest.normalised,
                prompts=manifest.prompts or {},
                default_prompt_name=manifest.default_prompt,
                store=folder,
            )
        case _:
            from trundle.model.load import load

            return _model_teacher(load(name, trust_remote_code=trust_remote_code), name, progress=progress)


def _model_teacher(model: SentenceTransformer, name: str, *, progress: Progress = SILENT) -> Teacher:
    # torch is imported on first use: workers of a cluster that run a graph start without it.
    from trundle.model.encode import labelling_embedder
    from trundle.model.heads import normalises
    from trundle.model.save import model_digest

    return Teacher(
        name=name,
        identity=cache(lambda: model_digest(model)),
        width=model.get_embedding_dimension() or 0,
        normalises=normalises(model),
        prompts=model.prompts,
        default_prompt_name=model.default_prompt_name,
        model=model,
        embedder=labelling_embedder(model, name=name, progress=progress),
    )


def graph_teacher(name: str, *, threads: int | None = None) -> Teacher:
    """Open the exported graph of a model folder as a teacher; it runs on the CPU."""
    encoder = Encoder(name, threads=threads)
    embedder = encoder.embedder(name)
    return Teacher(
        name=name,
        identity=cache(lambda: _graph_id(encoder)),
        width=encoder.dimensions,
        normalises=_is_unit(embedder.text([_PROBE])[0]),
        prompts=encoder.prompts,
        default_prompt_name=encoder.default_prompt,
        embedder=embedder,
    )


def _graph_id(encoder: Encoder) -> str:
    """Hash the graph's files, its tokenizer and its description, without the recorded measurements."""
    description = asdict(read_description(encoder.folder))
    del description["graphs"]
    digest = blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=_DIGEST_BYTES)
    graph = encoder.folder / encoder.graph.path
    files = sorted(graph.parent.glob(f"{graph.stem}.*"))
    for file in (*files, encoder.folder / description["tokenizer"]):
        digest.update(f"{file.name} {_content_digest(file)}\n".encode())
    return f"graph {digest.hexdigest()}"


def open_index(
    where: str,
    *,
    named: Mapping[str, str | None] | None = None,
    rows: int = ROWS,
    seed: int = 0,
    seconds: float = math.inf,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> Teacher:
    """Open up to `rows` rows of an index as a teacher; nothing of it is read yet.

    `named` holds the table and the columns (`table`, `texts`, `vectors`), if there are several.
    """
    reader = open_reader(where, **dict(named or {}), progress=progress)
    sampled = IndexRows(reader=reader, most=rows, seed=seed, seconds=seconds, fresh=fresh)
    return Teacher(
        name=reader.where,
        identity=lambda: f"{sampled.teacher_id} {rows} {seed}",
        width=reader.width,
        normalises=not sampled.keeps_length,
        rows=sampled,
        similarity=reader.metric,
    )


def _endpoint_teacher(url: str, model: str | None, most: int | None = None) -> Teacher:
    # The HTTP client is imported on first use: only endpoints need it.
    from trundle.teacher.endpoint import open_endpoint

    embedder, identity = open_endpoint(url, model, most=most)
    probe = embedder.text([_PROBE])[0]
    return Teacher(
        name=str(model),
        identity=lambda: identity,
        width=len(probe),
        normalises=_is_unit(probe),
        embedder=embedder,
    )


def _is_unit(vector: Vectors) -> bool:
    return bool(abs(np.linalg.norm(vector) - 1) < _UNIT_TOLERANCE)
