"""The models that a server answers with: a student alone, or with its teacher for documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trundle.errors import BadInput
from trundle.evaluate.retrieval import SENTENCES, find_themselves
from trundle.export.open import open_encoder, open_sides
from trundle.progress import SILENT, Progress
from trundle.runtime.encoder import Encoder


@dataclass(frozen=True, kw_only=True)
class _Model:
    """An encoder and the name that clients use for it."""

    name: str
    encoder: Encoder

    def card(self) -> dict[str, Any]:
        graph = self.encoder.graph
        weights = self.encoder.folder / graph.path
        patterns = (weights.name, f"{weights.stem}.bin", f"{weights.name}*data")
        files = {file for pattern in patterns for file in weights.parent.glob(pattern)}
        return {
            "name": self.name,
            "parameters": self.encoder.parameters,
            "bytes": sum(file.stat().st_size for file in files),
            "dimensions": self.encoder.dimensions,
            "max_tokens": self.encoder.max_tokens,
            "runs": f"{graph.engine} {graph.precision}",
        }


@dataclass(frozen=True, kw_only=True)
class _Served:
    """The models of one server."""

    student: _Model
    teacher: _Model | None = None

    @property
    def models(self) -> tuple[_Model, ...]:
        return (self.student,) if self.teacher is None else (self.student, self.teacher)

    def answering(self, name: str | None, role: Literal["query", "document"] | None) -> _Model | None:
        """Returns the model that answers a request for `name` in a role, or None for an unknown name."""
        # The student's name stands for both, so that clients need one name only.
        if name in (None, self.student.name):
            return self.teacher if self.teacher is not None and role == "document" else self.student
        return self.teacher if self.teacher is not None and name == self.teacher.name else None


def open_served(
    model: str,
    *,
    teacher: str | None = None,
    name: str | None = None,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> _Served:
    """Opens a model, a model and its teacher, or a folder with a pair."""
    small, *others = open_sides(
        model, graph=graph, threads=threads, trust_remote_code=trust_remote_code, progress=progress
    )
    student = _Model(name=name or _name(model), encoder=small)
    if others:
        if teacher is not None:
            raise BadInput(f"{model} brings its own teacher; leave --teacher out")
        [large] = others
        large_name = f"{student.name}-teacher"
    elif teacher is None:
        return _Served(student=student)
    else:
        large = open_encoder(teacher, threads=threads, trust_remote_code=trust_remote_code, progress=progress)
        large_name = _name(teacher)
    if small.dimensions != large.dimensions:
        sizes = f"{student.name} has {small.dimensions} dimensions and {large_name} has {large.dimensions}"
        raise BadInput(f"{sizes}; align the student with trundle align")
    if not find_themselves(small.encode_query(SENTENCES), large.encode_document(SENTENCES)):
        problem = f"{student.name} does not retrieve {large_name}'s vectors of the same sentences"
        progress.say(f"{problem}, so searches will fail; align it first with trundle align")
    if large_name == student.name:
        large_name += "-teacher"
    return _Served(student=student, teacher=_Model(name=large_name, encoder=large))


def _name(model: str) -> str:
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model
