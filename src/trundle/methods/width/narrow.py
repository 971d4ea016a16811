"""A narrow model inside a wide one: its weights are parts of the wide model's, taken anew at every call.

What a part is follows from the anatomy: along each axis a parameter is a row of equal units (heads, MLPs, the hidden
width), and the same positions are kept of every unit. The narrow model itself is built from the cut config and holds no
weights, so whatever a constructor derives from its config (scales, rotary tables) is right, and what it computes is
what the extracted model computes. Gradients flow into the wide model's parameters, the only ones there are.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from torch.func import functional_call

from trundle.model.anatomy import terms
from trundle.model.layout import Layout, Parameter, layout_of
from trundle.model.surgery import (
    Cut,
    Indices,
    narrow_modules,
    transformer_of,
    unfilled_backbone,
    with_modules,
)

_UNITS = {"q": "head", "k": "head", "v": "head", "o": "head"}
"""Axes that are several units of another one."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """What is kept along one dimension: the same positions of each of its equal units."""

    units: int
    size: int
    positions: slice | Tensor
    count: int


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A parameter of the narrow model: its name there, the wide parameter it is part of, and which part."""

    name: str
    weight: nn.Parameter
    kept: tuple[_Kept, ...]


class _NarrowModel(nn.Module):
    """A SentenceTransformer's narrow twin: takes features and gives what the extracted model would give."""

    def __init__(self, wide: SentenceTransformer, what: Cut, own: Sequence[nn.Module] = ()) -> None:
        """`own` are modules after the shared ones that belong to this size alone, such as its linear map."""
        super().__init__()
        backbone = transformer_of(wide).model
        before = layout_of(backbone)
        small = unfilled_backbone(backbone, what.apply_to(before), what)
        nn.Module.to(_without_weights(small), backbone.device)
        twin = copy.copy(transformer_of(wide))
        twin._modules = dict(twin._modules)
        twin.model = small
        rest = [copy.deepcopy(module) for module in list(wide)[1:]]
        pooled = narrow_modules(rest, what.hidden or tuple(range(before.sizes["hidden"])))
        self._parts = (*_backbone_parts(wide, before, what), *_parts_after(wide, rest, pooled))
        self.body = with_modules(wide, [twin, *map(_without_weights, rest)])
        self.own = nn.ModuleList(own)
        self.to(backbone.device).train(backbone.training)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """The features with the narrow model's `sentence_embedding` among them."""
        weights = {part.name: _taken(part.weight, part.kept) for part in self._parts}
        outputs: dict[str, Any] = functional_call(self.body, weights, (features,))
        for module in self.own:
            outputs = module(outputs)
        return outputs


def _taken(weight: Tensor, kept: tuple[_Kept, ...]) -> Tensor:
    """A part of a parameter, laid out as the narrow model has it: a view of it wherever strides can say which part."""
    if all(one.count == one.size for one in kept):
        return weight
    part: Tensor = _Taken.apply(weight, kept)  # type: ignore[no-untyped-call]
    return part


