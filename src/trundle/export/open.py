"""Load any model to encode with, by torch or as a torch-free encoder.

A folder with graphs is loaded without importing torch. A model without graphs is exported once, into the
cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trundle.cache import cache_entry, file_state, model_folder
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress
from trundle.runtime.description import is_exported, side_folders
from trundle.runtime.encoder import Encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_FASTEST = "fastest"
"""The name of the graph that the runtime prefers."""


def open_embedder(
    name: str, *, graph: str | None = None, trust_remote_code: bool = False, progress: Progress = SILENT
) -> tuple[Embedder, str]:
    """A model as evaluation sees it, and the name of what runs it.

    Torch runs it if the folder has torch weights and no `graph` is requested.
    """
    home = Path(name).expanduser()
    if graph is None and (not is_exported(home) or any(home.rglob("*.safetensors"))):
        from trundle.model.encode import embedder
        from trundle.model.load import load

        return embedder(load(name, trust_remote_code=trust_remote_code), name=name), "torch"
    wanted = None if graph == _FASTEST else graph
    encoder = open_encoder(name, graph=wanted, trust_remote_code=trust_remote_code, progress=progress)
    return encoder.embedder(name), f"{encoder.graph.engine} {encoder.graph.precision}"


def open_encoder(
    name: str,
    *,
    graph: str | None = None,
    threads: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress = SILENT,
) -> Encoder:
    """The model or pair as an encoder without torch."""
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
    """The same with each model of a pair as its own encoder, the student first."""
    home = _exported(name, trust_remote_code=trust_remote_code, progress=progress)
    places = dict.fromkeys(side_folders(home).values())
    return [Encoder(place, graph=graph, threads=threads) for place in places]


def _exported(name: str, *, trust_remote_code: bool, progress: Progress) -> Path:
    """The folder itself if it has graphs, otherwise one in the cache with an ONNX graph of the model."""
    home = Path(name).expanduser()
    if is_exported(home):
        return home
    if home.is_dir():
        place = cache_entry("graphs", file_state(name))
    else:
        # The newest revision: a graph of an older one must not be taken for it.
        home = model_folder(name, trust_remote_code=trust_remote_code)
        place = cache_entry("graphs", name, home.name)
    if not is_exported(place):
        from trundle.export.exporting import export_model

        progress.say(f"{name} has no graph yet: it is exported once, into {place}")
        export_model(
            name, to="onnx", output=place, trust_remote_code=trust_remote_code, force=True, progress=progress
        )
    return place


def as_sentence_transformer(folder: str | Path, *, graph: str | None = None) -> SentenceTransformer:
    """The graph in `folder` behind the interface of sentence-transformers, with the model's own prompts."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Module

    encoder = Encoder(folder, graph=graph)

    class GraphModule(Module):
        max_seq_length = encoder.max_tokens

        def preprocess(
            self, inputs: Sequence[str], prompt: str | None = None, **_options: Any
        ) -> dict[str, Any]:
            return {"texts": [(prompt or "") + text for text in inputs]}  # the runtime tokenises

        tokenize = preprocess

        def forward(self, features: dict[str, Any], **_options: Any) -> dict[str, Any]:
            vectors = encoder.encode(features["texts"], prompt="")
            return {**features, "sentence_embedding": torch.from_numpy(vectors)}

        def get_embedding_dimension(self) -> int:
            return encoder.dimensions

        def save(self, output_path: str, *_args: Any, **_options: Any) -> None:
            raise BadInput(f"a graph can't be saved to {output_path}; copy the folder it was loaded from")

    prompts, default = encoder.prompts, encoder.default_prompt
    modules: list[Any] = [GraphModule()]  # type: ignore[no-untyped-call]
    return SentenceTransformer(modules=modules, device="cpu", prompts=prompts, default_prompt_name=default)
