"""Any model folder as a torch-free encoder: what was never exported is exported once, into the cache.

A folder that has graphs is opened without touching torch. A pair (queries by a student, documents by a teacher) is taken
apart once into two such folders.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trundle.export as making
import trundle.model as body
from trundle.artifact import cache_folder
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.runtime.describe import FILE
from trundle.runtime.encoder import Encoder

CACHED = "served"
ROUTES = ("query", "document")


def open_encoder(
    name: str,
    *,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Encoder:
    """The model, ready to encode without torch."""
    home = Path(name).expanduser()
    if not (home / FILE).is_file():
        if _is_pair(home):
            raise BadInput(f"{name} holds a student and its teacher; give the folder of one of them")
        home = _exported(name, trust_remote_code=trust_remote_code, progress=progress)
    return Encoder(home, graph=graph, threads=threads)


def open_pair(
    name: str,
    *,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> tuple[Encoder, Encoder] | None:
    """Both models of a folder that `trundle pair` wrote, the student first; None for any other folder."""
    home = Path(name).expanduser()
    if not _is_pair(home):
        return None
    places = [cache_folder() / CACHED / f"{_fingerprint(home)}-{route}" for route in ROUTES]
    if not all((place / FILE).is_file() for place in places):
        progress.say(f"{name} is taken apart and exported into {places[0].parent}, this once")
        _take_apart(name, places, trust_remote_code=trust_remote_code, progress=progress)
    student, teacher = (Encoder(place, graph=graph, threads=threads) for place in places)
    return student, teacher


def _exported(name: str, *, trust_remote_code: bool, progress: Progress) -> Path:
    """A folder in the cache with an ONNX graph of the model, made where it is not there yet."""
    home = Path(name).expanduser()
    key = _fingerprint(home) if home.is_dir() else blake2b(name.encode(), digest_size=12).hexdigest()
    place = cache_folder() / CACHED / key
    if not (place / FILE).is_file():
        if home.is_dir():
            progress.say(f"{name} has no graph yet: it is exported into {place}, this once")
        _export(name, place, trust_remote_code=trust_remote_code, progress=progress)
    return place


def _export(name: str, place: Path, *, trust_remote_code: bool, progress: Progress) -> None:
    making.export_model(
        name, to="onnx", output=place, trust_remote_code=trust_remote_code, force=True, progress=progress
    )


def _take_apart(name: str, places: list[Path], *, trust_remote_code: bool, progress: Progress) -> None:
    both = body.load(name, trust_remote_code=trust_remote_code, device="cpu")
    with TemporaryDirectory(prefix="trundle-pair-") as scratch:
        for route, place in zip(ROUTES, places, strict=True):
            part = Path(scratch) / route
            body.one_route(both, route).save_pretrained(str(part))
            _export(str(part), place, trust_remote_code=trust_remote_code, progress=progress)


def _is_pair(home: Path) -> bool:
    """Whether the folder's only module is a router between two models."""
    path = home / "modules.json"
    try:
        modules: list[Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return len(modules) == 1 and str(modules[0].get("type", "")).endswith(".Router")
    except (ValueError, AttributeError, UnicodeDecodeError):
        return False


def _fingerprint(home: Path) -> str:
    """Names, sizes and times of a model's files: another model in the same place is exported anew."""
    digest = blake2b(str(home.resolve()).encode(), digest_size=12)
    for file in sorted(home.rglob("*")):
        if file.is_file():
            facts = file.stat()
            digest.update(f"{file.relative_to(home)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
