"""Who answers: a student alone, or a student for queries and its teacher for documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trundle.errors import BadInput
from trundle.evaluate.retrieval import SENTENCES, find_themselves
from trundle.export.open import open_encoder, open_sides
from trundle.progress import SILENT, Progress
from trundle.runtime.encoder import Encoder

_Role = Literal["query", "document"]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """One encoder under the name clients call it by."""

    name: str
    encoder: Encoder

    def card(self) -> dict[str, Any]:
        """What a person compares models by."""
        graph = self.encoder.graph
        weights = self.encoder.folder / graph.path
        files = [
            weights,
            *weights.parent.glob(f"{weights.stem}.bin"),
            *weights.parent.glob(f"{weights.name}*data"),
        ]
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
    """What one server answers with."""

    student: _Model
    teacher: _Model | None = None

    @property
    def models(self) -> tuple[_Model, ...]:
        """All there are, the student first."""
        return (self.student,) if self.teacher is None else (self.student, self.teacher)

    def answering(self, name: str | None, role: _Role | None) -> _Model | None:
        """Who answers a request for `name` in a role; None for a name nobody has.

        Under the student's name documents are the teacher's, so that one name is enough for an index; the
        teacher's own name always means the teacher.
        """
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
    """Open what is to be served: a model, a model and its teacher, or a folder that holds a pair."""
    student, *others = open_sides(
        model, graph=graph, threads=threads, trust_remote_code=trust_remote_code, progress=progress
    )
    if others and teacher is not None:
        raise BadInput(f"{model} brings its own teacher; leave --teacher out")
    if not others:
        if teacher is None:
            return _Served(student=_Model(name=name or _name(model), encoder=student))
        master = open_encoder(
            teacher, threads=threads, trust_remote_code=trust_remote_code, progress=progress
        )
        names = name or _name(model), _name(teacher)
    else:
        [master] = others
        names = name or _name(model), f"{name or _name(model)}-teacher"
    _check_space(student, master, names, progress)
    if names[0] == names[1]:
        names = names[0], f"{names[1]}-teacher"
    return _Served(
        student=_Model(name=names[0], encoder=student), teacher=_Model(name=names[1], encoder=master)
    )


def _check_space(student: Encoder, teacher: Encoder, names: tuple[str, str], progress: Progress) -> None:
    if student.dimensions != teacher.dimensions:
        raise BadInput(
            f"{names[0]} gives vectors of {student.dimensions} numbers and {names[1]} of {teacher.dimensions}; "
            "bring the student into the teacher's space with trundle align"
        )
    if not find_themselves(student.encode_query(SENTENCES), teacher.encode_document(SENTENCES)):
        progress.say(
            f"{names[0]} does not find {names[1]}'s vectors of the same sentences: bring it into that space "
            "with trundle align first, or searches will find nothing"
        )


def _name(model: str) -> str:
    return Path(model).expanduser().resolve().name if Path(model).expanduser().is_dir() else model
