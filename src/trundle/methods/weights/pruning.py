"""Scores every prunable weight by one of the methods, and chooses which weights or neurons to remove.

The samples that score weights come from a domain and from general data; a retrieval evaluation measures each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.data.corpus import Corpus, read_corpus
from trundle.data.examples import DROPOUT, Example, pairs_from_texts
from trundle.data.sampling import distinct, draw, representatives, sample
from trundle.embedder import LONGEST, Embedder
from trundle.errors import BadInput
from trundle.evaluate import scoring
from trundle.evaluate.fidelity import _doubled_while_quick
from trundle.evaluate.tasks import KnownItemTask
from trundle.methods.contract import Context
from trundle.methods.training import HEALING_TEXTS, prompts_by_file
from trundle.methods.weights import _SOURCES_OF, _AlignedBy, _FisherScale, _Name, _Selection, _WeightsOptions
from trundle.methods.weights.gradients import _Gradients, _measure_gradients, _measure_norms
from trundle.model import encode as encode_module
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import Matrix, prunable, weight_of
from trundle.model.surgery import transformer_of
from trundle.records import NEUTRAL, GradientAlignment, PrunedMatrix, WeightMap

_POOL = 4
"""Samples are chosen among this many times their number: clustering more takes long and changes little."""
_FEWEST = 2
_EVALUATION_QUERIES, _EVALUATION_SECONDS = 400, 30.0
"""Held-out queries of each source: up to a limit, as many as the first model can search in this time."""
_FEWEST_QUERIES, _FIRST_QUERIES = 20, 50
_ALPHA, _BETA, _GAMMA = 0.2, 0.0, 0.5
"""The paper's values, except β, which is 1 there. The most important weights matter to both sources, and
β > 0 penalises them for it: with a small model and validation queries of two domains, β = 0 lost less on the
domain, and much less on both sources when neurons were removed."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class _SampleSource:
    name: _Name
    corpus: Corpus
    from_texts: bool
    """Whether it has no tuples, so that pairs are made from its texts."""

    def samples(self) -> Iterator[Example]:
        if self.from_texts:
            return pairs_from_texts(self.corpus.train(), allowed=self.corpus.may_train_on)
        return self.corpus.examples()

    def held_out(self) -> Iterator[Example]:
        """Tuples for evaluation; a pair of two identical texts is always retrieved, so it is left out."""
        if self.from_texts:
            pairs = pairs_from_texts(self.corpus.held_out())
            return (pair for pair in pairs if pair.source != DROPOUT)
        return self.corpus.held_out_examples()


def _open_source(name: _Name, source: str | None, context: Context) -> _SampleSource:
    """Read a source by the rules of --data: only its training rows, nothing that is held out."""
    if source is not None:
        key = f"weights {name} {source} {context.seed}"
        if key not in context.opened:
            context.opened[key] = read_corpus([source], seed=context.seed, progress=context.progress)
        corpus = context.opened[key]
    else:
        assert context.corpus is not None
        corpus = context.corpus
    try:
        has_tuples = next(corpus.examples(), None) is not None
    except BadInput:  # no columns of tuples
        has_tuples = False
    if not has_tuples and next(corpus.train(), None) is None:
        raise BadInput(f"the {name} source is empty; pass a file with tuples or texts")
    return _SampleSource(name=name, corpus=corpus, from_texts=not has_tuples)


