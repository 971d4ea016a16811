"""The parameters of one model along named axes: its anatomy row with sizes.

A layout holds no weights. Sizes before and after a cut are arithmetic on layouts, so a plan can predict what
it saves without building anything, and surgery can check the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.anatomy import (
    _BY_MODEL_TYPE,
    _Axes,
    _axes_of,
    _Family,
    _family_of,
    _Member,
    _Part,
    _Table,
    terms,
)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its name, its part of the model, and the axes it lies along."""

    name: str
    block: int | None
    member: _Member
    axes: _Axes
    itemsize: int

    @property
    def part(self) -> _Part:
        """The part of the model it is counted under."""
        return self.member.part

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix that tokens are multiplied with, not a lookup table or a vector."""
        return len(self.axes) == 2 and not isinstance(self.member, _Table)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every parameter of a backbone and the length of every axis."""

    family: _Family
    layers: int
    sizes: Mapping[str, int]
    parameters: tuple[Parameter, ...]

    def size(self, axis: str) -> int:
        """Return the length of a plain or fused axis."""
        return sum(self.sizes[term] for term in terms(axis))

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of a parameter in this layout."""
        return tuple(self.size(axis) for axis in parameter.axes)

    def numel(self, parameter: Parameter) -> int:
        """Return the number of weights of a parameter in this layout."""
        return math.prod(self.shape(parameter))


def _read_sizes(family: _Family, config: PreTrainedConfig) -> dict[str, int]:
    hidden, heads = int(getattr(config, family.hidden)), int(getattr(config, family.heads))
    head = (getattr(config, family.head, None) if family.head else None) or hidden // heads
    sizes = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(getattr(config, family.kv_heads)) if family.kv_heads else heads,
        "head": int(head),
        "mlp": int(getattr(config, family.mlp) or 4 * hidden),
        "vocab": int(getattr(config, family.vocab)),
    }
    return _with_attention_sizes(sizes)


def _with_attention_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    queries, keys = sizes["heads"] * sizes["head"], sizes["kv_heads"] * sizes["head"]
    return {**sizes, "q": queries, "o": queries, "k": keys, "v": keys}


def token_limit(backbone: PreTrainedModel) -> int | None:
    """Return the most tokens the model has positions for; None if it has no table of positions."""
    if backbone.config.model_type not in _BY_MODEL_TYPE:
        return getattr(backbone.config, "max_position_embeddings", None)
    layout = layout_of(backbone)
    positions = layout.sizes.get("position")
    if positions is None or not layout.family.positions_after_pad:
        return positions
    return positions - max(getattr(backbone.config, "pad_token_id", None) or 0, 1) - 1


def layout_of(backbone: PreTrainedModel) -> Layout:
    """Return the layout of a backbone, checked against the shapes of its weights."""
    family = _family_of(backbone.config.model_type)
    weights = dict(backbone.named_parameters())
    parameters = tuple(_parameter(family, name, weight) for name, weight in weights.items())
    if family.projection is not None and f"{family.projection}.weight" not in weights:
        parameters = tuple(
            replace(each, axes=tuple("hidden" if axis == "embedding" else axis for axis in each.axes))
            for each in parameters
        )
    lengths = {
        axis: length
        for parameter in parameters
        for axis, length in zip(parameter.axes, weights[parameter.name].shape, strict=False)
    }
    layout = Layout(
        family=family,
        layers=int(getattr(backbone.config, family.layers)),
        sizes=lengths | _read_sizes(family, backbone.config),
        parameters=parameters,
    )
    for parameter in layout.parameters:
        expected, found = layout.shape(parameter), tuple(weights[parameter.name].shape)
        if expected != found:
            raise BadModel(f"{parameter.name} has shape {found}, not {expected}; download the model again")
    return layout


def _parameter(family: _Family, name: str, weight: nn.Parameter) -> Parameter:
    module, _, kind = name.rpartition(".")
    block: int | None = None
    table: Mapping[str, _Member] = family.outside
    if module.startswith(f"{family.blocks}."):
        index, _, module = module.removeprefix(f"{family.blocks}.").partition(".")
        block, table = int(index), family.inside
    if module not in table:
        raise BadModel(f"the {family.name} row in trundle/model/anatomy.py lacks {name}; add it to the row")
    axes = _axes_of(table[module], kind)
    return Parameter(name=name, block=block, member=table[module], axes=axes, itemsize=weight.element_size())


def _shrunk(
    layout: Layout,
    *,
    blocks: Sequence[int] | None = None,
    hidden: int | None = None,
    head: int | None = None,
    mlp: int | None = None,
    vocab: int | None = None,
) -> Layout:
    family, sizes = layout.family, dict(layout.sizes)
    for axis, count in {"hidden": hidden, "head": head, "mlp": mlp, "vocab": vocab}.items():
        if count is None:
            continue
        if not 1 <= count <= sizes[axis]:
            raise ImpossibleCut(f"{axis!r} can't be cut to {count}; pass 1 to {sizes[axis]}")
        sizes[axis] = count
    sizes = _with_attention_sizes(sizes)
    if family.head is None and sizes["q"] != sizes["hidden"]:
        heads = f"{sizes['heads']} heads × {sizes['head']}"
        raise ImpossibleCut(f"{heads} is not the hidden width {sizes['hidden']}; cut both by the same share")
    if family.projection is not None and hidden is not None and sizes.get("embedding") == hidden:
        what = f"the {family.name} model can't be {hidden} wide like its token table"
        raise ImpossibleCut(f"{what}, as the library then has no matrix between them; choose another width")
    if family.rotary and sizes["head"] % 2:
        raise ImpossibleCut(f"rotary positions need an even head width, not {sizes['head']}")
    kept = check_blocks(layout, range(layout.layers) if blocks is None else blocks)
    parameters = []
    for parameter in layout.parameters:
        if parameter.block is None:
            parameters.append(parameter)
        elif parameter.block in kept:
            block = kept.index(parameter.block)
            inside = parameter.name.removeprefix(f"{family.blocks}.{parameter.block}.")
            parameters.append(replace(parameter, block=block, name=f"{family.blocks}.{block}.{inside}"))
    return Layout(family=family, layers=len(kept), sizes=sizes, parameters=tuple(parameters))


def check_blocks(layout: Layout, blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks to keep if the model can be cut to them."""
    kept = tuple(blocks)
    if not kept:
        raise ImpossibleCut(f"at least 1 of the {layout.layers} layers must be kept")
    if any(not 0 <= block < layout.layers for block in kept):
        raise ImpossibleCut(f"there is no such layer in {list(kept)}; use layers 0 to {layout.layers - 1}")
    if list(kept) != sorted(set(kept)):
        raise ImpossibleCut(f"the layers {list(kept)} must be in ascending order without duplicates")
    if layout.family.first_block_is_special and kept[0] != 0:
        raise ImpossibleCut(f"the first layer of a {layout.family.name} model can't be removed; keep layer 0")
    return kept
