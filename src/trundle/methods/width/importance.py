"""Which positions the sizes of `width` keep: importance measured on texts, and reordering a model by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.methods.contract import Context
from trundle.model.anatomy import Linear, Norm, terms
from trundle.model.encode import read_through
from trundle.model.layout import Layout, Parameter, layout_of
from trundle.model.nested import Select, Selection, narrow_cut
from trundle.model.surgery import Cut, Indices, transformer_of
from trundle.progress import SILENT, Progress

_Scores = NDArray[np.float64]
_Place = tuple[str, Any]
"""An axis and a block, or "hidden" and the name of a norm."""
_MEASURED_TEXTS = 512
"""Texts on which importance is measured."""


@dataclass(frozen=True, kw_only=True)
class _Orders:
    """For each block, the old position at each new position."""

    mlp: tuple[Indices, ...]
    values: tuple[tuple[Indices, ...], ...]
    """For each key-value head of a block."""
    matches: tuple[tuple[Indices, ...], ...] | None
    """The same for queries and keys; None if they can't be reordered."""


@dataclass(frozen=True, kw_only=True)
class _Importance:
    """Scores; higher is more important."""

    hidden: _Scores
    mlp: _Scores
    """(layers, neurons)"""
    values: _Scores
    """(layers, key-value heads, head width)"""
    matches: _Scores | None
    """The same for queries and keys; None if these can't be reordered."""

    def orders(self, heads: Sequence[Indices]) -> _Orders:
        """Put what matters most where the narrowest size keeps it; `heads`: each size's head dimensions."""
        priority = _by_priority(self.values.shape[-1], heads)

        def placed(ranking: Indices) -> Indices:
            found = dict(zip(priority, ranking, strict=True))
            return tuple(found[place] for place in range(len(priority)))

        def by_block(scores: _Scores) -> tuple[tuple[Indices, ...], ...]:
            return tuple(tuple(placed(_ranked(head)) for head in block) for block in scores)

        return _Orders(
            mlp=tuple(_ranked(block) for block in self.mlp),
            values=by_block(self.values),
            matches=None if self.matches is None else by_block(self.matches),
        )


def _ranked(scores: _Scores) -> Indices:
    return tuple(np.argsort(-scores, kind="stable").tolist())


def _measure_importance(
    model: SentenceTransformer, texts: Sequence[str], *, progress: Progress = SILENT
) -> _Importance:
    if not texts:
        raise BadInput("there are no texts to measure importance on; pass some with --data")
    backbone = transformer_of(model).model
    layout = layout_of(backbone)
    sums: dict[_Place, Tensor] = {}
    masks: list[Tensor] = []

    def add(key: _Place, states: Tensor) -> None:
        if states.shape[:-1] != masks[-1].shape:  # DeBERTa's distances
            return
        size = states[masks[-1]].float().abs().sum(dim=0).cpu().double()
        sums[key] = sums[key] + size if key in sums else size

    with _hooked(backbone, layout, add):
        read_through(model, texts, masks.append, label="importance", progress=progress)
    return _importance(backbone, layout, sums)


def _hooked(backbone: nn.Module, layout: Layout, add: Callable[[_Place, Tensor], None]) -> ExitStack:
    """Hooks on the norms along the hidden width and on the matrices inside blocks."""
    hooks = ExitStack()

    def watch(module: nn.Module, key: _Place, states: Callable[[Any, Tensor], Tensor]) -> None:
        hook = module.register_forward_hook(lambda _module, inputs, output: add(key, states(inputs, output)))
        hooks.enter_context(hook)

    def columns(first: int, size: int) -> Callable[[Any, Tensor], Tensor]:
        return lambda _inputs, output: output.narrow(-1, first, size)

    for parameter in layout.parameters:
        name, _, kind = parameter.name.rpartition(".")
        member, block, module = parameter.member, parameter.block, backbone.get_submodule(name)
        if kind != "weight":
            continue
        if isinstance(member, Norm) and member.along == "hidden":
            watch(module, ("hidden", name), lambda _inputs, output: output)
        if not isinstance(member, Linear) or block is None:
            continue
        if member.columns in ("mlp", "o"):
            watch(module, (member.columns, block), lambda inputs, _output: inputs[0])
        first = 0
        for axis in terms(member.rows):
            if axis in ("q", "k"):
                watch(module, (axis, block), columns(first, layout.sizes[axis]))
            first += layout.sizes[axis]
    return hooks