def _draw_samples(
    model: SentenceTransformer, source: _SampleSource, count: int, context: Context
) -> tuple[list[Example], dict[str, Any]]:
    """Sample the tuples closest to the centres of a k-means over the vectors of their queries."""
    different = distinct(source.samples(), key=lambda one: one.query)
    pool = sample(different, _POOL * count, seed=context.seed)
    if len(pool) < _FEWEST:
        raise BadInput(f"the {source.name} source has {len(pool)} tuple; pass {_FEWEST}, better thousands")
    if len(pool) > count:
        encode = encode_module.embedder(model, name=f"{source.name} queries", progress=context.progress).query
        chosen = representatives(encode([one.query for one in pool]), count, seed=context.seed)
        drawn = [pool[place] for place in chosen]
    else:
        drawn = pool
        context.progress.say(f"{source.name}: all {len(pool):,} samples are used ({count:,} requested)")
    ways = Counter(Path(one.source).name for one in drawn)
    if source.from_texts:
        listed = ", ".join(f"{number:,} {way}" for way, number in ways.most_common())
        context.progress.say(f"{source.name}: no labelled tuples, so pairs are made from the texts: {listed}")
    facts = {
        "samples": len(drawn),
        "of": len(pool),
        "pairs": "made from texts" if source.from_texts else "given",
        "from": dict(sorted(ways.items())),
    }
    return sorted(drawn, key=lambda one: (one.source, draw(one.query, context.seed))), facts


def _healing_texts(sources: Sequence[_SampleSource], context: Context) -> list[str]:
    """Texts to heal a cut on: the same number of each source, or those of --data."""
    if not sources:
        train = (
            iter(()) if context.corpus is None else context.corpus.sample_train(HEALING_TEXTS, context.seed)
        )
        return [text.text for text in train]
    each = HEALING_TEXTS // (2 * len(sources))
    pairs = [pair for source in sources for pair in sample(source.samples(), each, seed=context.seed)]
    return [text for pair in pairs for text in (pair.query, pair.positive)]


def _make_evaluator(
    sources: list[_SampleSource], context: Context
) -> Callable[[Embedder], Mapping[str, float]] | None:
    """Return a function that measures retrieval with held-out queries; None if there are too few."""
    found: list[tuple[str, list[tuple[str, str]]]] = []
    corpus, used = context.corpus, 0
    for source in sources:
        # A later method that trains on --data may see a text that this source holds out.
        unseen = (one for one in source.held_out() if corpus is None or not corpus.may_train_on(one.query))
        chosen = sample(unseen, _EVALUATION_QUERIES, seed=context.seed)
        pairs = [(one.query, one.positive) for one in chosen]
        if len(pairs) >= _FEWEST_QUERIES:
            found.append((source.name, pairs))
        else:
            context.progress.say(f"{source.name}: {len(pairs)} held-out queries are too few to evaluate")
    if not found:
        return None

    def search(embedder: Embedder, count: int) -> Mapping[str, float]:
        tasks = [KnownItemTask(name=name, pairs=sample(pairs, count, context.seed)) for name, pairs in found]
        return {
            f"{one.task} {one.main}, {len(task.pairs):,} queries": one.score
            for one, task in zip(scoring.evaluate(embedder, tasks), tasks, strict=True)
        }

    def evaluate(embedder: Embedder) -> Mapping[str, float]:
        """The first model decides the number of queries; later ones get the same."""
        nonlocal used
        if used:
            return search(embedder, used)
        most, measure = max(len(pairs) for _, pairs in found), partial(search, embedder)
        used, scores = _doubled_while_quick(measure, min(_FIRST_QUERIES, most), most, _EVALUATION_SECONDS)
        return scores

    return evaluate


def _alignment(general: Tensor, domain: Tensor, by: _AlignedBy = "row") -> Tensor:
    """The cosine between mean gradients, (out, 1) by row or (1, 1) by tensor; 0 where one of them is zero."""
    axes = (1,) if by == "row" else (0, 1)
    dot = (general * domain).sum(dim=axes, keepdim=True)
    lengths = general.square().sum(dim=axes, keepdim=True) * domain.square().sum(dim=axes, keepdim=True)
    return torch.where(lengths > _TINY**2, dot / lengths.clamp_min(_TINY**2).sqrt(), 0.0).clamp(-1.0, 1.0)


def _on_one_scale(fisher: Tensor, scale: _FisherScale) -> Tensor:
    if scale == "raw":
        return fisher
    return fisher / (fisher.mean() if scale == "mean" else fisher.max()).clamp_min(_TINY)


