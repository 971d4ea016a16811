"""The settings of a server, and the models it answers with; the default limits suit a small machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trundle.errors import BadInput, MissingExtra
from trundle.evaluate.retrieval import SENTENCES, find_themselves
from trundle.export.open import open_encoder, open_sides
from trundle.progress import SILENT, Progress
from trundle.runtime.encoder import Encoder

try:
    import fastapi as fastapi
    import prometheus_client as prometheus_client
    import uvicorn as uvicorn
except ImportError as error:
    raise MissingExtra("serve", "serve") from error

KEYS_VARIABLE = "TRUNDLE_API_KEYS"
_SHORTEST_KEY = 8
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and permissions of one server."""

    keys: tuple[str, ...] = ()
    """Valid API keys; if empty, no key is needed."""
    cors: tuple[str, ...] = ()
    """Web origins that may send requests."""
    hosts: tuple[str, ...] = ()
    """Names with a dot under which clients without a key may call the server."""
    page: bool = True
    """Whether to serve the page at /."""
    most_texts: int = 2048
    """Texts in one request."""
    most_tokens: int = 300_000
    """Tokens in one request, after each text was truncated to the model's length."""
    most_bytes: int = 8 << 20
    """Bytes of one request's body."""
    most_characters: int = 200_000
    """Characters of one text, which are tokenised even if the model reads only the first."""
    most_connections: int = 800
    """Open connections; beyond that, the one that has waited longest for a request is closed."""
    waiting: int = 4096
    """Texts in the queue; further requests are answered with 429."""
    waiting_bytes: int = 64 << 20
    """Bytes of all large bodies and answers in memory; further large requests are answered with 429."""
    timeout: float = 30.0
    """Seconds until a request is answered with 504."""
    body_timeout: float = 10.0
    """Seconds that a client may take to send its headers or its body, or to read a part of its answer."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name != "page" and value <= 0:
                raise BadInput(f"{name.replace('_', ' ')} must be above 0; leave it out for the default")
        if self.waiting < self.most_texts:
            sizes = f"a request may have {self.most_texts} texts, but the queue holds {self.waiting}"
            raise BadInput(f"{sizes}; let more texts wait, or allow fewer in a request")
        if self.waiting_bytes < self.most_bytes:
            sizes = f"a request may have {self.most_bytes:,} bytes, but {self.waiting_bytes:,} may wait"
            raise BadInput(f"{sizes}; let more bytes wait, or allow fewer in a request")
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise BadInput(f"{origin!r} is not a web origin; pass one such as https://example.org")
        for key in self.keys:
            if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise BadInput(f"an API key needs {_SHORTEST_KEY} or more ASCII characters without spaces")


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Returns the keys in a file, one per line, and in an environment variable, comma-separated."""
    keys: list[str] = []
    if file is not None:
        try:
            keys = _listed_keys(file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file} can't be read; pass a text file with one API key per line") from error
        if not keys:
            raise BadInput(f"{file} has no API key; write one per line")
    if variable is not None:
        more = _listed_keys(variable.split(","))
        if not more:
            raise BadInput(f"${KEYS_VARIABLE} is set but has no API key; unset it to serve without keys")
        keys += more
    return tuple(dict.fromkeys(keys))


def _listed_keys(entries: Iterable[str]) -> list[str]:
    return [key for key in map(str.strip, entries) if key and not key.startswith("#")]


@dataclass(frozen=True, kw_only=True)
class _Model:
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
