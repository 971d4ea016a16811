"""How `weights` plans and changes a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.weights import (
    _HALF,
    _NEEDS_DOMAIN,
    _NEEDS_GENERAL,
    WeightsOptions,
    WeightsPlan,
    _selection_of,
)
from trundle.methods.weights.samples import _make_judge, _open_side, _same_data, _texts_of
from trundle.methods.weights.scoring import (
    _best_neurons,
    _choose,
    _count_alignment,
    _how_many,
    _neurons_by_layer,
    _pruned_first,
    _score_weights,
    _Scored,
    _two_of_four,
)
from trundle.model import surgery
from trundle.model.cost import cost, predict
from trundle.model.encode import read_through
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import has_bias, prunable, put_map, says_pruned, weight_of, with_zeros
from trundle.model.surgery import Cut, transformer_of
from trundle.progress import SILENT, Progress
from trundle.records import WEIGHTS_FILE, PrunedMatrix, WeightMap

if TYPE_CHECKING:
    from trundle.methods.weights.samples import _Side
    from trundle.model.cost import Cost
    from trundle.model.layout import Layout

_RIDGE = 1e-4
"""Of the mean moment: keeps neurons apart that never differ."""
_MOST_BYTES = 1 << 31


def _measure_moments(
    model: SentenceTransformer, texts: Sequence[str], modules: Sequence[str], *, progress: Progress = SILENT
) -> Iterator[tuple[str, Tensor]]:
    """By module: the mean products of all pairs of its inputs and a one, over the tokens of texts; as many at a time as fit."""
    backbone = transformer_of(model).model
    for group in _groups(backbone, modules):
        sums, count = _sums(model, backbone, texts, group, progress)
        for name in group:
            yield name, sums.pop(name).div_(count)


def _taken_over(
    weight: Tensor, moments: Tensor, kept: Sequence[int], *, shifts: bool
) -> tuple[Tensor, Tensor]:
    """The weight for the kept inputs, as (out, in), and what its bias gains; without a bias that is nothing."""
    ones = moments.shape[0] - 1
    inputs = torch.tensor([*kept, ones] if shifts else kept, device=moments.device)
    between = moments[inputs][:, inputs].clone()
    between.diagonal()[: len(kept)].add_(_RIDGE * moments.diagonal()[:ones].mean().clamp_min(_RIDGE))
    wanted = moments[inputs][:, :ones] @ weight.to(moments).T
    solved = torch.linalg.solve(between, wanted).T
    gain = solved[:, -1] if shifts else torch.zeros(len(weight), dtype=solved.dtype, device=solved.device)
    return solved[:, : len(kept)], gain


def _groups(backbone: nn.Module, modules: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for name in modules:
        size = 8 * (_inputs_of(backbone.get_submodule(name)) + 1) ** 2
        if group and held + size > _MOST_BYTES:
            yield group
            group, held = [], 0
        group.append(name)
        held += size
    if group:
        yield group


def _inputs_of(module: nn.Module) -> int:
    return module.in_features if isinstance(module, nn.Linear) else len(module.get_parameter("weight"))


def _sums(
    model: SentenceTransformer,
    backbone: nn.Module,
    texts: Sequence[str],
    modules: Sequence[str],
    progress: Progress,
) -> tuple[dict[str, Tensor], int]:
    """The products of each module's inputs, summed over all tokens, and how many tokens these were."""
    sums: dict[str, Tensor] = {}
    masks: list[Tensor] = []
    counts: list[int] = []

    def tell(real: Tensor) -> None:
        masks[:] = [real]
        counts.append(int(real.sum()))

    def listen(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            states = inputs[0].flatten(0, -2)[masks[0]].float()
            states = torch.cat([states, states.new_ones(len(states), 1)], dim=1)
            found = states.T @ states
            found = found.cpu().double() if found.device.type == "mps" else found.double()
            sums[name] = sums[name].add_(found) if name in sums else found

        return hook

    hooks = [backbone.get_submodule(name).register_forward_pre_hook(listen(name)) for name in modules]
    try:
        read_through(model, texts, tell, label="what neurons share", progress=progress)
    finally:
        for hook in hooks:
            hook.remove()
    return sums, sum(counts)


def plan(model: SentenceTransformer, options: WeightsOptions, context: Context) -> WeightsPlan:
    """Count what will go, and look at both sides' first samples."""
    layout = layout_of(transformer_of(model).model)
    matrices = prunable(layout, attention=options.attention)
    share = _share(options, layout)
    sizes = [(layout.size(matrix.rows), layout.size(matrix.columns)) for matrix in matrices]
    weights = sum(rows * columns for rows, columns in sizes)
    if share == 0:
        return WeightsPlan(options=options, zeros=0, weights=weights)
    sides = _open_sides(options, context)
    if len(sides) == 2 and _same_data(*sides):
        context.progress.say(
            "domain and general are the same data: every alignment is 1, so nothing is learned about the domain"
        )
    if options.structure == "neuron":
        of = layout.sizes["mlp"]
        return WeightsPlan(
            options=options, zeros=0, weights=weights, neurons=of - _how_many(of, share), of=of
        )
    if options.structure == "2:4":
        odd = [matrix.name for matrix, (_, columns) in zip(matrices, sizes, strict=True) if columns % 4]
        if odd:
            raise ImpossibleCut(
                f"{odd[0]} has rows whose length is no multiple of four; use structure: unstructured"
            )
        return WeightsPlan(options=options, zeros=weights // 2, weights=weights)
    selection = _selection_of(options)
    if selection == "global":
        zeros = _how_many(weights, share)
    elif selection == "tensor":
        zeros = sum(_how_many(rows * columns, share) for rows, columns in sizes)
    else:
        zeros = sum(rows * _how_many(columns, share) for rows, columns in sizes)
    return WeightsPlan(options=options, zeros=zeros, weights=weights)


def _share(options: WeightsOptions, layout: Layout) -> Fraction:
    """The share that goes, if it makes sense with the rest."""
    share = options.sparsity
    if share is None:
        if options.structure != "2:4":
            raise ImpossibleCut("say what share of the weights goes, with sparsity, such as 50%")
        share = _HALF
    if not 0 <= share < 1:
        raise ImpossibleCut(
            f"the share of weights that go must be at least 0 and under 1, such as 50%, not {share}"
        )
    if options.structure == "2:4" and share not in (0, _HALF):
        raise ImpossibleCut("2:4 takes two of each four weights, which is 50%; leave sparsity out")
    if options.structure == "2:4" and options.selection is not None:
        raise ImpossibleCut("2:4 compares four weights at a time; leave selection out")
    if options.structure == "neuron":
        if options.attention:
            raise ImpossibleCut("neurons are in the MLPs alone; leave attention out, or prune single weights")
        if options.selection is not None:
            raise ImpossibleCut(
                f"a {layout.family.name} config has one MLP width for all layers, so the same number of neurons goes "
                "in each; leave selection out"
            )
    return share


def _open_sides(options: WeightsOptions, context: Context) -> list[_Side]:
    """The sides the method needs; one that is given besides is measured on, too."""
    sides = []
    if options.method in _NEEDS_DOMAIN or options.domain is not None:
        sides.append(_open_side("domain", options.domain, context))
    if options.method in _NEEDS_GENERAL or options.general is not None:
        sides.append(_open_side("general", options.general, context))
    return sides


def forecast(model: SentenceTransformer, plan: WeightsPlan) -> Cost:
    """A zero is stored like any other weight; a neuron that is gone is not."""
    return cost(model) if plan.neurons is None else predict(model, mlp=plan.neurons)


def apply(model: SentenceTransformer, plan: WeightsPlan, context: Context) -> Applied:
    """Score, choose, and zero or cut."""
    options = plan.options
    if not plan.zeros and plan.neurons == plan.of:
        return Applied(model=surgery.cut(model, Cut()))
    sides = _open_sides(options, context)
    scored = _score_weights(model, options, {side.name: side for side in sides}, context)
    if plan.neurons is not None:
        kept = [_best_neurons(scores, plan.neurons) for scores in _neurons_by_layer(scored)]
        small = surgery.cut(model, Cut(mlp=tuple(kept)))
        # A matrix that was fitted anew has no zeros left to keep.
        texts = _texts_of(sides, context) if options.take_over and not says_pruned(model) else []
        if texts:
            _take_over(model, small, kept, texts, context)
        left = {name: score.numel() * plan.neurons // (plan.of or 1) for name, score in scored.scores.items()}
        facts: dict[str, Any] = {"neurons": plan.neurons, "of": plan.of, "taken_over_on": len(texts)}
    else:
        scores = _pruned_first(model, scored)
        if options.structure == "2:4":
            gone = {name: _two_of_four(score) for name, score in scores.items()}
        else:
            gone = _choose(scores, options.sparsity or _HALF, _selection_of(options))
        small = copy_of(model)
        with_zeros(small, gone)
        left = {name: int((~mask).sum()) for name, mask in gone.items()}
        zeros = plan.weights - sum(left.values())
        facts = {"zeros": zeros, "weights": plan.weights, "sparsity": round(zeros / plan.weights, 6)}
    drawn = _map(str(plan), scored, left)
    if drawn.alignment is not None:
        facts["alignment"] = {
            kind: getattr(drawn.alignment, kind) for kind in ("shared", "specific", "conflicting")
        }
    return Applied(
        model=small,
        facts=facts | scored.facts,
        judge=_make_judge(sides, context),
        files={WEIGHTS_FILE: drawn.as_text()},
    )


def _take_over(
    model: SentenceTransformer,
    small: SentenceTransformer,
    kept: Sequence[Sequence[int]],
    texts: Sequence[str],
    context: Context,
) -> None:
    """Let the neurons a cut model kept, by layer, do what those did that it lost; in place."""
    large, cut = transformer_of(model).model, transformer_of(small).model
    readers = {matrix.name: matrix for matrix in prunable(layout_of(large)) if matrix.columns == "mlp"}
    for name, moments in _measure_moments(model, texts, tuple(readers), progress=context.progress):
        put_map(
            cut,
            readers[name],
            *_taken_over(
                weight_of(large, readers[name]),
                moments,
                kept[readers[name].block],
                shifts=has_bias(large, readers[name]),
            ),
        )


def reopen(applied: Applied, plan: WeightsPlan, context: Context) -> Applied:
    """With the texts at hand that judge it."""
    if not plan.zeros and plan.neurons == plan.of:
        return applied
    return replace(applied, judge=_make_judge(_open_sides(plan.options, context), context))


def _map(says: str, scored: _Scored, left: dict[str, int]) -> WeightMap:
    sizes = {name: score.numel() for name, score in scored.scores.items()}
    return WeightMap(
        says=says,
        matrices=tuple(
            PrunedMatrix(
                layer=matrix.block, matrix=matrix.inside, weights=sizes[matrix.name], kept=left[matrix.name]
            )
            for matrix in scored.matrices
        ),
        alignment=None if scored.aligned is None else _count_alignment(scored.aligned, sizes),
    )