def _dai(
    weight: Tensor,
    general: Tensor,
    domain: Tensor,
    aligned: Tensor,
    *,
    alpha: float = _ALPHA,
    beta: float = _BETA,
    gamma: float = _GAMMA,
    scale: _FisherScale = "mean",
) -> Tensor:
    """GAPrune's score from the Fisher matrices of both sources; `raw` is the formula as in the paper."""
    size = weight.abs()
    net = _on_one_scale(domain, scale) - beta * _on_one_scale(general, scale)
    return (net * size + gamma * size.sqrt()) * (1 + alpha * aligned)


def _random_scores(weights: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same numbers on every device
    return {
        name: torch.rand(weight.shape, generator=generator).to(weight.device)
        for name, weight in weights.items()
    }


def _wanda(weight: Tensor, norms: Tensor) -> Tensor:
    return weight.abs() * norms


def _how_many(weights: int, share: Fraction) -> int:
    return math.floor(weights * share)


def _lowest(scores: Tensor, count: int) -> Tensor:
    """True at exactly `count` of the lowest scores; among equal scores at the first ones."""
    flat = scores.flatten()
    removed = torch.zeros_like(flat, dtype=torch.bool)
    if count > 0:
        border = torch.kthvalue(flat, count).values
        torch.lt(flat, border, out=removed)
        equal = torch.nonzero(flat == border).flatten()
        removed[equal[: count - int(removed.sum())]] = True
    return removed.view_as(scores)


def _lowest_in_rows(scores: Tensor, count: int) -> Tensor:
    order = scores.argsort(dim=1, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :count], True)


def _two_of_four(scores: Tensor) -> Tensor:
    return _lowest_in_rows(scores.reshape(-1, 4), 2).view(scores.shape)


def _choose(scores: Mapping[str, Tensor], share: Fraction, selection: _Selection) -> dict[str, Tensor]:
    """The weights to remove, by matrix: a share of all of them, of each matrix, or of each row."""
    if selection == "global":
        together = torch.cat([score.flatten() for score in scores.values()])
        removed = _lowest(together, _how_many(together.numel(), share))
        parts = torch.split(removed, [score.numel() for score in scores.values()])
        return {name: part.view_as(score) for (name, score), part in zip(scores.items(), parts, strict=True)}
    if selection == "tensor":
        return {name: _lowest(score, _how_many(score.numel(), share)) for name, score in scores.items()}
    return {name: _lowest_in_rows(score, _how_many(score.shape[1], share)) for name, score in scores.items()}


_Axes = tuple[Sequence[str], Sequence[str]]
"""The plain axes along the rows and columns of a matrix; a fused matrix has several rows per neuron."""


def _neuron_scores(scores: Mapping[str, Tensor], axes: Mapping[str, _Axes]) -> Tensor:
    """The summed scores of each MLP neuron of one block: its rows in the layers before, its columns after."""
    found = [
        score.sum(dim=across).view(len(along), -1).sum(dim=0)
        for name, score in scores.items()
        for along, across in zip(axes[name], (1, 0), strict=True)
        if set(along) == {"mlp"}
    ]
    if not found:
        raise ValueError("none of the matrices has an axis along the neurons of an MLP")
    return reduce(torch.add, found)


def _best_neurons(scores: Tensor, count: int) -> tuple[int, ...]:
    removed = _lowest(scores, len(scores) - count)
    return tuple(torch.nonzero(~removed).flatten().tolist())


@dataclass(frozen=True, kw_only=True)
class _Scored:
    """Scores by matrix, as (out, in); the lowest are removed first."""

    matrices: tuple[Matrix, ...]
    scores: dict[str, Tensor]
    aligned: dict[str, Tensor] | None = None
    """The cosines between the gradients of both sources, if both were measured."""
    facts: dict[str, Any] = field(default_factory=dict)


