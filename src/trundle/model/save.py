"""Write a model as a standard folder with its lineage and card, atomically; digests of a model's content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Module
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from trundle.errors import WriteFailed
from trundle.folders import atomic_folder
from trundle.records import Lineage

_DIGEST_BYTES = 16


def save(
    model: SentenceTransformer,
    folder: str | Path,
    *,
    lineage: Lineage,
    card: str,
    files: Mapping[str, str | bytes] | None = None,
    replace: bool = False,
) -> Path:
    """Write the folder layout of sentence-transformers, with the lineage, the card and additional `files`."""
    target = Path(folder)
    with atomic_folder(target, replace=replace, keep=True) as scratch:
        try:
            model.save_pretrained(str(scratch), create_model_card=False, safe_serialization=True)
        except SafetensorError as error:
            raise WriteFailed(f"{target} could not be written ({error}); free some space") from error
        for name, content in {"README.md": card, **(files or {})}.items():
            (scratch / name).write_bytes(content.encode() if isinstance(content, str) else content)
        lineage.write(scratch)
    return target


def weight_bytes(folder: str | Path) -> int:
    """Return the size of the weights on disk."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))


def model_digest(model: SentenceTransformer) -> str:
    """Return a digest of weights, settings, prompts and tokenizer; on all cores."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for module in model:
        settings = module.get_config_dict() if isinstance(module, Module) else {}
        backbone = getattr(module, "model", None)
        config = backbone.config.to_json_string() if isinstance(backbone, PreTrainedModel) else ""
        described = json.dumps(settings, sort_keys=True, default=str)
        digest.update(f"{type(module).__name__}\0{described}\0{config}\n".encode())
    digest.update(f"{model.max_seq_length} {model.truncate_dim} {model.default_prompt_name}\n".encode())
    digest.update(f"{json.dumps(model.prompts, sort_keys=True)}\n".encode())
    digest.update(tokenizer_text(model).encode())
    _update_with_weights(digest, model.state_dict().items())
    return f"model {digest.hexdigest()}"


def weights_digest(model: SentenceTransformer) -> str:
    """Return a digest of the weights alone."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    _update_with_weights(digest, model.named_parameters())
    return f"weights {digest.hexdigest()}"


def _update_with_weights(digest: blake2b, weights: Iterable[tuple[str, Any]]) -> None:
    ordered = sorted(weights, key=lambda named: named[0])
    with ThreadPoolExecutor() as pool:  # hashing releases the GIL
        for (name, weight), own in zip(ordered, pool.map(_weight_digest, ordered), strict=True):
            digest.update(f"{name}\0{weight.dtype}\0{tuple(weight.shape)}\n".encode())
            digest.update(own)


def _weight_digest(named: tuple[str, Any]) -> bytes:
    raw = named[1].detach().cpu().contiguous().flatten().view(torch.uint8)
    return blake2b(raw.numpy().data, digest_size=_DIGEST_BYTES).digest()


def tokenizer_text(model: SentenceTransformer) -> str:
    """Return the tokenizer's content, without its current padding and truncation."""
    backend = getattr(model.tokenizer, "backend_tokenizer", model.tokenizer)
    if not isinstance(backend, Tokenizer):
        return repr(model.tokenizer)
    content = json.loads(backend.to_str())
    return json.dumps({key: value for key, value in content.items() if key not in {"padding", "truncation"}})
