"""Healing of a cut model in closed form, without training.

The matrices that remain are fitted by least squares in the order in which they compute, each on the outputs
of those that are fitted already, to what the whole model computes at the same place. A matrix that adds to
the residual stream also makes up for what the stream has lost before it; the last one of a block stands for
the removed blocks that follow it as well. The penalty pulls towards the weights as they were cut, and texts
that are not fitted choose its strength, so a matrix that texts can't improve stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.model.encode import fast_forward
from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import Matrix, _has_bias, is_pruned, prunable, weight_of
from trundle.model.rounding import (
    _LONGEST,
    _as_features,
    _fit_norm,
    _groups,
    _LinearGroup,
    _Moments,
    _norms_of,
    _open_blocks,
    _stages,
    _thinned,
    _watching,
)
from trundle.model.surgery import Cut, _kept_positions, transformer_of
from trundle.model.tokens import Features
from trundle.progress import SILENT, Progress

_MOST_TOKENS = 32_768
_STRENGTHS = (1.0, 0.1, 0.01, 1e-3, 1e-4)
"""Penalties tried, relative to the mean moment, until the held-out texts no longer improve."""
_EXACT = 1e-8
"""A relative error that is no more than rounding of the activations."""
_HELD_OUT = 8
"""One of this many texts chooses the penalties and is not fitted."""


@dataclass(frozen=True, kw_only=True)
class _Healed:
    """The model, and its error before and after.

    The error is the mean square of the difference between the last hidden states of the cut and the whole
    model on held-out texts, relative to the variance of the latter.
    """

    model: SentenceTransformer
    tokens: int
    before: float
    after: float


def heal(
    whole: SentenceTransformer,
    small: SentenceTransformer,
    what: Cut,
    texts: Sequence[str],
    *,
    progress: Progress = SILENT,
) -> _Healed:
    """Return `small`, which `what` has cut out of `whole`, with its matrices, biases and norms fitted.

    `texts` should resemble those that the model will encode. A model whose error would grow is returned as it
    is.
    """
    if is_pruned(whole):
        raise BadInput("the model has pruned weights, and healing would change their zeros; pass heal: none")
    dtype = next(small.parameters()).dtype
    wide, narrow = copy_of(whole).float().eval(), copy_of(small).float().eval()
    batches = _paired_batches(wide, narrow, what, texts)
    with torch.no_grad(), fast_forward(wide), fast_forward(narrow):
        before, after = _HealedBlocks(wide, narrow, what, batches).heal(progress)
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    if not after < before:
        return _Healed(model=small, tokens=tokens, before=before, after=before)
    healed = narrow.to(dtype).train(small.training)
    return _Healed(model=healed, tokens=tokens, before=before, after=after)


@dataclass(frozen=True, kw_only=True)
class _PairedBatch:
    """Some texts as the input of both models."""

    whole: Features
    small: Features
    mask: Tensor
    """The tokens of the cut model that are compared (texts, tokens)."""
    aligned: Tensor | None = None
    """What each token of the cut model is compared with (texts, tokens, tokens of the whole model)."""

    def at_tokens(self, states: Tensor) -> Tensor:
        """Return states of the whole model for the compared tokens of the cut one."""
        return (states if self.aligned is None else self.aligned @ states)[self.mask]

    @property
    def held_out(self) -> Tensor:
        """Whether each of the compared tokens belongs to a held-out text."""
        rows = torch.arange(len(self.mask), device=self.mask.device) % _HELD_OUT == _HELD_OUT // 2
        return rows[:, None].expand_as(self.mask)[self.mask]


def _paired_batches(
    whole: SentenceTransformer, small: SentenceTransformer, what: Cut, texts: Sequence[str]
) -> list[_PairedBatch]:
    groups = _groups(texts)
    given = _as_features(whole, groups)
    inputs = max(weight_of(transformer_of(small).model, each).shape[1] for each in _matrices(small))
    step = _thinned(groups, given, inputs=inputs, most=_MOST_TOKENS, purpose="heal the cut")
    groups, given = groups[step // 2 :: step], given[step // 2 :: step]
    if what.vocab is None:
        return [
            _PairedBatch(whole=each, small=each, mask=each["attention_mask"].bool().to(whole.device))
            for each in given
        ]
    found = []
    for group, theirs, ours in zip(groups, given, _as_features(small, groups), strict=True):
        aligned = _alignment(_spans(whole, group), _spans(small, group)).to(whole.device)
        mask = ours["attention_mask"].bool()
        if aligned.shape != (*mask.shape, theirs["input_ids"].shape[1]):
            raise BadInput("the tokenizer does not give the positions of its tokens; pass heal: none")
        found.append(
            _PairedBatch(whole=theirs, small=ours, mask=mask & (aligned.sum(-1) > 0), aligned=aligned)
        )
    return found


_Spans = list[list[tuple[int, int]]]
"""For each text the characters of each token; a special token has none, padding has (−1, −1)."""


def _spans(model: SentenceTransformer, texts: Sequence[str]) -> _Spans:
    longest = min(model.max_seq_length or _LONGEST, _LONGEST)
    stripped = [text.strip() for text in texts]
    tokenizer: Any = model.tokenizer
    encoded = tokenizer(
        stripped, padding=True, truncation=True, max_length=longest, return_offsets_mapping=True
    )
    rows = zip(encoded["offset_mapping"], encoded["attention_mask"], strict=True)
    return [
        [tuple(span) if seen else (-1, -1) for span, seen in zip(spans, mask, strict=True)]
        for spans, mask in rows
    ]


def _alignment(whole: _Spans, small: _Spans) -> Tensor:
    """For each token of the cut model, the shares of the whole model's tokens in its characters.

    Special tokens are aligned in their order. A token beyond the end of the whole model's text has no shares.
    """
    found = torch.zeros(len(whole), len(small[0]), len(whole[0]))
    for text, (theirs, ours) in enumerate(zip(whole, small, strict=True)):
        special = [place for place, (start, end) in enumerate(theirs) if start == end >= 0]
        mine = [place for place, (start, end) in enumerate(ours) if start == end >= 0]
        for one, other in zip(mine, special, strict=False):
            found[text, one, other] = 1.0
        first = 0
        for place, (start, end) in enumerate(ours):
            if start >= end:
                continue
            while first < len(theirs) and theirs[first][1] <= start:
                first += 1
            for other in range(first, len(theirs)):
                if theirs[other][0] >= end:
                    break
                found[text, place, other] = max(0, min(end, theirs[other][1]) - max(start, theirs[other][0]))
    return found / found.sum(-1, keepdim=True).clamp_min(1e-9)


def _matrices(model: SentenceTransformer) -> tuple[Matrix, ...]:
    return prunable(layout_of(transformer_of(model).model), attention=True)


@dataclass(frozen=True, kw_only=True)
class _Place:
    """A block of the cut model, and the blocks of the whole model that it stands for."""

    number: int
    first: int
    end: int
    """The block after the last one."""


class _HealedBlocks:
    """The whole model and the cut one, and the hidden states of both between two blocks."""

    def __init__(
        self,
        whole: SentenceTransformer,
        small: SentenceTransformer,
        what: Cut,
        batches: Sequence[_PairedBatch],
    ) -> None:
        self._models = [transformer_of(model).model for model in (whole, small)]
        self._layout = layout_of(self._models[0])
        self._what, self._batches = what, batches
        self._matrices = [_matrices(model) for model in (whole, small)]
        path = self._layout.family.blocks
        self._blocks = [list(model.get_submodule(path).children()) for model in self._models]
        kept = tuple(range(self._layout.layers) if what.blocks is None else what.blocks)
        ends = (*kept[1:], self._layout.layers)
        self._places = [
            _Place(number=number, first=first, end=end)
            for number, (first, end) in enumerate(zip(kept, ends, strict=True))
        ]
        wide, wanted = _open_blocks(whole, self._blocks[0], [each.whole for each in batches])
        narrow, states = _open_blocks(small, self._blocks[1], [each.small for each in batches])
        self._calls, self._states = [wide, narrow], [wanted, states]

    def heal(self, progress: Progress) -> tuple[float, float]:
        """Fit all matrices in place; return the error before and after."""
        unhealed = self._states[1]
        for place in self._places:
            unhealed = self._run(1, place.number, unhealed)
        for number in range(self._places[0].first):
            self._states[0] = self._run(0, number, self._states[0])
        with progress.task("healing the cut", len(self._places)) as advance:
            for place in self._places:
                self._heal_block(place)
                advance(1)
        return self._error(unhealed), self._error(self._states[1])

    def _run(self, which: int, number: int, states: Sequence[Tensor]) -> list[Tensor]:
        """The states after a block of one of the models."""
        block = self._blocks[which][number]
        found = [call[number](block, given) for call, given in zip(self._calls[which], states, strict=True)]
        return [each for each in found if each is not None]

    def _error(self, found: Sequence[Tensor]) -> float:
        norm = self._layout.family.final_norm
        whole, small = (
            [states if norm is None else model.get_submodule(norm)(states) for states in each]
            for model, each in zip(self._models, (self._states[0], found), strict=True)
        )
        wanted = torch.cat([self._target(batch, each)[batch.held_out] for batch, each in self._with(whole)])
        given = torch.cat([each[batch.mask][batch.held_out] for batch, each in self._with(small)])
        spread = (wanted - wanted.mean(0)).square().mean().clamp_min(1e-30)
        return float((given - wanted).square().mean() / spread)

    def _with(self, states: Sequence[Tensor]) -> Iterator[tuple[_PairedBatch, Tensor]]:
        return zip(self._batches, states, strict=True)

    def _target(self, batch: _PairedBatch, states: Tensor, axis: str = "hidden", block: int = 0) -> Tensor:
        """States of the whole model at the tokens and positions that the cut one has."""
        found = batch.at_tokens(states)
        kept = _kept_positions(axis, block, self._layout, self._what)
        return found if kept is None else found[:, kept.to(found.device)]

    def _heal_block(self, place: _Place) -> None:
        norms = _norms_of(self._layout, place.first)
        inside = [each for each in self._matrices[0] if each.block == place.first]
        block, first = self._blocks[0][place.first], self._states[0][0]
        stages = _stages(block, inside, norms, lambda each: self._calls[0][0][place.first](each, first))
        with _watching(block, outputs=norms) as seen:
            out = self._calls[0][0][place.first](block, first)
        ends_with = next((name for name in norms if seen.get(f"out {name}") is out), None)
        if ends_with is not None and place.end > place.first + 1:
            self._copy_norm(place, ends_with)
        inner = self._inner_stages(stages)
        after, sums = self._sums(place, [stage for stage in stages if stage.adds], ends_with)
        for stage in stages:
            if stage.adds or stage in inner:
                self._fit(place, stage, sums.pop(0) if stage.adds else None)
        self._states = [after, self._run(1, place.number, self._states[1])]
        if ends_with is not None:
            self._fit_norm(self._blocks[1][place.number].get_submodule(ends_with))

    def _inner_stages(self, stages: Sequence[_LinearGroup]) -> list[_LinearGroup]:
        """The stages to fit among those that do not add to the residual stream."""
        cuts = (self._what.hidden, self._what.head, self._what.vocab)
        # After a cut of layers or neurons they gain next to nothing and take as long as all the others.
        return [] if all(kept is None for kept in cuts) else list(stages)

    def _sums(
        self, place: _Place, stages: Sequence[_LinearGroup], norm: str | None
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        """The whole model's states after a place, and what the residual stream should be after each stage.

        After the last one it is that of the last block that the place stands for, unless a norm lies between
        the matrix and the stream.
        """
        found: list[list[Tensor]] = [[] for _ in stages]
        after: list[Tensor] = []
        names = [stage.norm for stage in stages if stage.norm is not None]
        for number, states in enumerate(self._states[0]):
            for block in range(place.first, place.end):
                watched = self._blocks[0][block]
                with _watching(watched, inputs=names) as seen:
                    out = self._calls[0][number][block](watched, states)
                assert out is not None
                states = out
                for sums, stage in zip(found, stages, strict=True):
                    total = out if stage.norm is None else seen[f"in {stage.norm}"]
                    if block == place.first:
                        sums.append(total)
                    elif stage is stages[-1] and stage.norm in (None, norm):
                        sums[-1] = total
            after.append(states)
        return after, found

    def _copy_norm(self, place: _Place, norm: str) -> None:
        """Give a block the norm of the last block that it stands for."""
        theirs = self._blocks[0][place.end - 1].get_submodule(norm)
        kept = _kept_positions("hidden", 0, self._layout, self._what)
        for name, weight in self._blocks[1][place.number].get_submodule(norm).named_parameters():
            given = theirs.get_parameter(name)
            weight.copy_(given if kept is None else given[kept.to(given.device)])

    def _fit(self, place: _Place, stage: _LinearGroup, sums: Sequence[Tensor] | None) -> None:
        """Fit the matrices of a stage; `sums`: what the residual stream should be after it, if it adds."""
        fitted, held_out = _Moments(), _Moments()
        for number, batch in enumerate(self._batches):
            inputs, rest = self._inputs(place, stage, number)
            weights = None
            if sums is None or rest is None:
                wanted = self._outputs(place, stage, number)
            else:
                wanted = self._target(batch, sums[number])
                # A norm follows, so an error counts in relation to the size of the states.
                weights = wanted.square().mean(1).clamp_min(1e-12).reciprocal()
                wanted = wanted - rest
            for moments, chosen in ((fitted, ~batch.held_out), (held_out, batch.held_out)):
                moments.add(inputs[chosen], wanted[chosen], None if weights is None else weights[chosen])
        self._put(place, stage, fitted, held_out)

    def _outputs(self, place: _Place, stage: _LinearGroup, number: int) -> Tensor:
        """What the whole model computes at a stage."""
        block, batch = self._blocks[0][place.first], self._batches[number]
        names = [matrix.inside for matrix in stage.matrices]
        with _watching(block, outputs=names) as seen:
            self._calls[0][number][place.first](block, self._states[0][number])
        parts = [
            self._target(batch, seen[f"out {matrix.inside}"], matrix.rows, place.first)
            for matrix in stage.matrices
        ]
        return torch.cat(parts, dim=1)

    def _inputs(self, place: _Place, stage: _LinearGroup, number: int) -> tuple[Tensor, Tensor | None]:
        """The inputs of a stage in the cut model, and for one that adds, what it adds to."""
        block, mask = self._blocks[1][place.number], self._batches[number].mask
        call, states = self._calls[1][number][place.number], self._states[1][number]
        return call.inputs_of(stage, block, states, mask)

    def _put(self, place: _Place, stage: _LinearGroup, fitted: _Moments, held_out: _Moments) -> None:
        """Replace the matrices of a stage if that improves the held-out texts."""
        names = [matrix.inside for matrix in stage.matrices]
        own = [each for each in self._matrices[1] if each.block == place.number and each.inside in names]
        own.sort(key=lambda each: names.index(each.inside))
        small = self._models[1]
        given = torch.cat([weight_of(small, matrix) for matrix in own])
        shifts = _has_bias(small, own[0])
        biases: list[Tensor] = (
            [small.get_parameter(f"{matrix.name}.bias") for matrix in own] if shifts else []
        )
        bias = torch.cat(biases) if shifts else given.new_zeros(len(given))
        strength = _best_strength(given, bias, fitted, held_out, shifts=shifts)
        if strength is None:
            return
        weight, offset = (fitted + held_out).fit(given, shifts=shifts, strength=strength)
        sizes = [len(weight_of(small, matrix)) for matrix in own]
        for matrix, rows in zip(own, torch.split(weight, sizes), strict=True):
            weight_of(small, matrix).copy_(rows)
        for parameter, part in zip(biases, torch.split(offset, sizes), strict=False):
            parameter.copy_(part)

    def _fit_norm(self, norm: nn.Module) -> None:
        """Fit gain and bias of the norm that a block ends with."""
        wanted = torch.cat([self._target(batch, each) for batch, each in self._with(self._states[0])])
        found = torch.cat([each[batch.mask] for batch, each in self._with(self._states[1])])
        self._states[1] = _fit_norm(norm, found, wanted, self._states[1])


def _best_strength(
    weight: Tensor, bias: Tensor, fitted: _Moments, held_out: _Moments, *, shifts: bool
) -> float | None:
    """The penalty with which held-out texts have the least error; None if they are best without a fit."""
    least, best = held_out.error(weight, bias), None
    if least < _EXACT:
        return None
    for strength in _STRENGTHS:
        error = held_out.error(*fitted.fit(weight, shifts=shifts, strength=strength))
        if not error < least:
            break
        least, best = error, strength
    return best
