"""A narrow model inside a wide one: its weights are slices of the wide model's weights, taken at every call.

Along each axis a parameter consists of equal units (heads, MLPs, the hidden width), and a slice keeps the
same positions of every unit. The narrow model is built from the cut config, so that scales and rotary tables
are correct, and holds no weights: gradients flow into the wide model's parameters, which are the only ones.
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

from trundle.model import surgery
from trundle.model.anatomy import terms
from trundle.model.layout import Layout, Parameter, layout_of
from trundle.model.surgery import Cut, Indices, transformer_of

_UNITS = {"q": "head", "k": "head", "v": "head", "o": "head"}
"""Axes that consist of several units of another axis."""


@dataclass(frozen=True, kw_only=True)
class _AxisSlice:
    """What is kept along one dimension: the same positions of each of its equal units."""

    units: int
    size: int
    positions: slice | Tensor
    count: int


_Parts = dict[str, tuple[nn.Parameter, tuple[_AxisSlice, ...]]]
"""The parameters of the narrow model: the wide parameter that each is a slice of, and the slice."""


class _NarrowModel(nn.Module):
    """Takes a SentenceTransformer's features and returns the output of the extracted narrow model."""

    def __init__(self, wide: SentenceTransformer, what: Cut, own: Sequence[nn.Module] = ()) -> None:
        """`own`: modules after the shared ones that belong to this size alone, such as its linear map."""
        super().__init__()
        backbone = transformer_of(wide).model
        before = layout_of(backbone)
        small = surgery.unfilled_backbone(backbone, what.apply_to(before), what)
        nn.Module.to(_without_weights(small), backbone.device)
        twin = copy.copy(transformer_of(wide))
        twin._modules = dict(twin._modules)
        twin.model = small
        rest = [copy.deepcopy(module) for module in list(wide)[1:]]
        pooled = surgery.narrow_modules(rest, what.hidden or tuple(range(before.sizes["hidden"])))
        weights = dict(backbone.named_parameters())
        self._backbone_parts: _Parts = {
            parameter.name: (
                weights[parameter.name],
                tuple(_along(axis, parameter, before, what, wide.device) for axis in parameter.axes),
            )
            for parameter in before.parameters
        }
        # A function of tokens alone, so that it can be captured as a graph.
        inner = copy.copy(small)
        small.forward = lambda **inputs: functional_call(
            inner, _all_sliced(self._backbone_parts), kwargs=inputs
        )
        self._parts = _parts_after(wide, rest, pooled)
        self.body = surgery.with_modules(wide, [twin, *map(_without_weights, rest)])
        self.own = nn.ModuleList(own)
        self.to(backbone.device).train(backbone.training)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = functional_call(self.body, _all_sliced(self._parts), (features,))
        for module in self.own:
            outputs = module(outputs)
        return outputs


def _without_weights(module: nn.Module) -> nn.Module:
    for inner in module.modules():
        for name in inner._parameters:
            inner._parameters[name] = None
    return module


def _all_sliced(parts: _Parts) -> dict[str, Tensor]:
    return {name: _sliced(weight, kept) for name, (weight, kept) in parts.items()}


def _sliced(weight: Tensor, kept: tuple[_AxisSlice, ...]) -> Tensor:
    """A slice of a parameter in the narrow model's layout; a view if all positions are evenly spaced."""
    if all(one.count == one.size for one in kept):
        return weight
    part: Tensor = _SlicedParameter.apply(weight, kept)  # type: ignore[no-untyped-call]
    return part


class _SlicedParameter(torch.autograd.Function):
    """Slices a parameter; `backward` adds to the wide gradient in place, if there is one, to save memory."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kept: tuple[_AxisSlice, ...]) -> Tensor:
        ctx.weight, ctx.kept = weight, kept
        part = _in_units(weight, kept)[_slices(kept)]
        for dimension, positions in _scattered(kept):
            part = part.index_select(dimension, positions.to(weight.device))
        return part.reshape([one.units * one.count for one in kept])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        kept: tuple[_AxisSlice, ...] = ctx.kept
        collected: Tensor | None = ctx.weight.grad
        full = torch.zeros_like(ctx.weight) if collected is None else collected
        place = _in_units(full, kept)[_slices(kept)]
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
        return (full if collected is None else None), None


def _in_units(weight: Tensor, kept: tuple[_AxisSlice, ...]) -> Tensor:
    return weight.view([size for one in kept for size in (one.units, one.size)])


def _scattered(kept: tuple[_AxisSlice, ...]) -> list[tuple[int, Tensor]]:
    """The dimensions, counted in the unit view, whose positions are not evenly spaced."""
    places = enumerate(one.positions for one in kept)
    return [(2 * number + 1, positions) for number, positions in places if isinstance(positions, Tensor)]


def _slices(kept: tuple[_AxisSlice, ...]) -> tuple[slice, ...]:
    inner = [one.positions if isinstance(one.positions, slice) else slice(None) for one in kept]
    return tuple(piece for part in inner for piece in (slice(None), part))


def _positions(kept: Indices, device: torch.device) -> slice | Tensor:
    """Evenly spaced positions as a slice, which copies nothing; others as a tensor."""
    step = kept[1] - kept[0] if len(kept) > 1 else 1
    even = step > 0 and all(place == kept[0] + number * step for number, place in enumerate(kept))
    return slice(kept[0], kept[-1] + 1, step) if even else torch.tensor(kept, device=device)


def _along(axis: str, parameter: Parameter, layout: Layout, what: Cut, device: torch.device) -> _AxisSlice:
    """What a cut keeps along an axis; all terms of a fused axis consist of the same units."""
    unit = _UNITS.get(term := next(terms(axis)), term)
    size = layout.sizes[unit]
    mlp = None if what.mlp is None or parameter.block is None else what.mlp[parameter.block]
    chosen = {"hidden": what.hidden, "head": what.head, "mlp": mlp}.get(unit)
    return _AxisSlice(
        units=layout.size(axis) // size,
        size=size,
        positions=slice(None) if chosen is None else _positions(chosen, device),
        count=size if chosen is None else len(chosen),
    )


def _parts_after(wide: SentenceTransformer, narrow: Sequence[nn.Module], pooled: Tensor) -> _Parts:
    """The modules after the backbone: each dimension that is narrower is one along the pooled vector."""
    parts: _Parts = {}
    for number, (before, after) in enumerate(zip(list(wide)[1:], narrow, strict=True), start=1):
        sizes = {name: weight.shape for name, weight in after.named_parameters()}
        for name, weight in before.named_parameters():
            chosen = _positions(tuple(pooled.tolist()), weight.device)
            parts[f"{number}.{name}"] = (
                weight,
                tuple(
                    _AxisSlice(units=1, size=old, positions=slice(None) if old == new else chosen, count=new)
                    for old, new in zip(weight.shape, sizes[name], strict=True)
                ),
            )
    return parts
