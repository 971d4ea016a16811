"""Cut models: given indices, slice every tied tensor, update the config and check the shapes.

A cut model is built from its new config and filled with sliced copies of the old weights, so everything that
a constructor derives from its config (scales, head counts, rotary tables) is correct. The input model is
never changed.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules as library
from sentence_transformers.sentence_transformer.modules import Dense, StaticEmbedding, Transformer
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
    """The indices to keep along each axis, in their new order; None keeps all of them."""

    blocks: Indices | None = None
    hidden: Indices | None = None
    head: Indices | None = None
    """Dimensions to keep inside every head."""
    mlp: tuple[Indices, ...] | None = None
    """Neurons to keep in the MLP of each block of the model before the cut; the same number in each."""
    vocab: Indices | None = None

    def apply_to(self, layout: Layout) -> Layout:
        """Return the layout after this cut."""
        for axis in ("hidden", "head", "vocab"):
            if (kept := getattr(self, axis)) is not None:
                _check_indices(axis, kept, layout.sizes[axis])
        if self.mlp is not None:
            if len(self.mlp) != layout.layers:
                raise ImpossibleCut(f"{len(self.mlp)} lists of neurons; pass one list per layer")
            for kept in self.mlp:
                _check_indices("mlp", kept, layout.sizes["mlp"])
            if len({len(kept) for kept in self.mlp}) > 1:
                raise ImpossibleCut("the layers keep different numbers of neurons; keep the same in each")
        neurons = None if self.mlp is None else self.mlp[0]
        hidden, head, mlp, vocab = (
            None if kept is None else len(kept) for kept in (self.hidden, self.head, neurons, self.vocab)
        )
        return _shrunk(layout, blocks=self.blocks, hidden=hidden, head=head, mlp=mlp, vocab=vocab)


def _check_indices(axis: str, kept: Indices, size: int) -> None:
    if len(set(kept)) != len(kept) or any(not 0 <= index < size for index in kept):
        raise ImpossibleCut(f"indices along {axis!r} must be different and lie between 0 and {size - 1}")


def cut(model: SentenceTransformer, what: Cut) -> SentenceTransformer:
    """Return a new model with only what the cut keeps, including pooling and the layers after it."""
    transformer = transformer_of(model)
    twin = _shallow_copy(transformer)
    twin.model = _cut_backbone(transformer.model, what)
    processor = transformer.processor
    if what.vocab is None:
        twin.processor = copy.deepcopy(processor)
    else:
        rows = len(cast("Any", transformer.model).get_input_embeddings().weight)
        twin.processor = _with_tokens(processor, what.vocab, rows)
    rest = [copy.deepcopy(module) for module in list(model)[1:]]
    if what.hidden is not None:
        narrow_modules(rest, what.hidden)
    return with_modules(model, [twin, *rest])


def _shallow_copy(transformer: Transformer) -> Transformer:
    """A copy whose submodules can be replaced without changing the original."""
    twin = copy.copy(transformer)
    twin._modules = dict(transformer._modules)
    return twin


def with_modules(model: SentenceTransformer, modules: Sequence[nn.Module]) -> SentenceTransformer:
    """Return a model of these modules with the prompts and settings of `model`; training modes are kept."""
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
    """Return the module that holds the backbone; a model without one is rejected."""
    first = model[0] if len(model) else None
    if isinstance(first, StaticEmbedding):
        raise BadModel("the model is static, so it can't be changed; pass the model it was made from")
    if not isinstance(first, Transformer) or not isinstance(first.model, PreTrainedModel):
        raise BadModel(f"the model begins with {type(first).__name__}; pass a torch transformer model")
    return cast("Transformer", first)


def _cut_backbone(backbone: PreTrainedModel, what: Cut) -> PreTrainedModel:
    before = layout_of(backbone)
    after = what.apply_to(before)
    small = unfilled_backbone(backbone, after, what)
    blocks = (None, *(range(before.layers) if what.blocks is None else what.blocks))
    kept = [parameter for parameter in before.parameters if parameter.block in blocks]
    weights = backbone.state_dict()
    sliced = {
        new.name: _sliced(weights[old.name], old, before, what)
        for old, new in zip(kept, after.parameters, strict=True)
    }
    missing, unexpected = small.load_state_dict(sliced, strict=False, assign=True)
    strangers = [name for name in missing if name in dict(small.named_parameters())] + list(unexpected)
    if strangers:
        raise ImpossibleCut(f"{strangers[0]} is not in both the model and the cut model; keep its layer")
    for parameter in after.parameters:
        found, expected = tuple(sliced[parameter.name].shape), after.shape(parameter)
        if found != expected:
            raise ImpossibleCut(f"{parameter.name} was cut to {found}, not {expected}")
    small.train(backbone.training)
    return nn.Module.to(small, backbone.device)


def unfilled_backbone(backbone: PreTrainedModel, after: Layout, what: Cut) -> PreTrainedModel:
    """Return the backbone after a cut, built from its config but with uninitialised weights."""
    with no_init_weights():
        small = type(backbone)(_new_config(backbone.config, after, what))
    small.set_input_embeddings(small.get_input_embeddings())  # T5 has two tables with the same weights
    _match_pooler(backbone, small)
    return small


def _match_pooler(backbone: PreTrainedModel, new: PreTrainedModel) -> None:
    if getattr(backbone, "pooler", new) is None:
        del new.pooler
        new.register_module("pooler", None)


def _sliced(weight: Tensor, parameter: Parameter, layout: Layout, what: Cut) -> Tensor:
    for dimension, axis in enumerate(parameter.axes):
        if (kept := _kept_positions(axis, parameter.block, layout, what)) is not None:
            weight = weight.index_select(dimension, kept.to(weight.device))
    return weight.detach().clone()


def _kept_positions(axis: str, block: int | None, layout: Layout, what: Cut) -> Tensor | None:
    """Return the positions that a cut keeps along a plain or fused axis, or None for all of them."""
    parts = [(layout.sizes[term], _kept(term, block, layout, what)) for term in terms(axis)]
    if all(kept is None for _, kept in parts):
        return None
    offset, joined = 0, []
    for size, kept in parts:
        joined.append(offset + (torch.arange(size) if kept is None else kept))
        offset += size
    return torch.cat(joined)


def _kept(axis: str, block: int | None, layout: Layout, what: Cut) -> Tensor | None:
    """The positions to keep along a plain axis, or None for all of them."""
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
    new = copy.deepcopy(config)
    if what.blocks is not None:
        layers = getattr(config, family.layers)
        for entry in family.per_layer:
            if (old_list := getattr(config, entry, None)) is None:
                continue
            if len(old_list) != layers:
                raise BadModel(f"{entry} has {len(old_list)} entries for {layers} layers; fix the config")
            setattr(new, entry, [old_list[block] for block in what.blocks])
        setattr(new, family.layers, after.layers)
    entries = {"hidden": family.hidden, "mlp": family.mlp, "vocab": family.vocab}
    if family.head:
        entries["head"] = family.head
    for axis, entry in entries.items():
        if _read_sizes(family, new)[axis] != after.sizes[axis]:
            setattr(new, entry, after.sizes[axis])
    if "embedding" not in after.sizes and hasattr(new, "embedding_size"):
        new.embedding_size = after.sizes["hidden"]
    if what.head is not None:
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        if any(isinstance(value, list) for value in rope.values()):
            raise ImpossibleCut("rotary scaling has one factor per head dimension; keep the head width")
        for entry in family.follows_head:
            setattr(new, entry, after.sizes["head"])
    if what.vocab is not None:
        _renumber(new, family, what.vocab)
    return new


def _renumber(config: PreTrainedConfig, family: _Family, kept: Indices) -> None:
    """Update every token id in the config; a removed token is no longer named."""
    new = {old: position for position, old in enumerate(kept)}
    moved = [number for number in _pinned_ids(family, config) if new.get(number) != number]
    if moved:
        raise ImpossibleCut(f"a {family.name} model counts positions from its pad id; keep id {moved[0]}")
    for entry, value in config.to_dict().items():
        if not entry.endswith("_token_id") or value is None:
            continue
        if isinstance(value, list):
            setattr(config, entry, [new[number] for number in value if number in new] or None)
        else:
            setattr(config, entry, new.get(value))


def narrow_modules(modules: Sequence[nn.Module], hidden: Indices) -> Tensor:
    """Narrow the modules after the backbone in place, up to the first Dense; return the kept positions."""
    kept = torch.tensor(hidden)
    for module in modules:
        if isinstance(module, library.Pooling):
            modes = module.pooling_output_dimension // module.embedding_dimension
            old_width = module.embedding_dimension
            kept = torch.cat([mode * old_width + kept for mode in range(modes)])
            module.embedding_dimension = len(hidden)
            module.pooling_output_dimension = len(kept)
        elif isinstance(module, Dense):
            if module.use_residual:
                raise ImpossibleCut("a Dense layer with a residual path can't be narrowed; keep the width")
            module.linear.weight = nn.Parameter(module.linear.weight.detach()[:, kept].clone())
            module.linear.in_features = module.in_features = len(kept)
            return kept
        elif isinstance(module, library.LayerNorm):
            narrow = nn.LayerNorm(len(kept), eps=module.norm.eps)
            narrow.weight = nn.Parameter(module.norm.weight.detach()[kept].clone())
            narrow.bias = nn.Parameter(module.norm.bias.detach()[kept].clone())
            module.norm, module.dimension = narrow, len(kept)
        elif not isinstance(module, library.Normalize | library.Dropout):
            raise ImpossibleCut(f"a {type(module).__name__} module can't be narrowed; keep the width")
    return kept
