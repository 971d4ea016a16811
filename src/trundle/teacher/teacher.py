"""Whoever a student learns from: the original model, another folder or hub name, an endpoint, a table or a store of vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from trundle.errors import BadInput
from trundle.methods.contract import Context
from trundle.model.encode import labelling_embedder
from trundle.model.heads import normalises
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.records import THE_ORIGINAL
from trundle.teacher.endpoint import _endpoint_id, endpoint_teacher
from trundle.teacher.table import _teacher_from_parquet
from trundle.teacher.targets import _finished_manifest, _is_store, _store_id

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.embedder import Embedder, Vectors
    from trundle.teacher.table import _TableTeacher

_PROBE = "What does the teacher's vector of a text look like?"
_UNIT = 5e-3
"""How far from 1 a length may be for a vector to count as normalised: half precision rounds."""


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A source of vectors that can be told apart from others."""

    name: str
    identity: Callable[[], str]
    width: int
    normalises: bool
    prompts: Mapping[str, str | None]
    """The prompts a student must carry to be asked the same way."""
    default_prompt_name: str | None = None
    model: SentenceTransformer | None = None
    """None for what is not a model here: an endpoint, a table, a store."""
    embedder: Embedder | None = None
    """None for a table or store, which knows the vectors of its own texts only."""
    table: _TableTeacher | None = None
    store: Path | None = None
    """A folder that `trundle targets build` wrote."""

    @property
    def brings_texts(self) -> bool:
        """Whether it knows the vectors of its own texts and of no others."""
        return self.table is not None or self.store is not None


def find_teacher(
    model: SentenceTransformer, name: str | None, endpoint_model: str | None, context: Context
) -> Teacher:
    """The teacher a name stands for; without a name, the model that came in the door."""
    if name is not None:
        key = f"teacher {name} {endpoint_model}"
        if key not in context.opened:
            context.opened[key] = _open(name, endpoint_model, context)
        found: Teacher = context.opened[key]
        return found
    if context.original is model:
        raise BadInput("a student needs a teacher other than itself; name the large model with --teacher")
    return original_teacher(context)


def original_teacher(context: Context) -> Teacher:
    """The model that came in the door, as a teacher; also of itself."""
    return _from_model(context.original, THE_ORIGINAL, context)


def _open(name: str, endpoint_model: str | None, context: Context) -> Teacher:
    if name.startswith(("http://", "https://")):
        if endpoint_model is None:
            raise BadInput(
                "an endpoint serves several models; name the one to learn from with --teacher-model"
            )
        return _from_endpoint(name, endpoint_model)
    if Path(name).suffix == ".parquet":
        return _from_table(name)
    if _is_store(name):
        return _from_store(Path(name))
    model = context.models.get(name) or load(name, trust_remote_code=context.trust_remote_code)
    return _from_model(model, name, context)


def _from_model(model: SentenceTransformer, name: str, context: Context) -> Teacher:
    return Teacher(
        name=name,
        identity=cache(lambda: model_digest(model)),
        width=model.get_embedding_dimension() or 0,
        normalises=normalises(model),
        prompts=model.prompts,
        default_prompt_name=model.default_prompt_name,
        model=model,
        embedder=labelling_embedder(model, name=name, progress=context.progress),
    )


def _from_endpoint(url: str, endpoint_model: str) -> Teacher:
    embedder = endpoint_teacher(url, endpoint_model)
    probe = embedder.text([_PROBE])[0]
    return Teacher(
        name=endpoint_model,
        identity=lambda: _endpoint_id(url, endpoint_model),
        width=len(probe),
        normalises=_is_unit(probe),
        prompts={},
        embedder=embedder,
    )


def _from_table(path: str) -> Teacher:
    table = _teacher_from_parquet(path)
    _, probe = next(table.items(), (None, None))
    if probe is None:
        raise BadInput(f"{path} has no rows; give a table that holds vectors")
    return Teacher(
        name=path,
        identity=lambda: table.teacher_id,
        width=len(probe),
        normalises=_is_unit(probe),
        prompts={},
        table=table,
    )


def _from_store(folder: Path) -> Teacher:
    manifest = _finished_manifest(folder)
    return Teacher(
        name=str(folder),
        identity=lambda: _store_id(folder),
        width=manifest.width,
        normalises=manifest.normalised,
        prompts=manifest.prompts or {},
        default_prompt_name=manifest.default_prompt,
        store=folder,
    )


def _is_unit(vector: Vectors) -> bool:
    length = float((vector**2).sum()) ** 0.5
    return bool(abs(length - 1) < _UNIT)
