"""Who a model is, by what decides its vectors: weights, tokenizer and the modules' settings."""

from __future__ import annotations

from hashlib import blake2b

import torch
from sentence_transformers import SentenceTransformer

DIGEST_BYTES = 16


def model_digest(model: SentenceTransformer) -> str:
    """The same for a copy, another for a retrained model; about a second per gigabyte."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    for module in model:
        whole.update(f"{type(module).__name__}\0{getattr(module, 'pooling_mode', '')}\n".encode())
    whole.update(f"{model.max_seq_length}\n".encode())
    backend = getattr(model.tokenizer, "backend_tokenizer", None)
    whole.update((backend.to_str() if backend is not None else repr(model.tokenizer)).encode())
    for name, weight in sorted(model.state_dict().items()):
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        whole.update(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\n".encode())
        whole.update(memoryview(raw.numpy()))
    return f"model {whole.hexdigest()}"
