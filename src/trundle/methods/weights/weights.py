"""How `weights` plans and changes a model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput, ImpossibleCut
from trundle.methods.contract import Applied, Context
from trundle.methods.training import healed
from trundle.methods.weights import (
    _SOURCES_OF,
    _Name,
    _selection_of,
    _share,
    _WeightsOptions,
    _WeightsPlan,
    pruning,
)
from trundle.methods.weights.pruning import _make_evaluator, _SampleSource
from trundle.model import surgery
from trundle.model.cost import Cost, cost, predict
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import prunable, weight_of, with_zeros
from trundle.model.surgery import Cut, transformer_of
from trundle.records import WEIGHTS_FILE


def plan(model: SentenceTransformer, options: _WeightsOptions, context: Context) -> _WeightsPlan:
    """Count what will be removed, and read the first samples of both sources."""
    layout = layout_of(transformer_of(model).model)
    matrices = prunable(layout, attention=options.attention)
    share = _share(options)
    sizes = [(layout.size(matrix.rows), layout.size(matrix.columns)) for matrix in matrices]
    weights = sum(rows * columns for rows, columns in sizes)
    if share == 0:
        return _WeightsPlan(options=options, zeros=0, weights=weights)
    sources = _open_sources(options, context)
    prints = [[fact["fingerprint"] for fact in source.corpus.facts()] for source in sources]
    if len(prints) == 2 and prints[0] and prints[0] == prints[1]:
        context.progress.say("domain and general are the same data: every alignment is 1")
    if options.structure == "neuron":
        of = layout.sizes["mlp"]
        left = of - pruning._how_many(of, share)
        return _WeightsPlan(options=options, zeros=0, weights=weights, neurons=left, of=of)
    if options.structure == "2:4":
        odd = [matrix.name for matrix, (_, columns) in zip(matrices, sizes, strict=True) if columns % 4]
        if odd:
            raise ImpossibleCut(f"the row length of {odd[0]} is not a multiple of 4; use another structure")
        return _WeightsPlan(options=options, zeros=weights // 2, weights=weights)
    each = [(1, rows * columns) for rows, columns in sizes]
    groups = {"global": [(1, weights)], "tensor": each, "row": sizes}[_selection_of(options)]
    zeros = sum(count * pruning._how_many(size, share) for count, size in groups)
    return _WeightsPlan(options=options, zeros=zeros, weights=weights)


def _open_sources(options: _WeightsOptions, context: Context) -> list[_SampleSource]:
    """The sources that the method needs, and others that were passed for evaluation."""
    files: dict[_Name, str | None] = {"domain": options.domain, "general": options.general}
    return [
        pruning._open_source(name, file, context)
        for name, file in files.items()
        if name in _SOURCES_OF[options.method] or file is not None
    ]


def forecast(model: SentenceTransformer, plan: _WeightsPlan) -> Cost:
    """Return the cost of the result: removed neurons save memory and time, zeros do not."""
    return cost(model) if plan.neurons is None else predict(model, mlp=plan.neurons)


def apply(model: SentenceTransformer, plan: _WeightsPlan, context: Context) -> Applied:
    """Score the weights, choose, and zero or cut."""
    options = plan.options
    if not plan.zeros and plan.neurons == plan.of:
        return Applied(model=surgery.cut(model, Cut()))
    sources = _open_sources(options, context)
    scored = pruning._score_weights(model, options, {source.name: source for source in sources}, context)
    if plan.neurons is not None:
        kept = [pruning._best_neurons(scores, plan.neurons) for scores in pruning._neurons_by_layer(scored)]
        what = Cut(mlp=tuple(kept))
        texts = pruning._healing_texts(sources, context)
        if options.heal == "closed-form" and not texts:
            raise BadInput("a cut is healed on texts; pass them with --data, or leave heal out")
        healing = options.heal or "if possible" if texts else "none"
        small, healed_facts = healed(model, surgery.cut(model, what), what, healing, context, texts=texts)
        left = {name: score.numel() * plan.neurons // (plan.of or 1) for name, score in scored.scores.items()}
        facts: dict[str, Any] = {"neurons": plan.neurons, "of": plan.of, **healed_facts}
    else:
        backbone = transformer_of(model).model
        # Weights that are zero already are below all others, so that a share includes them.
        scores = {
            matrix.name: scored.scores[matrix.name].masked_fill(weight_of(backbone, matrix) == 0, -math.inf)
            for matrix in scored.matrices
        }
        if options.structure == "2:4":
            removed = {name: pruning._two_of_four(score) for name, score in scores.items()}
        else:
            removed = pruning._choose(scores, _share(options), _selection_of(options))
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


def reopen(applied: Applied, plan: _WeightsPlan, context: Context) -> Applied:
    """Restore the evaluator of a stored result."""
    if not plan.zeros and plan.neurons == plan.of:
        return applied
    return replace(applied, evaluator=_make_evaluator(_open_sources(plan.options, context), context))
