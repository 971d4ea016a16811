"""A backbone with the insides of its blocks put in another order, so that it computes exactly the same.

What can be reordered without a trace: the neurons of an MLP; the value dimensions of a key-value head, with the columns
of the output matrix that read them; and, where positions are not rotary and heads have no norm of their own, the query
and key dimensions of a head. The hidden width is not touched: reordering it would reorder the model's vectors.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.model.anatomy import terms
from trundle.model.layout import Layout, Parameter, layout_of
from trundle.model.surgery import Indices, transformer_of


@dataclass(frozen=True, kw_only=True)
class Orders:
    """For each block, which old position comes at each new one."""

    mlp: tuple[Indices, ...]
    values: tuple[tuple[Indices, ...], ...]
    """For each key-value head of a block."""
    matches: tuple[tuple[Indices, ...], ...] | None
    """The same for queries and keys; None where they must stay."""


def may_reorder_matches(layout: Layout) -> bool:
    """Whether query and key dimensions of a head can change places."""
    return not layout.family.rotary and all("head" not in parameter.axes for parameter in layout.parameters)


def reordered(model: SentenceTransformer, orders: Orders) -> SentenceTransformer:
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


def _places(axis: str, parameter: Parameter, layout: Layout, orders: Orders) -> list[Tensor]:
    offset, found = 0, []
    for term in terms(axis):
        found.append(offset + _plain_places(term, parameter, layout, orders))
        offset += layout.sizes[term]
    return found


def _plain_places(axis: str, parameter: Parameter, layout: Layout, orders: Orders) -> Tensor:
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
