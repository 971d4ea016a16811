"""Any model folder, ready to be asked: by torch, or as a torch-free encoder.

A folder that has graphs is opened without touching torch. What was never exported is exported once, into the cache.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import trundle.export as making
import trundle.model as body
from trundle.artifact import cache_folder
from trundle.embedder import Embedder
from trundle.progress import SILENT, Progress
from trundle.runtime.describe import is_exported, side_folders
from trundle.runtime.encoder import Encoder

CACHED = "served"
FASTEST = "fastest"
"""The graph the runtime chooses by itself."""


def open_embedder(
    name: str, *, graph: str | None = None, trust_remote_code: bool = False, progress: Progress = SILENT
) -> tuple[Embedder, str]:
    """A model as evaluation sees it, and what runs it.

    That is torch where there are torch weights, unless a graph is asked for; a folder that has graphs alone is run
    by the one the runtime chooses.
    """
    home = Path(name).expanduser()
    if graph is None and not (is_exported(home) and not has_torch_weights(home)):
        return body.embedder(body.load(name, trust_remote_code=trust_remote_code), name=name), "torch"
    wanted = None if graph == FASTEST else graph
    encoder = open_encoder(name, graph=wanted, trust_remote_code=trust_remote_code, progress=progress)
    return encoder.embedder(name), f"{encoder.graph.engine} {encoder.graph.precision}"


def has_torch_weights(folder: Path) -> bool:
    """Whether torch could run what is in `folder`."""
    return any(folder.rglob("*.safetensors"))


def open_encoder(
    name: str,
    *,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Encoder:
    """The model or the pair, ready to encode without torch."""
    home = _exported(name, trust_remote_code=trust_remote_code, progress=progress)
    return Encoder(home, graph=graph, threads=threads)


def open_sides(
    name: str,
    *,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> list[Encoder]:
    """The same with each model of a pair as an encoder of its own, the student first."""
    home = _exported(name, trust_remote_code=trust_remote_code, progress=progress)
    places = dict.fromkeys(side_folders(home).values())
    return [Encoder(place, graph=graph, threads=threads) for place in places]


def _exported(name: str, *, trust_remote_code: bool, progress: Progress) -> Path:
    """The folder itself if it has graphs, or else one in the cache with an ONNX graph of the model."""
    home = Path(name).expanduser()
    if is_exported(home):
        return home
    key = _fingerprint(home) if home.is_dir() else blake2b(name.encode(), digest_size=12).hexdigest()
    place = cache_folder() / CACHED / key
    if not is_exported(place):
        if home.is_dir():
            progress.say(f"{name} has no graph yet: it is exported into {place}, this once")
        making.export_model(
            name, to="onnx", output=place, trust_remote_code=trust_remote_code, force=True, progress=progress
        )
    return place


def _fingerprint(home: Path) -> str:
    """Names, sizes and times of a model's files: another model in the same place is exported anew."""
    digest = blake2b(str(home.resolve()).encode(), digest_size=12)
    for file in sorted(home.rglob("*")):
        if file.is_file():
            facts = file.stat()
            digest.update(f"{file.relative_to(home)} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()
