"""An exported graph run by trundle's own runtime, without torch."""

from __future__ import annotations

from pathlib import Path

from trundle.bench.engines import Opened
from trundle.runtime.encoder import Encoder


def open_model(model: str, *, threads: int, batch_size: int, graph: str) -> Opened:  # noqa: ARG001
    """Open one graph of an exported folder; the runtime cuts its batches by itself."""
    encoder = Encoder(model, graph=graph, threads=threads)
    return Opened(
        embedder=encoder.embedder(model),
        parameters=encoder.parameters,
        max_tokens=encoder.max_tokens,
        device="cpu",
        folder=Path(model).expanduser(),
    )
