"""weights: set to zero, or cut out, the weights that matter least for a domain (GAPrune).

Two sets of samples are read, of your domain and of everything else. From the gradients of each sample come how important
every weight of the MLPs is to either side (Fisher information), and whether both sides pull it the same way (alignment).
Their score (DAI) keeps what the domain needs and drops what only gets in its way. Other methods are there to compare.

`structure` says what goes: single weights (the paper; smaller on disk, not faster), whole neurons (smaller and faster
everywhere), or two of each four (faster on GPUs that can). `contrast` or `align` afterwards heal, and zeros stay zeros.

    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 50%}
    - weights: {domain: finance.jsonl, general: general.jsonl, sparsity: 30%, structure: neuron}
    - weights: {sparsity: 50%, method: magnitude}

Paper: GAPrune: Gradient-Alignment Pruning for Domain-Aware Embeddings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import trundle.measure as measure
import trundle.model as body
from trundle.errors import ImpossibleCut
from trundle.measure.weight_names import Method, Selection
from trundle.steps.contract import Applied, Context, Plan, Step
from trundle.steps.weight_options import WeightsOptions
from trundle.steps.weight_samples import make_judge, open_side, same_data, texts_of
from trundle.steps.weight_scoring import Scored, neurons_by_layer, pruned_first, score_weights

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.measure import Cost
    from trundle.model import Layout
    from trundle.steps.weight_samples import Side

HALF = Fraction(1, 2)
MAP_FILE = "weights.json"
NEEDS_DOMAIN: tuple[Method, ...] = ("gaprune", "domain-fisher", "wanda")
NEEDS_GENERAL: tuple[Method, ...] = ("gaprune", "general-fisher")
CALLED: dict[Method, str] = {
    "gaprune": "lowest DAI",
    "magnitude": "lowest magnitude",
    "random": "worst luck",
    "general-fisher": "lowest Fisher information on general data",
    "domain-fisher": "lowest Fisher information on the domain",
    "wanda": "lowest magnitude times activation on the domain",
}
AMONG: dict[Selection, str] = {"global": "of all of them", "tensor": "in each matrix", "row": "in each row"}


class WeightsPlan(Plan):
    """How many weights or neurons go; which, the samples decide."""

    options: WeightsOptions
    zeros: int
    weights: int
    neurons: int | None = None
    """Neurons that stay in each layer, where whole ones go."""
    of: int | None = None

    def __str__(self) -> str:
        asked = self.options
        if not self.zeros and self.neurons == self.of:
            return "keep all weights: nothing to prune"
        where = "MLPs and attention" if asked.attention else "the MLPs"
        worst = CALLED[asked.method]
        if self.neurons is not None:
            return f"keep {self.neurons:,} of {self.of:,} MLP neurons in each layer; those of the {worst} go"
        share = f"{self.zeros:,} of {self.weights:,} weights of {where}"
        if asked.structure == "2:4":
            return f"zero {share}: the two of the {worst} of each four"
        return f"zero {share}: those of the {worst} {AMONG[selection_of(asked)]}"


def selection_of(options: WeightsOptions) -> Selection:
    """Among which weights the worst are looked for: Wanda compares what enters the same neuron, as its paper does."""
    return options.selection or ("row" if options.method == "wanda" else "global")


def plan(model: SentenceTransformer, options: WeightsOptions, context: Context) -> WeightsPlan:
    """Count what will go, and look at both sides' first samples."""
    layout = body.layout_of(body.transformer_of(model).model)
    matrices = body.prunable(layout, attention=options.attention)
    share = _share(options, layout)
    sizes = [(layout.size(matrix.rows), layout.size(matrix.columns)) for matrix in matrices]
    weights = sum(rows * columns for rows, columns in sizes)
    if share == 0:
        return WeightsPlan(options=options, zeros=0, weights=weights)
    sides = open_sides(options, context)
    if len(sides) == 2 and same_data(*sides):
        context.progress.say(
            "domain and general are the same data: every alignment is 1, so nothing is learned about the domain"
        )
    if options.structure == "neuron":
        of = layout.sizes["mlp"]
        return WeightsPlan(
            options=options, zeros=0, weights=weights, neurons=of - measure.how_many(of, share), of=of
        )
    if options.structure == "2:4":
        odd = [matrix.name for matrix, (_, columns) in zip(matrices, sizes, strict=True) if columns % 4]
        if odd:
            raise ImpossibleCut(
                f"{odd[0]} has rows whose length is no multiple of four; use structure: unstructured"
            )
        return WeightsPlan(options=options, zeros=weights // 2, weights=weights)
    selection = selection_of(options)
    if selection == "global":
        zeros = measure.how_many(weights, share)
    elif selection == "tensor":
        zeros = sum(measure.how_many(rows * columns, share) for rows, columns in sizes)
    else:
        zeros = sum(rows * measure.how_many(columns, share) for rows, columns in sizes)
    return WeightsPlan(options=options, zeros=zeros, weights=weights)


def _share(options: WeightsOptions, layout: Layout) -> Fraction:
    """The share that goes, if it makes sense with the rest."""
    share = options.sparsity
    if share is None:
        if options.structure != "2:4":
            raise ImpossibleCut("say what share of the weights goes, with sparsity, such as 50%")
        share = HALF
    if not 0 <= share < 1:
        raise ImpossibleCut(
            f"the share of weights that go must be at least 0 and under 1, such as 50%, not {share}"
        )
    if options.structure == "2:4" and share not in (0, HALF):
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


def open_sides(options: WeightsOptions, context: Context) -> list[Side]:
    """The sides the method needs; one that is given besides is measured on, too."""
    sides = []
    if options.method in NEEDS_DOMAIN or options.domain is not None:
        sides.append(open_side("domain", options.domain, context))
    if options.method in NEEDS_GENERAL or options.general is not None:
        sides.append(open_side("general", options.general, context))
    return sides


def forecast(model: SentenceTransformer, plan: WeightsPlan) -> Cost:
    """A zero is stored like any other weight; a neuron that is gone is not."""
    return measure.cost(model) if plan.neurons is None else measure.predict(model, mlp=plan.neurons)


def apply(model: SentenceTransformer, plan: WeightsPlan, context: Context) -> Applied:
    """Score, choose, and zero or cut."""
    options = plan.options
    if not plan.zeros and plan.neurons == plan.of:
        return Applied(model=body.cut(model, body.Cut()))
    sides = open_sides(options, context)
    scored = score_weights(model, options, {side.name: side for side in sides}, context)
    if plan.neurons is not None:
        kept = [measure.best_neurons(scores, plan.neurons) for scores in neurons_by_layer(scored)]
        small = body.cut(model, body.Cut(mlp=tuple(kept)))
        # A matrix that was fitted anew has no zeros left to keep.
        texts = texts_of(sides, context) if options.take_over and not body.says_pruned(model) else []
        if texts:
            take_over(model, small, kept, texts, context)
        left = {name: score.numel() * plan.neurons // (plan.of or 1) for name, score in scored.scores.items()}
        facts: dict[str, Any] = {"neurons": plan.neurons, "of": plan.of, "taken_over_on": len(texts)}
    else:
        scores = pruned_first(model, scored)
        if options.structure == "2:4":
            gone = {name: measure.two_of_four(score) for name, score in scores.items()}
        else:
            gone = measure.choose(scores, options.sparsity or HALF, selection_of(options))
        small = body.copy_of(model)
        body.with_zeros(small, gone)
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
        judge=make_judge(sides, context),
        files={MAP_FILE: json.dumps(drawn.as_json())},
    )


def take_over(
    model: SentenceTransformer,
    small: SentenceTransformer,
    kept: Sequence[Sequence[int]],
    texts: Sequence[str],
    context: Context,
) -> None:
    """Let the neurons a cut model kept, by layer, do what those did that it lost; in place."""
    large, cut = body.transformer_of(model).model, body.transformer_of(small).model
    readers = {
        matrix.name: matrix for matrix in body.prunable(body.layout_of(large)) if matrix.columns == "mlp"
    }
    for name, moments in measure.measure_moments(model, texts, tuple(readers), progress=context.progress):
        body.put_map(
            cut,
            readers[name],
            *measure.taken_over(
                body.weight_of(large, readers[name]),
                moments,
                kept[readers[name].block],
                shifts=body.has_bias(large, readers[name]),
            ),
        )


def reopen(applied: Applied, plan: WeightsPlan, context: Context) -> Applied:
    """With the texts at hand that judge it."""
    if not plan.zeros and plan.neurons == plan.of:
        return applied
    return replace(applied, judge=make_judge(open_sides(plan.options, context), context))


def _map(says: str, scored: Scored, left: dict[str, int]) -> measure.WeightMap:
    sizes = {name: score.numel() for name, score in scored.scores.items()}
    return measure.WeightMap(
        says=says,
        matrices=tuple(
            measure.PrunedMatrix(
                layer=matrix.block, matrix=matrix.inside, weights=sizes[matrix.name], kept=left[matrix.name]
            )
            for matrix in scored.matrices
        ),
        alignment=None if scored.aligned is None else measure.count_alignment(scored.aligned, sizes),
    )


STEP = Step(
    name="weights",
    help="Zero or cut the weights that matter least for your domain.",
    options=WeightsOptions,
    plans=WeightsPlan,
    plan=plan,
    forecast=forecast,
    apply=apply,
    reopen=reopen,
    needs_texts=True,
    reads=lambda options: tuple(side for side in (options.domain, options.general) if side is not None),
)
