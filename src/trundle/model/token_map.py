"""A backbone with fewer tokens behind its original tokenizer: each id is replaced by one that was kept.

This is the one module of ours in a model's folder. Where trundle is installed,
`SentenceTransformer(folder, trust_remote_code=True)` opens it; elsewhere the library says that it can't import trundle.
The map is applied in `forward`, so a graph traced from the model contains it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import Tensor

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.surgery import Cut, _cut_backbone, transformer_of, with_modules

_MAP_FILE = "token_map.npy"


class MappedTransformer(Transformer):
    """A transformer that looks up every token id in a table before it reads it."""

    token_map: Tensor
    """For each id of the tokenizer, a row of the embedding."""

    @classmethod
    def around(cls, transformer: Transformer, token_map: Tensor) -> Self:
        """The same transformer with a map before it; the two share everything else."""
        mapped = cls.__new__(cls)
        mapped.__dict__.update(transformer.__dict__)
        mapped._modules, mapped._buffers = dict(transformer._modules), dict(transformer._buffers)
        mapped.register_buffer("token_map", token_map.to(transformer.model.device))
        return mapped

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Replace the ids, and go on as usual."""
        ids = features["input_ids"]
        result: dict[str, Any] = super().forward({**features, "input_ids": self.token_map[ids]}, **kwargs)
        return result | {"input_ids": ids}

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Write the map beside the weights."""
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        table = self.token_map.cpu().numpy().astype(np.int32)
        np.save(Path(output_path) / _MAP_FILE, table, allow_pickle=False)

    @classmethod
    def load(  # type: ignore[override]
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Read the transformer and its map."""
        hub: dict[str, Any] = {
            "subfolder": subfolder,
            "token": token,
            "cache_folder": cache_folder,
            "revision": revision,
            "local_files_only": local_files_only,
        }
        transformer = Transformer.load(model_name_or_path, **hub, **kwargs)
        path = cls.load_file_path(model_name_or_path, filename=_MAP_FILE, **hub)
        if path is None:
            raise BadModel(f"{model_name_or_path} has no {_MAP_FILE}; fetch the whole model")
        table = np.load(path, allow_pickle=False)
        if table.max(initial=0) >= transformer.model.config.vocab_size:
            raise BadModel(f"{path} points beyond the model's vocabulary; fetch the model again")
        return cls.around(transformer, torch.from_numpy(table.astype(np.int64)))


_MAPPED_TYPE = f"{MappedTransformer.__module__}.{MappedTransformer.__name__}"
"""How a folder's modules.json calls it."""


def has_token_map(model: SentenceTransformer) -> bool:
    """Whether a model needs trundle to be opened."""
    return len(model) > 0 and isinstance(model[0], MappedTransformer)


def cut_with_map(
    model: SentenceTransformer, kept: Sequence[int], stands_for: Sequence[int]
) -> SentenceTransformer:
    """The model with only the kept rows; for each id of its tokenizer, `stands_for` names the kept id that is read."""
    transformer = transformer_of(model)
    if isinstance(transformer, MappedTransformer):
        raise ImpossibleCut("the model's tokens are mapped already; cut the model it was made from instead")
    new = {old: position for position, old in enumerate(kept)}
    twin = copy.copy(transformer)
    twin._modules = dict(transformer._modules)
    twin.model = _cut_backbone(transformer.model, Cut(vocab=tuple(kept)))
    twin.processor = copy.deepcopy(transformer.processor)
    mapped = MappedTransformer.around(twin, torch.tensor([new[old] for old in stands_for]))
    return with_modules(model, [mapped, *(copy.deepcopy(module) for module in list(model)[1:])])
