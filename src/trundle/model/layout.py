"""A model's parameters laid out along named axes: the anatomy row applied to one model.

What this is not: it holds no weights. Sizes before and after a cut are arithmetic on layouts, so a plan can say what it
would save without building anything, and surgery can check that it did exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from trundle.errors import BadModel, ImpossibleCut
from trundle.model.anatomy import _Axes, _Family, _Member, _Part, _Table, family_of, terms


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: where it is, what it is part of, and the axes it lies along."""

    name: str
    block: int | None
    member: _Member
    axes: _Axes
    itemsize: int

    @property
    def part(self) -> _Part:
        """Which part of the model it is counted under."""
        return self.member.part

    @property
    def multiplies(self) -> bool:
        """Whether a token is multiplied with it (a matrix), rather than looked up in it or scaled by it."""
        return len(self.axes) == 2 and not isinstance(self.member, _Table)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every parameter of a backbone and the length of every axis."""

    family: _Family
    layers: int
    sizes: Mapping[str, int]
    parameters: tuple[Parameter, ...]

    def size(self, axis: str) -> int:
        """The length of a plain or fused axis."""
        return sum(self.sizes[term] for term in terms(axis))

    def shape(self, parameter: Parameter) -> tuple[int, ...]:
        """The shape a parameter has in this layout."""
        return tuple(self.size(axis) for axis in parameter.axes)

    def numel(self, parameter: Parameter) -> int:
        """How many weights a parameter holds in this layout."""
        return math.prod(self.shape(parameter))


def _read_sizes(family: _Family, config: PreTrainedConfig) -> dict[str, int]:
    """The length of every axis, as the config tells it."""
    hidden, heads = int(getattr(config, family.hidden)), int(getattr(config, family.heads))
    kv_heads = int(getattr(config, family.kv_heads)) if family.kv_heads else heads
    head = (getattr(config, family.head, None) if family.head else None) or hidden // heads
    sizes = {
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "head": int(head),
        "mlp": int(getattr(config, family.mlp) or 4 * hidden),
        "vocab": int(getattr(config, family.vocab)),
    }
    if family.position:
        sizes["position"] = int(getattr(config, family.position))
    sizes |= {axis: int(getattr(config, entry)) for axis, entry in family.extra_axes.items()}
    return _with_products(sizes)


def _with_products(sizes: Mapping[str, int]) -> dict[str, int]:
    queries, keys = sizes["heads"] * sizes["head"], sizes["kv_heads"] * sizes["head"]
    return {**sizes, "q": queries, "o": queries, "k": keys, "v": keys}


def layout_of(backbone: PreTrainedModel) -> Layout:
    """Lay out a backbone, and check the row against its real shapes."""
    family = family_of(backbone.config.model_type)
    layers = int(getattr(backbone.config, family.layers))
    found: list[Parameter] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in backbone.named_parameters():
        shapes[name] = tuple(weight.shape)
        found.append(_place(family, name, weight))
    layout = Layout(
        family=family, layers=layers, sizes=_read_sizes(family, backbone.config), parameters=tuple(found)
    )
    for parameter in found:
        if layout.shape(parameter) != shapes[parameter.name]:
            raise BadModel(
                f"{parameter.name} has shape {shapes[parameter.name]} where the {family.name} row and the config say "
                f"{layout.shape(parameter)}; the config does not describe these weights, so fetch the model again"
            )
    return layout


def _place(family: _Family, name: str, weight: nn.Parameter) -> Parameter:
    module, _, kind = name.rpartition(".")
    block: int | None = None
    table: Mapping[str, _Member] = family.outside
    if module.startswith(f"{family.blocks}."):
        index, _, module = module.removeprefix(f"{family.blocks}.").partition(".")
        block, table = int(index), family.inside
    if module not in table:
        raise BadModel(
            f"the {family.name} row of the anatomy does not cover the parameter {name}; "
            "add it to the row in trundle/model/anatomy.py, or use a model without it"
        )
    member = table[module]
    return Parameter(
        name=name, block=block, member=member, axes=member.axes(kind), itemsize=weight.element_size()
    )


def _shrunk(
    layout: Layout,
    *,
    blocks: Sequence[int] | None = None,
    hidden: int | None = None,
    head: int | None = None,
    mlp: int | None = None,
    vocab: int | None = None,
) -> Layout:
    """The layout after a cut to these counts, checked for what the family's config can express."""
    family = layout.family
    wanted = {"hidden": hidden, "head": head, "mlp": mlp, "vocab": vocab}
    sizes = dict(layout.sizes)
    for axis, count in wanted.items():
        if count is None:
            continue
        if not 1 <= count <= sizes[axis]:
            raise ImpossibleCut(
                f"{count} of {sizes[axis]} can't be kept along {axis!r}; give 1 to {sizes[axis]}"
            )
        sizes[axis] = count
    sizes = _with_products(sizes)
    if family.head is None and sizes["q"] != sizes["hidden"]:
        raise ImpossibleCut(
            f"a {family.name} config has no entry for the head width, so hidden width {sizes['hidden']} must equal "
            f"{sizes['heads']} heads × {sizes['head']}; cut hidden and head widths by the same share"
        )
    if family.rotary and sizes["head"] % 2:
        raise ImpossibleCut(
            f"rotary positions turn pairs, and head width {sizes['head']} is odd; keep an even number"
        )
    kept = check_blocks(layout, range(layout.layers) if blocks is None else blocks)
    position = {old: new for new, old in enumerate(kept)}
    parameters = tuple(
        parameter if parameter.block is None else _moved(family, parameter, position[parameter.block])
        for parameter in layout.parameters
        if parameter.block is None or parameter.block in position
    )
    return Layout(family=family, layers=len(kept), sizes=sizes, parameters=parameters)


def _moved(family: _Family, parameter: Parameter, block: int) -> Parameter:
    inside = parameter.name.removeprefix(f"{family.blocks}.{parameter.block}.")
    return replace(parameter, block=block, name=f"{family.blocks}.{block}.{inside}")


def check_blocks(layout: Layout, blocks: Sequence[int]) -> tuple[int, ...]:
    """The blocks to keep, if the model can do with them."""
    kept = tuple(blocks)
    if not kept:
        raise ImpossibleCut(f"at least 1 of the {layout.layers} layers must be kept")
    if any(not 0 <= block < layout.layers for block in kept):
        raise ImpossibleCut(
            f"the model has layers 0 to {layout.layers - 1}, not all of {list(kept)}; choose among those"
        )
    if list(kept) != sorted(set(kept)):
        raise ImpossibleCut(f"the layers {list(kept)} must be in rising order, each named once")
    if layout.family.first_block_is_special and kept[0] != 0:
        raise ImpossibleCut(
            f"the first layer of a {layout.family.name} model is built unlike the others; keep layer 0"
        )
    return kept


def block_matrices(layout: Layout) -> tuple[tuple[str, _Member], ...]:
    """Every linear map of attention and MLP inside the blocks, by the name of its module."""
    return tuple(
        (parameter.name.removesuffix(".weight"), parameter.member)
        for parameter in layout.parameters
        if parameter.block is not None and parameter.multiplies
    )
