"""The sizes of `width`: which positions they keep, their linear maps in closed form, and taking one out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.data.sampling import sample
from trundle.errors import BadInput
from trundle.methods.align import AlignOptions
from trundle.methods.align.ridge import fit_ridge
from trundle.methods.align.teacher_vectors import RIDGE_TEXTS, targets_for
from trundle.methods.contract import Context
from trundle.methods.width.narrow import _may_reorder_matches, _Orders, _reordered
from trundle.model import surgery
from trundle.model.anatomy import Conv1D, Linear, Norm, terms
from trundle.model.encode import embedder, read_through
from trundle.model.heads import reinitialised, with_linear_head, without_head
from trundle.model.layout import Layout, layout_of
from trundle.model.load import nested_in
from trundle.model.nested import Map, Selection, at_width, by_priority, narrow_cut
from trundle.model.surgery import Indices, transformer_of
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import encode_by_role
from trundle.teacher.teacher import original_teacher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trundle.methods.width import WidthPlan
    from trundle.model.nested import Select
    from trundle.model.surgery import Cut
    from trundle.teacher.targets import Targets

_Scores = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class _Importance:
    """Scores, the higher the more important."""

    hidden: _Scores
    mlp: _Scores
    """(layers, neurons)"""
    values: _Scores
    """(layers, key-value heads, head width)"""
    matches: _Scores | None
    """The same for queries and keys; None where these can't change places."""

    @property
    def hidden_order(self) -> Indices:
        """The hidden dimensions, the most important one first."""
        return _ranked(self.hidden)

    def orders(self, heads: Sequence[Indices]) -> _Orders:
        """An order in which the narrowest size finds the most important things; `heads` are the sizes' dimensions."""
        priority = by_priority(self.values.shape[-1], heads)

        def placed(scores: _Scores) -> tuple[tuple[Indices, ...], ...]:
            return tuple(tuple(_spread_out(_ranked(head), priority) for head in block) for block in scores)

        return _Orders(
            mlp=tuple(_ranked(block) for block in self.mlp),
            values=placed(self.values),
            matches=None if self.matches is None else placed(self.matches),
        )


def _ranked(scores: _Scores) -> Indices:
    """Positions from the highest score to the lowest; equal ones stay in order."""
    return tuple(np.argsort(-scores, kind="stable").tolist())


def _spread_out(ranking: Indices, priority: Indices) -> Indices:
    """Put the n-th of a ranking where the n-th place of a priority is."""
    placed = dict(zip(priority, ranking, strict=True))
    return tuple(placed[place] for place in range(len(priority)))


def _measure_importance(
    model: SentenceTransformer, texts: Sequence[str], *, progress: Progress = SILENT
) -> _Importance:
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


def _scores(backbone: nn.Module, layout: Layout, flows: _Flows) -> _Importance:
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
    if _may_reorder_matches(layout):
        matches = np.stack(
            [(by_head(flows.sums["q", block]) * by_head(flows.sums["k", block])).numpy() for block in blocks]
        )
    norms = [flow / flow.sum() for (axis, _), flow in flows.sums.items() if axis == "hidden"]
    return _Importance(
        hidden=torch.stack(norms).sum(dim=0).numpy(),
        mlp=np.stack([(flows.sums["mlp", block] * readers["mlp", block]).numpy() for block in blocks]),
        values=np.stack([by_head(flows.sums["o", block] * readers["o", block]).numpy() for block in blocks]),
        matches=matches,
    )


_MEASURED_TEXTS = 512
"""Texts on which importance is measured."""


def _cut_for(model: SentenceTransformer, width: Fraction, how: Selection) -> Cut:
    """What a size keeps."""
    backbone = transformer_of(model).model
    return narrow_cut(layout_of(backbone), backbone.config, width, how)


def _made_ready(
    model: SentenceTransformer, select: Select, widths: Sequence[Fraction], context: Context, *, mlp: bool
) -> tuple[SentenceTransformer, Selection]:
    """A model to take sizes from, and how: with `importance` its neurons and head dimensions are put in order first."""
    if select != "importance":
        return model, Selection(select=select, mlp=mlp)
    if context.corpus is None:
        raise BadInput("importance is measured on texts; give some with --data, or choose another select")
    texts = [text.text for text in sample(context.corpus.train(), _MEASURED_TEXTS, seed=context.seed)]
    found = _measure_importance(model, texts, progress=context.progress)
    how = Selection(select=select, mlp=mlp, hidden_order=found.hidden_order)
    heads = [_cut_for(model, width, how).head or () for width in widths]
    return _reordered(model, found.orders(heads)), how


def _fitted_map(wide: SentenceTransformer, cut: Cut, targets: Targets, context: Context) -> tuple[Map, float]:
    """A size's linear map into the targets' space in closed form, and how near it comes on texts it was not fitted on."""
    small = surgery.cut(without_head(wide), cut)
    positions = sample(range(len(targets)), RIDGE_TEXTS, seed=context.seed)
    pooled = embedder(small, name=f"width {len(cut.hidden or ())}", progress=context.progress)
    inputs = encode_by_role(pooled, targets.chosen(positions))
    found = fit_ridge(inputs, targets.vectors(positions), seed=context.seed)
    return Map(weight=found.weight, bias=found.bias), found.held_out_cosine


def _taken_out(model: SentenceTransformer, plan: WidthPlan, context: Context) -> SentenceTransformer:
    """The size that a plan without training asks for."""
    width = plan.result
    nested = None if context.source is None else nested_in(context.source)
    if width == 1:
        return model
    if plan.trained:
        assert nested is not None
        return at_width(model, width, nested.selection, nested)
    if nested is not None and nested.selection.select == plan.select:
        wide, how = model, replace(nested.selection, mlp=plan.mlp)
    else:
        wide, how = _made_ready(model, plan.select, plan.widths, context, mlp=plan.mlp)
    if plan.options.start == "random":
        return reinitialised(at_width(wide, width, how), seed=context.seed)
    if not plan.mapped:
        return at_width(wide, width, how)
    teacher = original_teacher(context)
    targets, _ = targets_for(
        teacher, AlignOptions(steps=0, texts=plan.options.texts, augment=plan.options.augment), context
    )
    linear, _ = _fitted_map(wide, _cut_for(wide, width, how), targets, context)
    small = at_width(wide, width, how)
    return with_linear_head(small, linear.weight, linear.bias, normalise=teacher.normalises)
