"""A SentenceTransformer seen as texts → array, with bad texts named instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Router
from sentence_transformers.util import batch_to_device
from torch import Tensor

from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel
from trundle.model.device import free_gpu_memory, too_large
from trundle.model.prompts import Role, pools_prompts, prompts_by_role
from trundle.model.tokenise import Features, make_tokeniser
from trundle.progress import SILENT, Progress
from trundle.readable import check_texts

CHUNK = 4096
"""Texts between two reports of progress."""

GPU_CHARACTERS = 1 << 17
"""Characters in one batch on a GPU, padding included: enough to keep it busy."""
GPU_TEXTS = 1024
CPU_BATCH, GPU_BATCH = 32, 256
"""Texts a teacher encodes at once, at least."""


def embedder(
    model: SentenceTransformer,
    *,
    name: str = "model",
    batch_size: int = 32,
    half_on_gpu: bool = False,
    progress: Progress = SILENT,
) -> Embedder:
    """The model's three roles, each with the model's own prompt for it.

    `half_on_gpu` computes in half precision where there is a GPU: for vectors that are stored so anyway. A model whose
    inner numbers are too large for that is computed in full from the first chunk on in which it shows.
    """
    on_gpu = _on_gpu(model)
    half = half_on_gpu and on_gpu and model.dtype == torch.float32
    prompts = prompts_by_role(model)

    @cache
    def tokenise() -> Callable[[list[str]], Features]:
        return make_tokeniser(model)

    def role(role: Role, encode: Callable[..., Vectors]) -> Encode:
        straight = has_one_way(model) and (not prompts[role] or pools_prompts(model))

        def run_chunk(texts: list[str]) -> Vectors:
            if straight:
                prompted = [prompts[role] + text for text in texts]
                return _encode(model, tokenise(), prompted, on_gpu=on_gpu, batch_size=batch_size)
            vectors = encode(texts, batch_size=batch_size, show_progress_bar=False, convert_to_numpy=True)
            return np.asarray(vectors, dtype=np.float32)

        def run_half(texts: list[str]) -> Vectors:
            nonlocal half
            with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                vectors = run_chunk(texts)
            if not half or np.isfinite(vectors).all():
                return vectors
            half = False
            return run_chunk(texts)

        def run(texts: Sequence[str]) -> Vectors:
            check_texts(texts)
            with progress.task(f"{name}: encoding", len(texts)) as advance:
                parts = []
                for start in range(0, len(texts), CHUNK):
                    chunk = list(texts[start : start + CHUNK])
                    parts.append(run_half(chunk))
                    advance(len(chunk))
            if not parts:
                return np.zeros((0, model.get_embedding_dimension() or 0), dtype=np.float32)
            return _check_vectors(np.concatenate(parts), texts, name)

        return run

    return Embedder(
        name=name,
        text=role("text", model.encode),
        query=role("query", model.encode_query),
        document=role("document", model.encode_document),
    )


def labelling_embedder(model: SentenceTransformer, *, name: str, progress: Progress = SILENT) -> Embedder:
    """The model as a teacher of many texts; whoever labels with it asks it so, and gets the same vectors."""
    batch_size = GPU_BATCH if _on_gpu(model) else CPU_BATCH
    return embedder(model, name=name, batch_size=batch_size, half_on_gpu=True, progress=progress)


def _on_gpu(model: SentenceTransformer) -> bool:
    return model.device.type == "cuda"


def has_one_way(model: SentenceTransformer) -> bool:
    """Whether queries and documents go the same way through the model, and all of the vector is used."""
    return model.truncate_dim is None and not any(isinstance(module, Router) for module in model)


@torch.inference_mode()
def _encode(
    model: SentenceTransformer,
    tokenise: Callable[[list[str]], Features],
    texts: list[str],
    *,
    on_gpu: bool,
    batch_size: int,
) -> Vectors:
    """What the library's encode gives; but a GPU is never waited for before the end, so it works while we tokenise.

    A batch that does not fit into its memory is halved, and so is what all later ones may hold.
    """
    model.eval()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]), reverse=True)
    found: list[Tensor] = []
    start, room = 0, sys.maxsize
    while start < len(order):
        longest = max(len(texts[order[start]]), 1)
        size = max(batch_size, min(GPU_TEXTS, GPU_CHARACTERS // longest)) if on_gpu else batch_size
        rows = order[start : start + max(1, min(size, room // longest))]
        features = tokenise([texts[number] for number in rows])
        try:
            outputs = model(batch_to_device(features, model.device))
        except torch.OutOfMemoryError as error:
            if len(rows) == 1:
                mend = "shorten it, or hide the GPU with CUDA_VISIBLE_DEVICES= before the command"
                raise too_large(f"a text of {longest:,} characters", mend) from error
            room = longest * (len(rows) // 2)
            free_gpu_memory()
            continue
        found.append(outputs["sentence_embedding"].float())
        start += len(rows)
    vectors = np.empty((len(texts), found[0].shape[1]), dtype=np.float32)
    vectors[order] = torch.cat(found).cpu().numpy()
    return vectors


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
