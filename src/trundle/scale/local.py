"""A store of teacher vectors by this process alone: the pattern the cluster must meet to the byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from trundle.data.corpus import ENVIRONMENT, as_texts
from trundle.data.environment import environment_pairs
from trundle.data.texts import Text, read_texts
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.model.encode import labelling_embedder
from trundle.model.load import load
from trundle.model.save import model_digest
from trundle.progress import SILENT, Progress
from trundle.runtime.description import read_description
from trundle.runtime.encoder import Encoder
from trundle.scale.pieces import _is_remote, _list_pieces, _read_pieces_in_order
from trundle.teacher.labelling import SHARD_SIZE, build_targets
from trundle.teacher.shards import DIGEST_BYTES, Dtype, content_digest
from trundle.teacher.targets import Targets


class Asked(BaseModel):
    """Which model to open, and how; small enough to send to every worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    runtime: bool = False
    """Run the exported graph, without torch."""
    threads: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """A teacher that can be told apart from others."""

    embedder: Embedder
    identity: str
    prompts: Mapping[str, str]
    default_prompt: str | None


def everywhere(model: str) -> str:
    """A folder by its whole path, so that a worker elsewhere finds the same; a hub name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _open_teacher(asked: Asked, *, progress: Progress = SILENT) -> _Opened:
    """Load the model; its identity is computed from what was loaded, not from its name."""
    if asked.model.startswith(("http://", "https://")):
        raise BadInput(
            "an endpoint is asked by align itself; give a model folder or hub name to build a store"
        )
    if asked.runtime:
        encoder = Encoder(asked.model, threads=asked.threads)
        return _Opened(
            embedder=encoder.embedder(asked.model),
            identity=_graph_id(encoder),
            prompts={name: prompt for name, prompt in encoder.prompts.items() if prompt},
            default_prompt=encoder.default_prompt,
        )
    model = load(asked.model, trust_remote_code=asked.trust_remote_code)
    return _Opened(
        embedder=labelling_embedder(model, name=asked.model, progress=progress),
        identity=model_digest(model),
        prompts={name: prompt for name, prompt in model.prompts.items() if prompt},
        default_prompt=model.default_prompt_name,
    )


def _graph_id(encoder: Encoder) -> str:
    """Who a graph is: its files, its tokenizer, and what is done around it; how it was measured is left out."""
    description = asdict(read_description(encoder.folder))
    del description["graphs"]
    whole = blake2b(json.dumps(description, sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    graph = encoder.folder / encoder.graph.path
    parts = sorted(graph.parent.glob(f"{graph.stem}.*"))
    for part in (*parts, encoder.folder / description["tokenizer"]):
        whole.update(f"{part.name} {content_digest(part)}\n".encode())
    return f"graph {whole.hexdigest()}"


_MOST = 10
_BEGUN, _ENDED = ".begun", ".ended"


@contextmanager
def _counted(folder: Path, what: str, *, at_once: int = 1) -> Iterator[None]:
    """Do the block, unless too many have died in it; `at_once` workers may be in it at the same time."""
    begun, ended = (folder / f".{what}{ending}" for ending in (_BEGUN, _ENDED))
    dead = _add(begun) - _size(ended) - at_once
    if dead >= _MOST:
        raise BadInput(
            f"{dead} workers have died at this one after the other; look whether their nodes have memory enough, "
            "then run again"
        )
    yield
    _add(ended)


def _forget(folder: Path) -> None:
    """A new build counts anew."""
    for ending in (_BEGUN, _ENDED):
        for path in folder.glob(f".*{ending}"):
            path.unlink(missing_ok=True)


def _add(path: Path) -> int:
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def build_alone(
    sources: Sequence[str],
    asked: Asked,
    folder: str | Path,
    *,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text; what is there already is not computed again."""
    texts = _texts(sources, progress)
    teacher = _open_teacher(asked)
    targets = build_targets(
        texts,
        teacher.embedder,
        teacher_id=teacher.identity,
        folder=folder,
        dtype=dtype,
        shard_size=shard_size,
        prompts=teacher.prompts,
        default_prompt=teacher.default_prompt,
        progress=progress,
    )
    _forget(targets.folder)
    return targets


def _texts(sources: Sequence[str], progress: Progress) -> Iterator[Text]:
    """Source after source, each looked at before the model is loaded."""
    streams = [_stream(source, progress) for source in sources]
    return (text for stream in streams for text in stream)


def _stream(source: str, progress: Progress) -> Iterator[Text]:
    if source == ENVIRONMENT:
        return as_texts(environment_pairs(progress=progress))
    if _is_remote(source):
        return _read_pieces_in_order(_list_pieces([source]))
    return read_texts(source)
