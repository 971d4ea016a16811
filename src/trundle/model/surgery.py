"""Cuts. Surgery decides nothing: it takes indices, cuts every tied place at once, fixes the config, checks shapes.

A cut model is built fresh from its new config and filled with sliced copies of the old weights, so that whatever a
constructor derives from its config (scales, head counts, rotary tables) is right by construction. The model that is cut
is never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    StaticEmbedding,
    Transformer,
)
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.anatomy import _Family, _pinned_ids, terms
from trundle.model.layout import Layout, Parameter, _read_sizes, _shrunk, layout_of
from trundle.model.tokenizer import _with_tokens

Indices = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is kept along each axis; None keeps all of it. Order is free: the kept ones appear as listed."""

    blocks: Indices | None = None
    hidden: Indices | None = None
    head: Indices | None = None
    """Dimensions kept inside every head."""
    mlp: tuple[Indices, ...] | None = None
    """Neurons kept in the MLP of each block of the model as it is now; the same number in each."""
    vocab: Indices | None = None

    def apply_to(self, layout: Layout) -> Layout:
        """The layout this cut leads to."""
        for axis in ("hidden", "head", "vocab"):
            if (kept := getattr(self, axis)) is not None:
                _check_indices(axis, kept, layout.sizes[axis])
        if self.mlp is not None:
            if len(self.mlp) != layout.layers:
                raise ImpossibleCut(
                    f"neurons are given for {len(self.mlp)} layers of {layout.layers}; give one list per layer"
                )
            for kept in self.mlp:
                _check_indices("mlp", kept, layout.sizes["mlp"])
            if len({len(kept) for kept in self.mlp}) > 1:
                raise ImpossibleCut(
                    "the layers would keep different numbers of MLP neurons, which no config can say"
                )
        return _shrunk(
            layout,
            blocks=self.blocks,
            hidden=None if self.hidden is None else len(self.hidden),
            head=None if self.head is None else len(self.head),
            mlp=None if self.mlp is None else len(self.mlp[0]),
            vocab=None if self.vocab is None else len(self.vocab),
        )


def _check_indices(axis: str, kept: Indices, size: int) -> None:
    if len(set(kept)) != len(kept) or any(not 0 <= index < size for index in kept):
        raise ImpossibleCut(f"indices along {axis!r} must be different and lie between 0 and {size - 1}")


def cut(model: SentenceTransformer, what: Cut) -> SentenceTransformer:
    """A new model with only what the cut keeps: backbone, pooling and the layers after it."""
    transformer = transformer_of(model)
    twin = copy.copy(transformer)
    twin._modules = dict(transformer._modules)
    twin.model = _cut_backbone(transformer.model, what)
    if what.vocab is None:
        twin.processor = copy.deepcopy(transformer.processor)
    else:
        twin.processor = _with_tokens(transformer.processor, what.vocab)
    rest = [copy.deepcopy(module) for module in list(model)[1:]]
    if what.hidden is not None:
        narrow_modules(rest, what.hidden)
    return with_modules(model, [twin, *rest])


def with_modules(model: SentenceTransformer, modules: Sequence[nn.Module]) -> SentenceTransformer:
    """A model of these modules that keeps the prompts and settings of `model`; each module trains or not as it did."""
    made = SentenceTransformer(
        modules=list(modules),
        device=str(model.device),
        prompts=cast("dict[str, str]", model.prompts),
        default_prompt_name=model.default_prompt_name,
        similarity_fn_name=model.similarity_fn_name,
        truncate_dim=model.truncate_dim,
    )
    made.training = model.training
    return made


def transformer_of(model: SentenceTransformer) -> Transformer:
    """The module that holds the backbone; models that begin otherwise have nothing to cut."""
    first = model[0] if len(model) else None
    if isinstance(first, StaticEmbedding):
        raise BadModel(
            "the model is static, so there are no layers in it to change; give the model it was made from "
            "(its vocabulary is cut before depth --keep 0)"
        )
    if not isinstance(first, Transformer) or not isinstance(first.model, PreTrainedModel):
        raise BadModel(
            f"the model begins with {type(first).__name__}, not with a torch transformer; give a transformer model"
        )
    return cast("Transformer", first)


def _cut_backbone(backbone: PreTrainedModel, what: Cut) -> PreTrainedModel:
    """A new backbone with only what the cut keeps."""
    before = layout_of(backbone)
    after = what.apply_to(before)
    small = unfilled_backbone(backbone, after, what)
    old_names = _names_before(before, what.blocks)
    weights = backbone.state_dict()
    sliced = {
        new.name: _sliced(weights[old.name], old, before, what)
        for old, new in zip(old_names, after.parameters, strict=True)
    }
    missing, unexpected = small.load_state_dict(sliced, strict=False, assign=True)
    strangers = [name for name in missing if name in dict(small.named_parameters())] + list(unexpected)
    if strangers:
        raise ImpossibleCut(
            f"the cut model would not have the same parts as the original ({strangers[0]}); keep its layer"
        )
    for parameter in after.parameters:
        if tuple(sliced[parameter.name].shape) != after.shape(parameter):
            raise ImpossibleCut(
                f"{parameter.name} came out as {tuple(sliced[parameter.name].shape)}, not {after.shape(parameter)}"
            )
    small.train(backbone.training)
    return nn.Module.to(small, backbone.device)


def unfilled_backbone(backbone: PreTrainedModel, after: Layout, what: Cut) -> PreTrainedModel:
    """The backbone a cut leads to, with everything its config decides but with no weights to speak of."""
    config = _new_config(backbone.config, after, what)
    with no_init_weights():
        small = type(backbone)(config)
    if getattr(backbone, "pooler", small) is None:
        del small.pooler
        small.register_module("pooler", None)
    return small