def _score_weights(
    model: SentenceTransformer,
    options: _WeightsOptions,
    sources: Mapping[_Name, _SampleSource],
    context: Context,
) -> _Scored:
    backbone = transformer_of(model).model
    matrices = prunable(layout_of(backbone), attention=options.attention)
    weights = {matrix.name: weight_of(backbone, matrix).float() for matrix in matrices}
    if options.method == "random":
        return _Scored(matrices=matrices, scores=_random_scores(weights, seed=context.seed))
    if options.method == "magnitude":
        return _Scored(matrices=matrices, scores={name: weight.abs() for name, weight in weights.items()})
    probe = copy_of(model).float()
    probe.max_seq_length = min(options.max_length or LONGEST, probe.max_seq_length or LONGEST)
    aligned: dict[str, Tensor] | None = None
    facts: dict[str, Any] = {}
    gradients: dict[_Name, _Gradients] = {}
    for source in _SOURCES_OF[options.method]:
        samples, facts[source] = _draw_samples(model, sources[source], options.samples, context)
        settings: dict[str, Any] = {
            "prompts": prompts_by_file(probe, {}, samples),
            "batch_size": options.batch_size,
            "progress": context.progress,
        }
        if options.method == "wanda":
            norms = _measure_norms(probe, samples, list(weights), **settings)
            scores = {name: _wanda(weight, norms[name]) for name, weight in weights.items()}
            continue
        seed = context.seed if any(one.source == DROPOUT for one in samples) else None
        gradients[source] = _measure_gradients(
            probe, samples, list(weights), dropout_seed=seed, label=source, **settings
        )
        scores = gradients[source].fisher
    if options.method == "gaprune":
        general, domain = gradients["general"], gradients["domain"]
        aligned = {
            name: _alignment(general.mean.pop(name), domain.mean.pop(name), options.aligned_by)
            for name in weights
        }
        dai = partial(_dai, alpha=options.alpha, beta=options.beta, gamma=options.gamma, scale=options.fisher)
        scores = {
            name: dai(weight, general.fisher.pop(name), domain.fisher.pop(name), aligned[name])
            for name, weight in weights.items()
        }
    return _Scored(matrices=matrices, scores=scores, aligned=aligned, facts=facts)


def _neurons_by_layer(scored: _Scored) -> list[Tensor]:
    found = []
    for layer in range(max(matrix.block for matrix in scored.matrices) + 1):
        here = [matrix for matrix in scored.matrices if matrix.block == layer]
        axes = {matrix.name: (matrix.rows.split("+"), matrix.columns.split("+")) for matrix in here}
        found.append(_neuron_scores({name: scored.scores[name] for name in axes}, axes))
    return found


_BINS = 40


def _count_alignment(aligned: Mapping[str, Tensor], sizes: Mapping[str, int]) -> GradientAlignment:
    """Weights by the cosine they were given; `sizes` are the weights of each matrix."""
    cosines = torch.cat([value.flatten().float().cpu() for value in aligned.values()])
    lengths = {name: value.numel() for name, value in aligned.items()}
    each = torch.cat([torch.full((length,), sizes[name] // length) for name, length in lengths.items()])
    bins = ((cosines + 1) / 2 * _BINS).long().clamp(0, _BINS - 1)
    counts = torch.zeros(_BINS, dtype=torch.long).scatter_add_(0, bins, each)
    shared, conflicting = int(each[cosines > NEUTRAL].sum()), int(each[cosines < -NEUTRAL].sum())
    return GradientAlignment(
        counts=tuple(counts.tolist()),
        shared=shared,
        specific=int(each.sum()) - shared - conflicting,
        conflicting=conflicting,
    )


def _weight_map(says: str, scored: _Scored, left: dict[str, int]) -> WeightMap:
    sizes = {name: score.numel() for name, score in scored.scores.items()}

    def pruned(matrix: Matrix) -> PrunedMatrix:
        weights, kept = sizes[matrix.name], left[matrix.name]
        return PrunedMatrix(layer=matrix.block, matrix=matrix.inside, weights=weights, kept=kept)

    alignment = None if scored.aligned is None else _count_alignment(scored.aligned, sizes)
    return WeightMap(says=says, matrices=tuple(map(pruned, scored.matrices)), alignment=alignment)
