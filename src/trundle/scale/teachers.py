"""The teacher as a worker opens it: with torch on a GPU or CPU, or as an exported graph without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

from pydantic import BaseModel, ConfigDict

import trundle.model as body
from trundle.data.digest import DIGEST_BYTES, content_digest
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.runtime.describe import read_description
from trundle.runtime.encoder import Encoder


class Asked(BaseModel):
    """Which model to open, and how; small enough to send to every worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str
    runtime: bool = False
    """Run the exported graph, without torch."""
    threads: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A teacher that can be told apart from others."""

    embedder: Embedder
    identity: str
    prompts: Mapping[str, str]
    default_prompt: str | None


def everywhere(model: str) -> str:
    """A folder by its whole path, so that a worker elsewhere finds the same; a hub name as it is."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def open_teacher(asked: Asked, *, progress: Progress = SILENT) -> Opened:
    """Load the model; its identity is computed from what was loaded, not from its name."""
    if asked.model.startswith(("http://", "https://")):
        raise BadInput(
            "an endpoint is asked by align itself; give a model folder or hub name to build a store"
        )
    if asked.runtime:
        encoder = Encoder(asked.model, threads=asked.threads)
        return Opened(
            embedder=encoder.embedder(asked.model),
            identity=_graph_id(encoder),
            prompts={name: prompt for name, prompt in encoder.prompts.items() if prompt},
            default_prompt=encoder.default_prompt,
        )
    model = body.load(asked.model, trust_remote_code=asked.trust_remote_code)
    return Opened(
        embedder=body.labelling_embedder(model, name=asked.model, progress=progress),
        identity=body.model_digest(model),
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