def _names_before(before: Layout, blocks: Indices | None) -> list[Parameter]:
    return [p for p in before.parameters if p.block is None or blocks is None or p.block in blocks]


def _sliced(weight: Tensor, parameter: Parameter, layout: Layout, what: Cut) -> Tensor:
    for dimension, axis in enumerate(parameter.axes):
        kept = _kept(axis, parameter.block, layout, what)
        if kept is not None:
            weight = weight.index_select(dimension, kept.to(weight.device))
    return weight.detach().clone()


def _kept(axis: str, block: int | None, layout: Layout, what: Cut) -> Tensor | None:
    """Which positions along an axis stay, or None for all of them."""
    parts = [_kept_plain(term, block, layout, what) for term in terms(axis)]
    if all(part is None for part in parts):
        return None
    offset, joined = 0, []
    for term, part in zip(terms(axis), parts, strict=True):
        size = layout.sizes[term]
        joined.append(offset + (torch.arange(size) if part is None else part))
        offset += size
    return torch.cat(joined)


def _kept_plain(axis: str, block: int | None, layout: Layout, what: Cut) -> Tensor | None:
    if axis in ("q", "o", "k", "v"):
        if what.head is None:
            return None
        starts = torch.arange(0, layout.sizes[axis], layout.sizes["head"])
        return (starts[:, None] + torch.tensor(what.head)[None, :]).flatten()
    if axis == "mlp":
        return None if what.mlp is None or block is None else torch.tensor(what.mlp[block])
    kept: Indices | None = {"hidden": what.hidden, "head": what.head, "vocab": what.vocab}.get(axis)
    return None if kept is None else torch.tensor(kept)


def _new_config(config: PreTrainedConfig, after: Layout, what: Cut) -> PreTrainedConfig:
    family = after.family
    if what.head is not None:
        _refuse_per_dimension_rope(config)
    new = copy.deepcopy(config)
    if what.blocks is not None:
        for entry in family.per_layer:
            old_list = getattr(config, entry, None)
            if old_list is None:
                continue
            if len(old_list) != getattr(config, family.layers):
                raise BadModel(
                    f"the config's {entry} has {len(old_list)} entries for {getattr(config, family.layers)} layers; mend the config"
                )
            setattr(new, entry, [old_list[block] for block in what.blocks])
        setattr(new, family.layers, after.layers)
    for axis, entry in _entries(family).items():
        if _read_sizes(family, new)[axis] != after.sizes[axis]:
            setattr(new, entry, after.sizes[axis])
    if what.head is not None:
        for entry in family.follows_head:
            setattr(new, entry, after.sizes["head"])
    if what.vocab is not None:
        _renumber(new, family, what.vocab)
    return new


def _renumber(config: PreTrainedConfig, family: _Family, kept: Indices) -> None:
    """Give every token the config names its new id; one that is gone is no longer named."""
    new = {old: position for position, old in enumerate(kept)}
    moved = [number for number in _pinned_ids(family, config) if new.get(number) != number]
    if moved:
        raise ImpossibleCut(
            f"a {family.name} model counts positions from its pad token's id; keep id {moved[0]} in its place"
        )
    for entry, value in config.to_dict().items():
        if not entry.endswith("_token_id") or value is None:
            continue
        if isinstance(value, list):
            setattr(config, entry, [new[number] for number in value if number in new] or None)
        else:
            setattr(config, entry, new.get(value))


def _entries(family: _Family) -> dict[str, str]:
    """Axis → config entry, for the axes a cut can change."""
    entries = {"hidden": family.hidden, "mlp": family.mlp, "vocab": family.vocab}
    return entries | ({"head": family.head} if family.head else {})


def _refuse_per_dimension_rope(config: PreTrainedConfig) -> None:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, list) for value in rope.values()):
        raise ImpossibleCut(
            "this model's rotary scaling lists one factor per head dimension; its head width can't be cut"
        )


def narrow_modules(modules: Sequence[nn.Module], hidden: Indices) -> Tensor:
    """Make the modules after the backbone take the narrower states, up to the first that fixes its own width.

    Gives the positions that are kept of the pooled vector.
    """
    kept = torch.tensor(hidden)
    for module in modules:
        if isinstance(module, Pooling):
            modes = module.pooling_output_dimension // module.embedding_dimension
            old_width = module.embedding_dimension
            kept = torch.cat([mode * old_width + kept for mode in range(modes)])
            module.embedding_dimension = len(hidden)
            module.pooling_output_dimension = len(kept)
        elif isinstance(module, Dense):
            if module.use_residual:
                raise ImpossibleCut(
                    "the Dense layer after the backbone has a residual path; its input can't be narrowed"
                )
            module.linear.weight = nn.Parameter(module.linear.weight.detach()[:, kept].clone())
            module.linear.in_features = module.in_features = len(kept)
            return kept
        elif isinstance(module, LayerNorm):
            module.norm = _narrow_norm(module.norm, kept)
            module.dimension = len(kept)
        elif not isinstance(module, Normalize | Dropout):
            raise ImpossibleCut(
                f"trundle can't narrow a {type(module).__name__} module; cut layers or neurons instead"
            )
    return kept


def _narrow_norm(norm: nn.LayerNorm, kept: Tensor) -> nn.LayerNorm:
    narrow = nn.LayerNorm(len(kept), eps=norm.eps)
    narrow.weight = nn.Parameter(norm.weight.detach()[kept].clone())
    narrow.bias = nn.Parameter(norm.bias.detach()[kept].clone())
    return narrow