class _Taken(torch.autograd.Function):
    """Takes a part and gives its gradient back.

    Where the wide parameter has a gradient already, the part's is added to it in its place: nothing of full size is made
    for it. That is what returning it would come to, so long as gradients are collected by `backward()`.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: tuple[_Kept, ...]) -> Tensor:
        ctx.weight, ctx.kept = weight, kept
        part = _in_units(weight, kept)[_slices(kept)]
        for dimension, positions in _scattered(kept):
            part = part.index_select(dimension, positions.to(weight.device))
        return part.reshape([one.units * one.count for one in kept])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        kept: tuple[_Kept, ...] = ctx.kept
        collected: Tensor | None = ctx.weight.grad
        whole = torch.zeros_like(ctx.weight) if collected is None else collected
        place = _in_units(whole, kept)[_slices(kept)]
        part = gradient.reshape([size for one in kept for size in (one.units, one.count)])
        scattered = _scattered(kept)
        for dimension, positions in scattered[1:]:
            shape = [*part.shape[:dimension], place.shape[dimension], *part.shape[dimension + 1 :]]
            part = part.new_zeros(shape).index_copy_(dimension, positions.to(part.device), part)
        if scattered:
            dimension, positions = scattered[0]
            place.index_add_(dimension, positions.to(part.device), part)
        else:
            place.add_(part)
        return (whole if collected is None else None), None


def _in_units(weight: Tensor, kept: tuple[_Kept, ...]) -> Tensor:
    return weight.view([size for one in kept for size in (one.units, one.size)])


def _scattered(kept: tuple[_Kept, ...]) -> list[tuple[int, Tensor]]:
    """The dimensions, in units, along which positions follow no rule."""
    return [
        (2 * number + 1, one.positions)
        for number, one in enumerate(kept)
        if isinstance(one.positions, Tensor)
    ]


def _slices(kept: tuple[_Kept, ...]) -> tuple[slice, ...]:
    everything = slice(None)
    return tuple(
        piece
        for one in kept
        for piece in (everything, one.positions if isinstance(one.positions, slice) else everything)
    )


def _positions(kept: Indices, size: int, device: torch.device) -> slice | Tensor:
    """Evenly spaced positions as a slice, which costs nothing; others as they are."""
    step = kept[1] - kept[0] if len(kept) > 1 else 1
    even = step > 0 and all(place == kept[0] + number * step for number, place in enumerate(kept))
    return slice(kept[0], min(size, kept[-1] + 1), step) if even else torch.tensor(kept, device=device)


def _backbone_parts(wide: SentenceTransformer, layout: Layout, what: Cut) -> list[_Part]:
    weights = dict(transformer_of(wide).model.named_parameters())
    return [
        _Part(
            name=f"0.model.{parameter.name}",
            weight=weights[parameter.name],
            kept=tuple(_along(axis, parameter, layout, what, wide.device) for axis in parameter.axes),
        )
        for parameter in layout.parameters
    ]


def _along(axis: str, parameter: Parameter, layout: Layout, what: Cut, device: torch.device) -> _Kept:
    """What a cut keeps along an axis; all terms of a fused axis are made of the same units."""
    unit = _UNITS.get(term := next(terms(axis)), term)
    size = layout.sizes[unit]
    mlp = None if what.mlp is None or parameter.block is None else what.mlp[parameter.block]
    chosen = {"hidden": what.hidden, "head": what.head, "mlp": mlp}.get(unit)
    positions = slice(None) if chosen is None else _positions(chosen, size, device)
    return _Kept(
        units=layout.size(axis) // size,
        size=size,
        positions=positions,
        count=size if chosen is None else len(chosen),
    )


def _parts_after(wide: SentenceTransformer, narrow: Sequence[nn.Module], pooled: Tensor) -> list[_Part]:
    """The modules after the backbone: what got narrower got so along the pooled vector."""
    parts = []
    for number, (before, after) in enumerate(zip(list(wide)[1:], narrow, strict=True), start=1):
        sizes = {name: weight.shape for name, weight in after.named_parameters()}
        for name, weight in before.named_parameters():
            kept = tuple(
                _Kept(
                    units=1,
                    size=old,
                    positions=slice(None)
                    if old == new
                    else _positions(tuple(pooled.tolist()), old, weight.device),
                    count=new,
                )
                for old, new in zip(weight.shape, sizes[name], strict=True)
            )
            parts.append(_Part(name=f"{number}.{name}", weight=weight, kept=kept))
    return parts


def _without_weights(module: nn.Module) -> nn.Module:
    """The module with a gap in the place of each parameter."""
    for inner in module.modules():
        for name in inner._parameters:
            inner._parameters[name] = None
    return module


@dataclass(frozen=True, kw_only=True)
class _Orders:
    """For each block, which old position comes at each new one."""

    mlp: tuple[Indices, ...]
    values: tuple[tuple[Indices, ...], ...]
    """For each key-value head of a block."""
    matches: tuple[tuple[Indices, ...], ...] | None
    """The same for queries and keys; None where they must stay."""


def _may_reorder_matches(layout: Layout) -> bool:
    """Whether query and key dimensions of a head can change places."""
    return not layout.family.rotary and all("head" not in parameter.axes for parameter in layout.parameters)


def _reordered(model: SentenceTransformer, orders: _Orders) -> SentenceTransformer:
    """A copy of the model that gives the same vectors."""
    twin = copy.deepcopy(model)
    backbone = transformer_of(twin).model
    layout = layout_of(backbone)
    weights = dict(backbone.named_parameters())
    with torch.no_grad():
        for parameter in layout.parameters:
            if parameter.block is None:
                continue
            weight = weights[parameter.name]
            for dimension, axis in enumerate(parameter.axes):
                places = torch.cat(_places(axis, parameter, layout, orders))
                weight.copy_(weight.index_select(dimension, places.to(weight.device)))
    return twin


def _places(axis: str, parameter: Parameter, layout: Layout, orders: _Orders) -> list[Tensor]:
    offset, found = 0, []
    for term in terms(axis):
        found.append(offset + _plain_places(term, parameter, layout, orders))
        offset += layout.sizes[term]
    return found


def _plain_places(axis: str, parameter: Parameter, layout: Layout, orders: _Orders) -> Tensor:
    assert parameter.block is not None
    if axis == "mlp":
        return torch.tensor(orders.mlp[parameter.block])
    heads = orders.values if axis in ("v", "o") else orders.matches if axis in ("q", "k") else None
    if heads is None:
        return torch.arange(layout.sizes[axis])
    inner = torch.tensor(heads[parameter.block])
    if axis in ("q", "o"):
        inner = inner.repeat_interleave(layout.sizes["heads"] // layout.sizes["kv_heads"], dim=0)
    starts = torch.arange(len(inner)) * layout.sizes["head"]
    return (starts[:, None] + inner).flatten()
