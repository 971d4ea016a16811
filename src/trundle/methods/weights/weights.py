"""How `weights` plans and changes a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.weights import WeightsOptions, WeightsPlan, _selection_of, pruning, samples
from trundle.methods.weights.samples import _make_evaluator, _Name, _SampleSource
from trundle.model import surgery
from trundle.model.cost import Cost, cost, predict
from trundle.model.encode import read_through
from trundle.model.heads import copy_of
from trundle.model.layout import Layout, layout_of
from trundle.model.matrices import has_bias, is_pruned, prunable, put_map, weight_of, with_zeros
from trundle.model.surgery import Cut, transformer_of
from trundle.progress import SILENT, Progress
from trundle.records import WEIGHTS_FILE

_HALF = Fraction(1, 2)
_RIDGE = 1e-4
"""Relative to the mean moment: makes the system solvable when two neurons never differ."""
_MOST_BYTES = 1 << 31
"""Memory for the moments that are measured in one pass."""


def plan(model: SentenceTransformer, options: WeightsOptions, context: Context) -> WeightsPlan:
    """Count what will be removed, and read the first samples of both sources."""
    layout = layout_of(transformer_of(model).model)
    matrices = prunable(layout, attention=options.attention)
    share = _share(options, layout)
    sizes = [(layout.size(matrix.rows), layout.size(matrix.columns)) for matrix in matrices]
    weights = sum(rows * columns for rows, columns in sizes)
    if share == 0:
        return WeightsPlan(options=options, zeros=0, weights=weights)
    sources = _open_sources(options, context)
    if len(sources) == 2 and samples._same_data(*sources):
        context.progress.say("domain and general are the same data: every alignment is 1")
    if options.structure == "neuron":
        of = layout.sizes["mlp"]
        left = of - pruning._how_many(of, share)
        return WeightsPlan(options=options, zeros=0, weights=weights, neurons=left, of=of)
    if options.structure == "2:4":
        odd = [matrix.name for matrix, (_, columns) in zip(matrices, sizes, strict=True) if columns % 4]
        if odd:
            raise ImpossibleCut(f"the row length of {odd[0]} is not a multiple of 4; use another structure")
        return WeightsPlan(options=options, zeros=weights // 2, weights=weights)
    each = [(1, rows * columns) for rows, columns in sizes]
    groups = {"global": [(1, weights)], "tensor": each, "row": sizes}[_selection_of(options)]
    zeros = sum(count * pruning._how_many(size, share) for count, size in groups)
    return WeightsPlan(options=options, zeros=zeros, weights=weights)


def _share(options: WeightsOptions, layout: Layout) -> Fraction:
    """The share to remove; rejects options that contradict each other."""
    share = options.sparsity
    if share is None:
        if options.structure != "2:4":
            raise ImpossibleCut("choose the share of weights to remove with sparsity, such as 50%")
        share = _HALF
    if not 0 <= share < 1:
        raise ImpossibleCut(f"sparsity must be at least 0 and under 1, such as 50%, not {share}")
    if options.structure == "2:4" and share not in (0, _HALF):
        raise ImpossibleCut("2:4 removes two of each four weights, which is 50%; leave sparsity out")
    if options.structure == "2:4" and options.selection is not None:
        raise ImpossibleCut("2:4 compares four weights at a time; leave selection out")
    if options.structure == "neuron":
        if options.attention:
            raise ImpossibleCut("only MLPs have neurons; leave attention out, or prune single weights")
        if options.selection is not None:
            raise ImpossibleCut(f"{layout.family.name} has one MLP width for all layers; leave selection out")
    return share


def _open_sources(options: WeightsOptions, context: Context) -> list[_SampleSource]:
    """The sources that the method needs, and others that were passed for evaluation."""
    files: dict[_Name, str | None] = {"domain": options.domain, "general": options.general}
    return [
        samples._open_source(name, file, context)
        for name, file in files.items()
        if name in pruning._SOURCES_OF[options.method] or file is not None
    ]


def forecast(model: SentenceTransformer, plan: WeightsPlan) -> Cost:
    """Return the cost of the result: removed neurons save memory and time, zeros do not."""
    return cost(model) if plan.neurons is None else predict(model, mlp=plan.neurons)


def apply(model: SentenceTransformer, plan: WeightsPlan, context: Context) -> Applied:
    """Score the weights, choose, and zero or cut."""
    options = plan.options
    if not plan.zeros and plan.neurons == plan.of:
        return Applied(model=surgery.cut(model, Cut()))
    sources = _open_sources(options, context)
    scored = pruning._score_weights(model, options, {source.name: source for source in sources}, context)
    if plan.neurons is not None:
        kept = [pruning._best_neurons(scores, plan.neurons) for scores in pruning._neurons_by_layer(scored)]
        small = surgery.cut(model, Cut(mlp=tuple(kept)))
        # A reconstructed matrix would lose the zeros of an earlier pruning.
        reconstructs = options.take_over and not is_pruned(model)
        texts = samples._reconstruction_texts(sources, context) if reconstructs else []
        if texts:
            _reconstruct(model, small, kept, texts, context)
        left = {name: score.numel() * plan.neurons // (plan.of or 1) for name, score in scored.scores.items()}
        facts: dict[str, Any] = {"neurons": plan.neurons, "of": plan.of, "taken_over_on": len(texts)}
    else:
        scores = pruning._zeros_first(model, scored)
        if options.structure == "2:4":
            removed = {name: pruning._two_of_four(score) for name, score in scores.items()}
        else:
            removed = pruning._choose(scores, options.sparsity or _HALF, _selection_of(options))
        small = copy_of(model)
        with_zeros(small, removed)
        left = {name: int((~mask).sum()) for name, mask in removed.items()}
        zeros = plan.weights - sum(left.values())
        facts = {"zeros": zeros, "weights": plan.weights, "sparsity": round(zeros / plan.weights, 6)}
    weight_map = pruning._weight_map(str(plan), scored, left)
    if weight_map.alignment is not None:
        kinds = ("shared", "specific", "conflicting")
        facts["alignment"] = {kind: getattr(weight_map.alignment, kind) for kind in kinds}
    return Applied(
        model=small,
        facts=facts | scored.facts,
        evaluator=_make_evaluator(sources, context),
        files={WEIGHTS_FILE: weight_map.as_text()},
    )


def reopen(applied: Applied, plan: WeightsPlan, context: Context) -> Applied:
    """Restore the evaluator of a stored result."""
    if not plan.zeros and plan.neurons == plan.of:
        return applied
    return replace(applied, evaluator=_make_evaluator(_open_sources(plan.options, context), context))


def _reconstruct(
    model: SentenceTransformer,
    small: SentenceTransformer,
    kept: Sequence[Sequence[int]],
    texts: Sequence[str],
    context: Context,
) -> None:
    """Fit the output matrices of the cut model's MLPs by least squares; `kept`: its neurons by layer."""
    large, cut = transformer_of(model).model, transformer_of(small).model
    readers = {matrix.name: matrix for matrix in prunable(layout_of(large)) if matrix.columns == "mlp"}
    for name, moments in _measure_moments(model, texts, tuple(readers), progress=context.progress):
        matrix = readers[name]
        shifts = has_bias(large, matrix)
        fitted = _least_squares(weight_of(large, matrix), moments, kept[matrix.block], shifts=shifts)
        put_map(cut, matrix, *fitted)


