"""Rounding to int4 without training (GPTQ, https://arxiv.org/abs/2210.17323).

Matrices are fitted in the order in which they compute, each on the outputs of those that are rounded already.
A matrix is first fitted by least squares to what the whole model computes at the same place, including what
the residual connection has lost so far. Then its columns are rounded from left to right, and the columns that
are still exact take over the error of each, as far as their inputs are correlated with its input. The scale
of each block is searched, biases and the norm after a block are fitted to the rounded matrices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.model.anatomy import Norm
from trundle.model.encode import fast_forward
from trundle.model.heads import copy_of
from trundle.model.layout import Layout, layout_of
from trundle.model.matrices import (
    _HIGHEST,
    _LOWEST,
    BLOCK,
    Matrix,
    _has_bias,
    _is_on_grid,
    _rounds,
    _scale_for,
    fits_grid,
    grid_weights,
    is_pruned,
    prunable,
    put_on_grid,
    weight_of,
)
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of
from trundle.model.tokens import Features
from trundle.progress import SILENT, Progress

_LONGEST = 128
"""Tokens of a text; more hardly change the moments."""
_MOST_TOKENS = 24_576
_BATCH = 32
_DAMPING = 0.01
"""Relative to the mean moment: keeps inputs solvable that are always zero or always equal."""
_RIDGE = 1.0
"""The same for the fit to the whole model, which pulls towards the exact matrix; less overfits."""
_SHARES = (1.0, 0.9, 0.8)
"""Scales to try, relative to the one that spans the whole block."""


def round_to_int4(
    model: SentenceTransformer, texts: Sequence[str], *, progress: Progress = SILENT
) -> SentenceTransformer:
    """Return a float32 copy whose large matrices and token table lie on the int4 grid.

    `texts` should resemble those that the model will encode; some hundreds are enough. A model whose weights
    lie on the grid already is returned as it is. A pruned model keeps its zeros, so it is only rounded.
    """
    weights = [weight.T if transposed else weight for weight, transposed in grid_weights(model)]
    if all(_is_on_grid(weight.detach()) for weight in weights):
        return model
    whole = copy_of(model).float().eval()
    if is_pruned(model):  # a fitted matrix would lose its zeros
        put_on_grid(grid_weights(whole))
        return whole
    batches = _batches(whole, texts, inputs=max(weight.shape[1] for weight in weights))
    small = copy_of(whole)
    _round_outside(small)
    with torch.no_grad(), fast_forward(whole), fast_forward(small):
        if static_table(whole) is None:
            _RoundedBlocks(whole, small, batches).round_blocks(progress)
        _round_heads(whole, small, batches)
    return small


def _batches(model: SentenceTransformer, texts: Sequence[str], *, inputs: int) -> list[Features]:
    """The texts as the model's input, the shortest first; rejects texts with fewer tokens than `inputs`."""
    groups = _groups(texts)
    found = _as_features(model, groups)
    if static_table(model) is not None:
        return found
    step = _thinned(groups, found, inputs=inputs, most=_MOST_TOKENS, purpose="round to int4")
    return found[step // 2 :: step]


def _groups(texts: Sequence[str]) -> list[list[str]]:
    """The different texts in groups of similar length."""
    ordered = sorted(dict.fromkeys(texts), key=lambda text: (len(text), text))
    return [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]


def _as_features(model: SentenceTransformer, groups: Sequence[list[str]]) -> list[Features]:
    limit, static = model.max_seq_length, static_table(model) is not None
    if not static:
        model.max_seq_length = min(limit or _LONGEST, _LONGEST)
    try:
        return [batch_to_device(model.preprocess(group), model.device) for group in groups]
    finally:
        if not static:
            model.max_seq_length = limit


def _thinned(
    groups: Sequence[list[str]], found: Sequence[Features], *, inputs: int, most: int, purpose: str
) -> int:
    """The step between groups by which about `most` tokens are left; rejects fewer than `inputs`."""
    tokens = sum(int(features["attention_mask"].sum()) for features in found)
    if tokens < inputs:
        texts = sum(map(len, groups))
        needed = -(-texts * inputs // max(1, tokens))
        raise BadInput(
            f"{texts:,} texts with {tokens:,} tokens are too few to {purpose}; calibrate with {needed:,} "
            "such texts or more"
        )
    return -(-tokens // most)


def _round_outside(model: SentenceTransformer) -> None:
    table = static_table(model)
    if table is not None:
        found = list(table.parameters())
    else:
        backbone = transformer_of(model).model
        outside = [each for each in layout_of(backbone).parameters if each.block is None]
        found = [backbone.get_parameter(each.name) for each in outside if _rounds(each)]
    for weight in found:
        if fits_grid(*weight.shape):
            weight.data = _nearest(weight.data)


def _nearest(matrix: Tensor) -> Tensor:
    """The matrix on the grid, each block with the scale that has the least squared error."""
    blocks = matrix.reshape(*matrix.shape[:-1], -1, BLOCK)
    best, found = torch.full_like(blocks[..., :1], torch.inf), torch.zeros_like(blocks)
    for share in _SHARES:
        rounded = _on_scale(blocks, _scale_for(blocks, _LOWEST / share))
        error = (rounded - blocks).square().sum(-1, keepdim=True)
        found = torch.where(error < best, rounded, found)
        best = torch.minimum(error, best)
    return found.reshape(matrix.shape)


def _on_scale(values: Tensor, scales: Tensor) -> Tensor:
    return (values / scales).round().clamp(_LOWEST, _HIGHEST) * scales


def _gptq(weight: Tensor, moments: Tensor) -> Tensor:
    """A matrix (out, in) on the grid, with the least error for inputs of these second moments."""
    factor = _inverse_factor(moments)
    left = weight.T.contiguous()  # columns of the matrix are contiguous
    found = torch.empty_like(left)
    for start in range(0, len(left), BLOCK):
        inside = slice(start, start + BLOCK)
        rows, own = left[inside], factor[inside, inside]
        scales = torch.stack([_scale_for(rows.T, _LOWEST / share)[:, 0] for share in _SHARES])
        rounded, errors = _round_columns(rows[:, None].repeat(1, len(scales), 1), own, scales)
        best = errors.square().sum(0).argmin(0)[None, None].expand(BLOCK, 1, -1)
        found[inside] = rounded.gather(1, best)[:, 0]
        left[start + BLOCK :] -= factor[inside, start + BLOCK :].T @ errors.gather(1, best)[:, 0]
    return found.T.contiguous()


def _inverse_factor(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of the damped moments."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    if mean <= 0:
        return torch.eye(len(moments), device=moments.device)
    diagonal.add_(_DAMPING * mean)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factor


def _round_columns(columns: Tensor, factor: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Columns (32, shares, rows) on the grid, and the errors that later columns take over."""
    rounded, errors = torch.empty_like(columns), torch.empty_like(columns)
    for place in range(len(columns)):
        rounded[place] = _on_scale(columns[place], scales)
        errors[place] = (columns[place] - rounded[place]) / factor[place, place]
        columns[place + 1 :] -= factor[place, place + 1 :, None, None] * errors[place]
    return rounded, errors


class _Moments:
    """Second moments of a matrix's inputs and a constant 1, and their products with the outputs wanted."""

    def __init__(self) -> None:
        self._inputs: Tensor | float = 0.0
        self._outputs: Tensor | float = 0.0
        self._wanted: Tensor | float = 0.0

    def add(self, inputs: Tensor, wanted: Tensor, weights: Tensor | None = None) -> None:
        """Add some rows, each with its weight."""
        inputs = torch.cat([inputs, inputs.new_ones(len(inputs), 1)], dim=1)
        if weights is not None:
            roots = weights.sqrt()[:, None]
            inputs, wanted = roots * inputs, roots * wanted
        self._inputs = self._inputs + _precise(inputs.T @ inputs)
        self._outputs = self._outputs + _precise(inputs.T @ wanted)
        self._wanted = self._wanted + _precise(wanted.square().sum())

    def __add__(self, other: _Moments) -> _Moments:
        total = _Moments()
        total._inputs = self._inputs + other._inputs
        total._outputs = self._outputs + other._outputs
        total._wanted = self._wanted + other._wanted
        return total

    def error(self, weight: Tensor, bias: Tensor) -> float:
        """Return the summed squared error of a matrix (out, in) with a bias, relative to what is wanted."""
        assert isinstance(self._inputs, Tensor)
        together = torch.cat([weight, bias[:, None]], dim=1).to(self._inputs).T
        error = (together * (self._inputs @ together - 2 * self._outputs)).sum() + self._wanted
        return float(error / max(float(self._wanted), 1e-30))

    def _centred(self, *, shifts: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Moments and products, less their means if a bias `shifts` the outputs, and both means."""
        assert isinstance(self._inputs, Tensor)
        assert isinstance(self._outputs, Tensor)
        count = self._inputs[-1, -1]
        inputs, wanted = self._inputs / count, self._outputs / count
        mean, target = inputs[-1, :-1], wanted[-1]
        inputs, wanted = inputs[:-1, :-1], wanted[:-1]
        if shifts:
            inputs, wanted = inputs - torch.outer(mean, mean), wanted - torch.outer(mean, target)
        return inputs, wanted, mean, target

    def fit(self, weight: Tensor, *, shifts: bool, strength: float) -> tuple[Tensor, Tensor]:
        """Return the matrix with the least error and its bias, which is zero unless it `shifts`.

        The penalty pulls towards `weight`; its strength is relative to the mean moment.
        """
        inputs, wanted, mean, target = self._centred(shifts=shifts)
        strength = strength * float(inputs.diagonal().mean().clamp_min(1e-12))
        damped = inputs + strength * torch.eye(len(inputs), dtype=inputs.dtype, device=inputs.device)
        given = weight.T.to(inputs)
        found = given + torch.linalg.solve(damped, wanted - inputs @ given)
        bias = target - mean @ found if shifts else torch.zeros_like(target)
        return found.T.float(), bias.float()

    def round(self, weight: Tensor, *, shifts: bool) -> tuple[Tensor, Tensor]:
        """Return the rounded matrix and its bias, which counts only if it `shifts`; `weight` is exact."""
        aim, _ = self.fit(weight, shifts=shifts, strength=_RIDGE)
        inputs, _, mean, target = self._centred(shifts=shifts)
        rounded = _gptq(aim, inputs.float())
        return rounded, (target - mean @ rounded.T.to(mean)).float()


def _precise(sums: Tensor) -> Tensor:
    return sums.cpu().double() if sums.device.type == "mps" else sums.double()


@dataclass(frozen=True, kw_only=True)
class _LinearGroup:
    """Linear layers of a block with the same input."""

    matrices: tuple[Matrix, ...]
    adds: bool
    """Whether the output is added to the residual stream."""
    norm: str | None = None
    """The norm that reads that sum; None if the sum is the block's output."""


class _Stop(Exception):
    pass


@contextmanager
def _watching(
    block: nn.Module, *, inputs: Sequence[str] = (), outputs: Sequence[str] = (), stop: str | None = None
) -> Iterator[dict[str, Tensor]]:
    """Record tensors by module name ("in NAME", "out NAME") while the block runs; stop before one module.

    Of a module that runs several times, the first run counts.
    """
    seen: dict[str, Tensor] = {}

    def before(name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        seen.setdefault(f"in {name}", given[0])
        if name == stop:
            raise _Stop

    def after(name: str, _module: nn.Module, _given: Any, found: Tensor) -> None:
        seen.setdefault(f"out {name}", found)

    with ExitStack() as hooks:
        for name in inputs:
            hooks.enter_context(block.get_submodule(name).register_forward_pre_hook(partial(before, name)))
        for name in outputs:
            hooks.enter_context(block.get_submodule(name).register_forward_hook(partial(after, name)))
        yield seen


@dataclass(frozen=True, kw_only=True)
class _BlockCall:
    """What a block gets besides the hidden states."""

    arguments: tuple[Any, ...]
    named: dict[str, Any]

    def __call__(self, block: nn.Module, states: Tensor) -> Tensor | None:
        """Return the block's output; None if it was stopped."""
        try:
            found: Any = block(states, *self.arguments, **self.named)
        except _Stop:
            return None
        after: Tensor = found[0] if isinstance(found, tuple) else found
        return after

    def inputs_of(
        self, stage: _LinearGroup, block: nn.Module, states: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the inputs of a stage, and for one that adds, what it adds to."""
        name = stage.matrices[0].inside
        if not stage.adds:
            with _watching(block, inputs=[name], stop=name) as seen:
                self(block, states)
            return seen[f"in {name}"][mask], None
        norms = [] if stage.norm is None else [stage.norm]
        with _watching(block, inputs=[name, *norms], outputs=[name], stop=stage.norm) as seen:
            after = self(block, states)
        total = after if stage.norm is None else seen[f"in {stage.norm}"]
        assert total is not None
        return seen[f"in {name}"][mask], (total - seen[f"out {name}"])[mask]


def _open_blocks(
    model: SentenceTransformer, blocks: Sequence[nn.Module], batches: Sequence[Features]
) -> tuple[list[list[_BlockCall]], list[Tensor]]:
    """The calls of each block by batch, and the hidden states that enter the first one."""
    calls: list[list[_BlockCall]] = [[] for _ in batches]
    first: list[Tensor] = []
    found: Any = None

    def record(number: int, *given: Any, **named: Any) -> Any:
        nonlocal found
        states = given[0] if given else named.pop("hidden_states")
        call = _BlockCall(arguments=given[1:], named=named)
        if number == 0:
            first.append(states)
            found = type(blocks[0]).forward(blocks[0], states, *call.arguments, **named)
        calls[len(first) - 1].append(call)
        # T5's first block also returns what the others add to their scores.
        return (states, *found[1:]) if isinstance(found, tuple) else states

    for number, block in enumerate(blocks):
        block.forward = partial(record, number)
    try:
        for features in batches:
            model(dict(features))
    finally:
        for block in blocks:
            del block.forward
    return calls, first


def _stages(
    block: nn.Module, matrices: Sequence[Matrix], norms: Sequence[str], run: Any
) -> list[_LinearGroup]:
    """The linear layers of a block in the order in which they compute.

    A layer that runs several times is left out: DeBERTa's queries and keys are also made of distances.
    """
    by_name = {matrix.inside: matrix for matrix in matrices}
    order: list[tuple[str, Tensor]] = []

    def before(name: str, _: nn.Module, given: tuple[Any, ...]) -> None:
        order.append((name, given[0]))

    with ExitStack() as hooks:
        for name in (*by_name, *norms):
            hooks.enter_context(block.get_submodule(name).register_forward_pre_hook(partial(before, name)))
        run(block)
    found: list[_LinearGroup] = []
    last: Tensor | None = None
    runs = Counter(name for name, _ in order)
    for place, (name, given) in enumerate(order):
        if name not in by_name or runs[name] > 1:
            continue
        if given is last:
            found[-1] = _LinearGroup(matrices=(*found[-1].matrices, by_name[name]), adds=False)
            continue
        last = given
        following = order[place + 1][0] if place + 1 < len(order) else None
        adds = by_name[name].rows == "hidden" and following not in by_name
        found.append(_LinearGroup(matrices=(by_name[name],), adds=adds, norm=following if adds else None))
    return found


def _norms_of(layout: Layout, block: int) -> list[str]:
    """The norms of the hidden states inside a block."""
    start = f"{layout.family.blocks}.{block}."
    found = [
        each.name.removeprefix(start).rpartition(".")[0]
        for each in layout.parameters
        if each.block == block and isinstance(each.member, Norm) and each.member.along == "hidden"
    ]
    return list(dict.fromkeys(found))


def _fit_line(found: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The gain and shift of each column by which `found` comes closest to `wanted`."""
    centre, target = found.mean(0), wanted.mean(0)
    spread = found - centre
    gain = (spread * (wanted - target)).sum(0) / spread.square().sum(0).clamp_min(1e-12)
    return gain, target - gain * centre


def _fit_norm(norm: nn.Module, found: Tensor, wanted: Tensor, states: list[Tensor]) -> list[Tensor]:
    """Fit gain and bias of a LayerNorm to what is wanted; return all states after it."""
    if not isinstance(norm, nn.LayerNorm) or norm.bias is None:
        return states
    gain, shift = _fit_line(found, wanted)
    norm.weight.mul_(gain)
    norm.bias.mul_(gain).add_(shift)
    return [gain * each + shift for each in states]


class _RoundedBlocks:
    """The whole model and its copy, and the hidden states of both between two blocks."""

    def __init__(
        self, whole: SentenceTransformer, small: SentenceTransformer, batches: Sequence[Features]
    ) -> None:
        self._backbones = [transformer_of(model).model for model in (whole, small)]
        self._layout: Layout = layout_of(self._backbones[0])
        self._masks = [features["attention_mask"].bool() for features in batches]
        self._calls, wanted = _open_blocks(whole, self._blocks(0), batches)
        _, given = _open_blocks(small, self._blocks(1), batches)
        self._states = [wanted, given]

    def _blocks(self, which: int) -> list[nn.Module]:
        return list(self._backbones[which].get_submodule(self._layout.family.blocks).children())

    def round_blocks(self, progress: Progress) -> None:
        """Round all matrices of attention and MLP."""
        matrices = prunable(self._layout, attention=True)
        with progress.task("rounding to int4", self._layout.layers) as advance:
            for number in range(self._layout.layers):
                self._round_block(number, [each for each in matrices if each.block == number])
                advance(1)

    def _round_block(self, number: int, matrices: Sequence[Matrix]) -> None:
        whole, small = self._blocks(0)[number], self._blocks(1)[number]
        norms = _norms_of(self._layout, number)
        stages = _stages(
            whole, matrices, norms, lambda block: self._calls[0][number](block, self._states[0][0])
        )
        fitted = [matrix for stage in stages for matrix in stage.matrices]
        for weight in (weight_of(self._backbones[1], each) for each in matrices if each not in fitted):
            if fits_grid(*weight.shape):
                weight.copy_(_nearest(weight))
        wanted = self._whole_outputs(number, stages)
        for stage, outputs in zip(stages, wanted, strict=True):
            moments = _Moments()
            for place, target in enumerate(outputs):
                moments.add(*self._inputs(number, stage, place, target))
            outputs.clear()
            self._put(stage, moments)
        after = [
            call[number](small, states) for call, states in zip(self._calls, self._states[1], strict=True)
        ]
        self._states[1] = [states for states in after if states is not None]
        self._fit_norm(number, norms)

    def _whole_outputs(self, number: int, stages: Sequence[_LinearGroup]) -> list[list[Tensor]]:
        """What each stage should compute, by batch; leaves the whole model's states behind the block."""
        block = self._blocks(0)[number]
        names = [matrix.inside for stage in stages for matrix in stage.matrices]
        norms = [stage.norm for stage in stages if stage.norm is not None]
        found: list[list[Tensor]] = [[] for _ in stages]
        with _watching(block, inputs=norms, outputs=names) as seen:
            for place, mask in enumerate(self._masks):
                seen.clear()
                after = self._calls[place][number](block, self._states[0][place])
                assert after is not None
                for stage, outputs in zip(stages, found, strict=True):
                    if stage.adds:
                        outputs.append((after if stage.norm is None else seen[f"in {stage.norm}"])[mask])
                    else:
                        parts = [seen[f"out {matrix.inside}"][mask] for matrix in stage.matrices]
                        outputs.append(torch.cat(parts, dim=1))
                self._states[0][place] = after
        return found

    def _inputs(self, number: int, stage: _LinearGroup, place: int, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of a stage in the rounded model, and what it should compute from them."""
        call, states = self._calls[place][number], self._states[1][place]
        inputs, rest = call.inputs_of(stage, self._blocks(1)[number], states, self._masks[place])
        return inputs, wanted if rest is None else wanted - rest

    def _put(self, stage: _LinearGroup, moments: _Moments) -> None:
        whole, small = self._backbones
        exact = [weight_of(whole, matrix) for matrix in stage.matrices]
        if not fits_grid(*exact[0].shape):
            return
        shifts = _has_bias(small, stage.matrices[0])
        weight, bias = moments.round(torch.cat(exact), shifts=shifts)
        sizes = [len(each) for each in exact]
        parts = zip(stage.matrices, torch.split(weight, sizes), torch.split(bias, sizes), strict=True)
        for matrix, rows, offset in parts:
            weight_of(small, matrix).copy_(rows)
            if shifts:
                small.get_parameter(f"{matrix.name}.bias").copy_(offset)

    def _fit_norm(self, number: int, norms: Sequence[str]) -> None:
        """Fit gain and bias of the norm that a block ends with, if it does, to the whole model's states."""
        block = self._blocks(1)[number]
        with _watching(block, outputs=norms) as seen:
            out = self._calls[0][number](block, self._states[1][0])
        ends = [name for name in norms if seen.get(f"out {name}") is out]
        if not ends:
            return
        wanted, found = (
            torch.cat([part[mask] for part, mask in zip(states, self._masks, strict=True)])
            for states in self._states
        )
        self._states[1] = _fit_norm(block.get_submodule(ends[-1]), found, wanted, self._states[1])


def _round_heads(whole: SentenceTransformer, small: SentenceTransformer, batches: Sequence[Features]) -> None:
    """Round the linear layers after pooling, each on the vectors of the rounded model."""
    for number, module in enumerate(list(small)[1:], start=1):
        for name, linear in module.named_modules():
            if not isinstance(linear, nn.Linear) or not fits_grid(*linear.weight.shape):
                continue
            moments = _Moments()
            exact = whole[number].get_submodule(name)
            with (
                _watching(whole[number], outputs=[name]) as wanted,
                _watching(module, inputs=[name]) as given,
            ):
                for features in batches:
                    whole(dict(features))
                    small(dict(features))
                    moments.add(given.pop(f"in {name}"), wanted.pop(f"out {name}"))
            shifts = linear.bias is not None
            weight, bias = moments.round(exact.get_parameter("weight"), shifts=shifts)
            linear.weight.copy_(weight)
            if shifts:
                linear.bias.copy_(bias)
