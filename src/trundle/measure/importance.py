"""Which hidden dimensions, head dimensions and MLP neurons of a model matter, by what flows through them on texts.

One forward pass. A neuron or value dimension counts by how large it is on average, times the length of the weights that
read it; a query dimension by its size times that of the key dimension it is multiplied with; a hidden dimension by its
size after each norm, each norm counting the same. Padding counts for nothing, so it does not matter which texts are read together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.measure.reading import read_through
from trundle.model.anatomy import Conv1D, Linear, Norm, terms
from trundle.model.layout import Layout, layout_of
from trundle.model.reorder import Orders, may_reorder_matches
from trundle.model.selection import by_priority
from trundle.model.surgery import Indices, transformer_of
from trundle.progress import SILENT, Progress

Scores = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Importance:
    """Scores, the higher the more important."""

    hidden: Scores
    mlp: Scores
    """(layers, neurons)"""
    values: Scores
    """(layers, key-value heads, head width)"""
    matches: Scores | None
    """The same for queries and keys; None where these can't change places."""

    @property
    def hidden_order(self) -> Indices:
        """The hidden dimensions, the most important one first."""
        return ranked(self.hidden)

    def orders(self, heads: Sequence[Indices]) -> Orders:
        """An order in which the narrowest size finds the most important things; `heads` are the sizes' dimensions."""
        priority = by_priority(self.values.shape[-1], heads)

        def placed(scores: Scores) -> tuple[tuple[Indices, ...], ...]:
            return tuple(tuple(spread_out(ranked(head), priority) for head in block) for block in scores)

        return Orders(
            mlp=tuple(ranked(block) for block in self.mlp),
            values=placed(self.values),
            matches=None if self.matches is None else placed(self.matches),
        )


def ranked(scores: Scores) -> Indices:
    """Positions from the highest score to the lowest; equal ones stay in order."""
    return tuple(np.argsort(-scores, kind="stable").tolist())


def spread_out(ranking: Indices, priority: Indices) -> Indices:
    """Put the n-th of a ranking where the n-th place of a priority is."""
    placed = dict(zip(priority, ranking, strict=True))
    return tuple(placed[place] for place in range(len(priority)))


def measure_importance(
    model: SentenceTransformer, texts: Sequence[str], *, progress: Progress = SILENT
) -> Importance:
    """Run texts through a model and see how much flows where."""
    if not texts:
        raise BadInput("there are no texts to measure importance on; give some with --data")
    backbone = transformer_of(model).model
    layout = layout_of(backbone)
    flows = _Flows()
    hooks = _watch(backbone, layout, flows)
    try:
        read_through(model, texts, flows.tell, label="importance", progress=progress)
    finally:
        for hook in hooks:
            hook.remove()
    return _scores(backbone, layout, flows)


class _Flows:
    """Sums of sizes by what flows: (axis, block or name)."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, Any], Tensor] = {}
        self.real: Tensor | None = None
        """Which positions of the batch at hand, one text after the other, are tokens and not padding."""

    def tell(self, real: Tensor) -> None:
        """Which positions of the next batch count."""
        self.real = real

    def add(self, key: tuple[str, Any], states: Tensor) -> None:
        assert self.real is not None
        size = states.flatten(0, -2)[self.real].float().abs().sum(dim=0).cpu().double()
        self.sums[key] = self.sums[key] + size if key in self.sums else size


def _watch(backbone: nn.Module, layout: Layout, flows: _Flows) -> list[Any]:
    """Hooks at the norms of the hidden width and at the matrices inside blocks."""

    def norms(key: tuple[str, Any]) -> Callable[[Any, Any, Any], None]:
        return lambda _module, _inputs, output: flows.add(key, output)

    def inputs(key: tuple[str, Any]) -> Callable[[Any, Any], None]:
        return lambda _module, arguments: flows.add(key, arguments[0])

    def outputs(axes: Sequence[str], block: int) -> Callable[[Any, Any, Any], None]:
        sizes = [layout.sizes[axis] for axis in axes]

        def watch(_module: Any, _inputs: Any, output: Tensor) -> None:
            for axis, part in zip(axes, torch.split(output, sizes, dim=-1), strict=True):
                if axis in ("q", "k"):
                    flows.add((axis, block), part)

        return watch

    hooks: list[Any] = []
    for parameter in layout.parameters:
        name, _, kind = parameter.name.rpartition(".")
        member, module = parameter.member, backbone.get_submodule(name)
        if kind != "weight":
            continue
        if isinstance(member, Norm) and member.along == "hidden":
            hooks.append(module.register_forward_hook(norms(("hidden", name))))
        if not isinstance(member, Linear | Conv1D) or parameter.block is None:
            continue
        if member.columns in ("mlp", "o"):
            hooks.append(module.register_forward_pre_hook(inputs((member.columns, parameter.block))))
        if "q" in (axes := tuple(terms(member.rows))) or "k" in axes:
            hooks.append(module.register_forward_hook(outputs(axes, parameter.block)))
    return hooks


def _scores(backbone: nn.Module, layout: Layout, flows: _Flows) -> Importance:
    sizes, blocks = layout.sizes, range(layout.layers)
    readers: dict[tuple[str, int | None], Tensor] = {}
    weights = dict(backbone.named_parameters())
    for parameter in layout.parameters:
        member = parameter.member
        if (
            isinstance(member, Linear | Conv1D)
            and len(parameter.axes) == 2
            and member.columns in ("mlp", "o")
        ):
            across = 1 - parameter.axes.index(member.columns)
            length = weights[parameter.name].detach().float().norm(dim=across)
            readers[member.columns, parameter.block] = length.cpu()
    kv_heads, head = sizes["kv_heads"], sizes["head"]

    def by_head(flow: Tensor) -> Tensor:
        """Sums over the heads that share a key-value head."""
        return flow.reshape(kv_heads, -1, head).sum(dim=1)

    matches = None
    if may_reorder_matches(layout):
        matches = np.stack(
            [(by_head(flows.sums["q", block]) * by_head(flows.sums["k", block])).numpy() for block in blocks]
        )
    norms = [flow / flow.sum() for (axis, _), flow in flows.sums.items() if axis == "hidden"]
    return Importance(
        hidden=torch.stack(norms).sum(dim=0).numpy(),
        mlp=np.stack([(flows.sums["mlp", block] * readers["mlp", block]).numpy() for block in blocks]),
        values=np.stack([by_head(flows.sums["o", block] * readers["o", block]).numpy() for block in blocks]),
        matches=matches,
    )