def _least_squares(
    weight: Tensor, moments: Tensor, kept: Sequence[int], *, shifts: bool
) -> tuple[Tensor, Tensor]:
    """The weight for the kept inputs, as (out, in), and what is added to the bias (zero without `shifts`)."""
    ones = moments.shape[0] - 1
    inputs = torch.tensor([*kept, ones] if shifts else kept, device=moments.device)
    between = moments[inputs][:, inputs].clone()
    between.diagonal()[: len(kept)].add_(_RIDGE * moments.diagonal()[:ones].mean().clamp_min(_RIDGE))
    wanted = moments[inputs][:, :ones] @ weight.to(moments).T
    solved = torch.linalg.solve(between, wanted).T
    gain = solved[:, -1] if shifts else torch.zeros(len(weight), dtype=solved.dtype, device=solved.device)
    return solved[:, : len(kept)], gain


def _measure_moments(
    model: SentenceTransformer, texts: Sequence[str], modules: Sequence[str], *, progress: Progress = SILENT
) -> Iterator[tuple[str, Tensor]]:
    """Yield the second moments of each module's inputs and a constant 1 over the tokens of the texts."""
    backbone = transformer_of(model).model
    group: list[str] = []
    held = 0
    for name in modules:
        module = backbone.get_submodule(name)
        # A Conv1D stores its weight as (in, out).
        inputs = module.in_features if isinstance(module, nn.Linear) else len(module.get_parameter("weight"))
        size = 8 * (inputs + 1) ** 2
        if group and held + size > _MOST_BYTES:
            yield from _moments_of_group(model, texts, group, progress)
            group, held = [], 0
        group.append(name)
        held += size
    yield from _moments_of_group(model, texts, group, progress)


def _moments_of_group(
    model: SentenceTransformer, texts: Sequence[str], modules: Sequence[str], progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    backbone = transformer_of(model).model
    sums: dict[str, Tensor] = {}
    masks: list[Tensor] = []

    def add(name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        states = inputs[0].flatten(0, -2)[masks[-1]].float()
        states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
        found = states.T @ states
        found = found.cpu().double() if found.device.type == "mps" else found.double()
        sums[name] = sums[name].add_(found) if name in sums else found

    with ExitStack() as hooks:
        for name in modules:
            hooks.enter_context(backbone.get_submodule(name).register_forward_pre_hook(partial(add, name)))
        read_through(model, texts, masks.append, label="reconstruction", progress=progress)
    tokens = sum(int(mask.sum()) for mask in masks)
    for name in modules:
        yield name, sums.pop(name).div_(tokens)
