"""A model leaves as a standard folder, whole or not at all, with its lineage and card inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from trundle.folders import whole_folder
from trundle.records import Lineage


def save(
    model: SentenceTransformer,
    folder: str | Path,
    *,
    lineage: Lineage,
    card: str,
    files: Mapping[str, str | bytes] | None = None,
    replace: bool = False,
) -> Path:
    """Write the layout that plain sentence-transformers loads and the additional `files`."""
    target = Path(folder)
    with whole_folder(target, replace=replace) as scratch:
        try:
            model.save_pretrained(str(scratch), create_model_card=False, safe_serialization=True)
        except SafetensorError as error:
            raise WriteFailed(
                f"{target} could not be written ({error}); free some space and run again"
            ) from error
        for name, content in {"README.md": card, **(files or {})}.items():
            (scratch / name).write_bytes(content.encode() if isinstance(content, str) else content)
        lineage.write(scratch)
    return target


def weight_bytes(folder: str | Path) -> int:
    """What the weights weigh on disk."""
    return sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))


_DIGEST_BYTES = 16


def model_digest(model: SentenceTransformer) -> str:
    """The same for a copy, another for a retrained model; about a second per gigabyte."""
    whole = blake2b(digest_size=_DIGEST_BYTES)
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
    whole = blake2b(digest_size=_DIGEST_BYTES)
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
