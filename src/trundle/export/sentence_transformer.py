"""An exported graph inside sentence-transformers, without optimum, which does not install beside its version 6.

What this is not: trainable. It lets code that was written for a SentenceTransformer run on the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Module

from trundle.errors import BadInput
from trundle.runtime.encoder import Encoder


class GraphModule(Module):
    """A whole exported model as the one module of a SentenceTransformer."""

    def __init__(self, folder: str | Path, graph: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.encoder = Encoder(folder, graph=graph)
        self.max_seq_length = self.encoder.max_tokens

    def preprocess(self, inputs: Sequence[str], prompt: str | None = None, **_options: Any) -> dict[str, Any]:
        """Texts are read by the runtime; nothing is to be done before."""
        return {"texts": [(prompt or "") + text for text in inputs]}

    tokenize = preprocess

    def forward(self, features: dict[str, Any], **_options: Any) -> dict[str, Any]:
        """The vectors of a batch."""
        vectors = self.encoder.encode(features["texts"], prompt="")
        return {**features, "sentence_embedding": torch.from_numpy(vectors)}

    def get_embedding_dimension(self) -> int:
        """Numbers in a vector."""
        return self.encoder.dimensions

    def save(self, output_path: str, *_args: Any, **_options: Any) -> None:
        """There is nothing to save: the folder it was opened from is the saved form."""
        raise BadInput(f"a graph can't be saved to {output_path} again; copy the folder it was opened from")


def as_sentence_transformer(folder: str | Path, *, graph: str | None = None) -> SentenceTransformer:
    """The graph in `folder` behind the interface of sentence-transformers, with the model's own prompts."""
    module = GraphModule(folder, graph)
    prompts, default = module.encoder.prompts, module.encoder.default_prompt
    return SentenceTransformer(modules=[module], device="cpu", prompts=prompts, default_prompt_name=default)
