"""Who a model is, by what decides its vectors: weights, tokenizer, prompts and the modules' settings."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Module
from tokenizers import Tokenizer
from transformers import PreTrainedModel

DIGEST_BYTES = 16


def model_digest(model: SentenceTransformer) -> str:
    """The same for a copy, another for a retrained model; about a second per gigabyte."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    for module in model:
        settings = module.get_config_dict() if isinstance(module, Module) else {}
        backbone = getattr(module, "model", None)
        config = backbone.config.to_json_string() if isinstance(backbone, PreTrainedModel) else ""
        whole.update(
            f"{type(module).__name__}\0{json.dumps(settings, sort_keys=True, default=str)}\0{config}\n".encode()
        )
    whole.update(f"{model.max_seq_length} {model.truncate_dim} {model.default_prompt_name}\n".encode())
    whole.update(f"{json.dumps(model.prompts, sort_keys=True)}\n".encode())
    whole.update(tokenizer_text(model).encode())
    for name, weight in sorted(model.state_dict().items()):
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        whole.update(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\n".encode())
        whole.update(memoryview(raw.numpy()))
    return f"model {whole.hexdigest()}"


def weights_digest(model: SentenceTransformer) -> str:
    """Who a model is by its weights alone; whatever they were saved with."""
    whole = blake2b(digest_size=DIGEST_BYTES)
    weights: dict[str, Any] = dict(model.named_parameters())
    for name, weight in sorted(weights.items()):
        whole.update(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\n".encode())
        raw = weight.detach().cpu().contiguous().flatten().view(torch.uint8)
        whole.update(memoryview(raw.numpy()))
    return f"weights {whole.hexdigest()}"


def tokenizer_text(model: SentenceTransformer) -> str:
    """What the tokenizer does to a text; how it was last asked to pad and truncate is left out."""
    backend = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    if not isinstance(backend, Tokenizer):
        return repr(model.tokenizer)
    content = json.loads(backend.to_str())
    return json.dumps({key: value for key, value in content.items() if key not in {"padding", "truncation"}})
