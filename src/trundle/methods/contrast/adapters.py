"""LoRA: thin pairs of matrices beside the frozen ones, trained in their stead and added to them at the end.

Which matrices get one is told by the anatomy: every linear map of attention and MLP, fused ones and GPT-2's transposed
ones included. The merged model has the same parts and names as before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from sentence_transformers import SentenceTransformer
from torch import nn

from trundle.model.layout import layout_of
from trundle.model.matrices import prunable
from trundle.model.surgery import transformer_of
from trundle.train.blocks import keep_zeros_beside, keeps_zeros

_ADAPTER = "default"


@dataclass(frozen=True, kw_only=True)
class _Lora:
    """The size and strength of the adapters; the paper's figures."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.05


@dataclass(frozen=True, kw_only=True)
class _Adapted:
    """A model whose adapters are trained while all else is frozen."""

    model: SentenceTransformer
    tuner: LoraModel
    after_merge: tuple[Callable[[], None], ...] = ()
    """Put zeros back where the adapters would have filled them."""

    def merge(self) -> SentenceTransformer:
        """Add the adapters to the weights they stand beside; the model is plain again."""
        transformer_of(self.model).model = self.tuner.merge_and_unload()
        for finish in self.after_merge:
            finish()
        return self.model.requires_grad_(True)


def _add_adapters(
    model: SentenceTransformer, lora: _Lora, *, seed: int, keep_zeros: bool | None = None
) -> _Adapted:
    """Put adapters into the model itself, which is frozen but for them; at first they change nothing.

    With `keep_zeros` a pruned weight stays zero: adapters beside a matrix with zeros add nothing there, and drop nothing out.
    That costs more than the adapters do, so by default only a model that was pruned is treated so.
    """
    keep_zeros = keeps_zeros(model, keep_zeros)
    model.requires_grad_(False)
    backbone = transformer_of(model).model
    matrices = prunable(layout_of(backbone), attention=True)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=[matrix.name for matrix in matrices],
        fan_in_fan_out=matrices[0].transposed,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuner = LoraModel(backbone, config, _ADAPTER)
    finish = []
    if keep_zeros:
        for matrix in matrices:
            layer: Any = backbone.get_submodule(matrix.name)
            if bool((layer.get_base_layer().weight == 0).any()):
                layer.lora_dropout[_ADAPTER] = nn.Identity()
                finish.append(keep_zeros_beside(layer, _ADAPTER, transposed=matrix.transposed))
    return _Adapted(model=model, tuner=tuner, after_merge=tuple(finish))
