"""A SentenceTransformer seen as texts → array, with bad texts named instead of a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel
from trundle.progress import SILENT, Progress

CHUNK = 4096
"""Texts per call of the library's encode: it sorts by length inside a call, and progress is told between calls."""


def embedder(
    model: SentenceTransformer,
    *,
    name: str = "model",
    batch_size: int = 32,
    half_on_gpu: bool = False,
    progress: Progress = SILENT,
) -> Embedder:
    """The model's three roles, each with the model's own prompt for it.

    `half_on_gpu` computes in half precision where there is a GPU: for vectors that are stored so anyway.
    """
    half = half_on_gpu and model.device.type == "cuda" and model.dtype == torch.float32

    def role(encode: Callable[..., Vectors]) -> Encode:
        def run(texts: Sequence[str]) -> Vectors:
            check_texts(texts)
            with progress.task(f"{name}: encoding", len(texts)) as advance:
                parts = []
                for start in range(0, len(texts), CHUNK):
                    chunk = list(texts[start : start + CHUNK])
                    with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                        parts.append(_encode(encode, chunk, batch_size))
                    advance(len(chunk))
            if not parts:
                return np.zeros((0, model.get_embedding_dimension() or 0), dtype=np.float32)
            return _check_vectors(np.concatenate(parts), texts, name)

        return run

    return Embedder(
        name=name,
        text=role(model.encode),
        query=role(model.encode_query),
        document=role(model.encode_document),
    )


def _encode(encode: Callable[..., Vectors], texts: list[str], batch_size: int) -> Vectors:
    vectors = encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)
    return np.asarray(vectors, dtype=np.float32)


def check_texts(texts: Sequence[str]) -> None:
    """Refuse what no tokenizer can read."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise BadInput(f"text {number} is a {type(text).__name__}, not a string; convert it first")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadInput(
                    f"text {number} holds half of a character pair (a lone surrogate); clean it with "
                    "text.encode('utf-8', 'replace').decode()"
                ) from error


def _check_vectors(vectors: Vectors, texts: Sequence[str], name: str) -> Vectors:
    good = np.isfinite(vectors).all(axis=1)
    if not good.all():
        number = int(np.argmin(good))
        raise BadModel(
            f"{name} gives a vector with NaN or infinity for text {number + 1} ({texts[number][:60]!r}); check its weights"
        )
    empty = ~vectors.any(axis=1)
    if empty.any():
        number = int(np.argmax(empty))
        raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; leave it out")
    return vectors