def _importance(backbone: nn.Module, layout: Layout, sums: dict[_Place, Tensor]) -> _Importance:
    """Neurons and value dimensions score their activation times the norm of the weights that read them."""
    blocks, kv_heads, head = range(layout.layers), layout.sizes["kv_heads"], layout.sizes["head"]
    norms: dict[tuple[str, int | None], Tensor] = {}
    weights = dict(backbone.named_parameters())
    for parameter in layout.parameters:
        member = parameter.member
        if isinstance(member, Linear) and parameter.multiplies and member.columns in ("mlp", "o"):
            across = 1 - parameter.axes.index(member.columns)
            norm = weights[parameter.name].detach().float().norm(dim=across)
            norms[member.columns, parameter.block] = norm.cpu()

    def by_head(activation: Tensor) -> Tensor:
        return activation.reshape(kv_heads, -1, head).sum(dim=1)

    matches = None
    if _may_reorder_matches(layout):
        pairs = [by_head(sums["q", block]) * by_head(sums["k", block]) for block in blocks]
        matches = torch.stack(pairs).numpy()
    hidden = [total / total.sum() for (axis, _), total in sums.items() if axis == "hidden"]
    return _Importance(
        hidden=torch.stack(hidden).sum(dim=0).numpy(),
        mlp=np.stack([(sums["mlp", block] * norms["mlp", block]).numpy() for block in blocks]),
        values=np.stack([by_head(sums["o", block] * norms["o", block]).numpy() for block in blocks]),
        matches=matches,
    )


def _may_reorder_matches(layout: Layout) -> bool:
    return not layout.family.rotary and all("head" not in parameter.axes for parameter in layout.parameters)


def _reordered(model: SentenceTransformer, orders: _Orders) -> SentenceTransformer:
    """A copy of the model with permuted neurons and head dimensions that returns the same vectors."""
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
                offset, places = 0, []
                for term in terms(axis):
                    places.append(offset + _places(term, parameter, layout, orders))
                    offset += layout.sizes[term]
                weight.copy_(weight.index_select(dimension, torch.cat(places).to(weight.device)))
    return twin


def _places(axis: str, parameter: Parameter, layout: Layout, orders: _Orders) -> Tensor:
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


def _cut_for(model: SentenceTransformer, width: Fraction, how: Selection) -> Cut:
    backbone = transformer_of(model).model
    return narrow_cut(layout_of(backbone), backbone.config, width, how)


def _prepare(
    model: SentenceTransformer, select: Select, widths: Sequence[Fraction], context: Context, *, mlp: bool
) -> tuple[SentenceTransformer, Selection]:
    """The model to take sizes from, reordered if `select` is `importance`, and how its sizes are selected."""
    if select != "importance":
        return model, Selection(select=select, mlp=mlp)
    if context.corpus is None:
        raise BadInput("importance is measured on texts; pass some with --data, or choose another select")
    texts = [text.text for text in context.corpus.sample_train(_MEASURED_TEXTS, context.seed)]
    found = _measure_importance(model, texts, progress=context.progress)
    how = Selection(select=select, mlp=mlp, hidden_order=_ranked(found.hidden))
    heads = [_cut_for(model, width, how).head or () for width in widths]
    return _reordered(model, found.orders(heads)), how


def _by_priority(size: int, selections: Sequence[Indices]) -> Indices:
    """Returns all positions, those of the narrowest selection first: the most important ones belong there."""
    narrowest_first = sorted(selections, key=len)
    ordered = dict.fromkeys(place for kept in narrowest_first for place in kept)
    return (*ordered, *(place for place in range(size) if place not in ordered))
