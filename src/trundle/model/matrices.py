"""The matrices that can be pruned or rounded to int4, each as (out, in) whatever its family stores.

A pruned model stores its mask as zeros: a weight that is exactly zero in one of these matrices stays zero.
Its config records the pruning, because rounding produces zeros as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import ImpossibleCut
from trundle.model.anatomy import _BY_MODEL_TYPE, _Conv1D, terms
from trundle.model.layout import Layout, Parameter, layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

_PRUNED = "trundle_pruned"
"""The entry in the config of a pruned backbone."""
BLOCK = 32
_LOWEST, _HIGHEST = -8, 7
_ON_GRID = 0.05
"""How far value / scale may be from a whole number; bfloat16 stores a rounded weight this closely."""
_SMALLEST = 4096
"""A matrix with fewer values stays float, because it hardly counts."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One linear layer inside a block."""

    name: str
    """The name of its module in the backbone."""
    block: int
    inside: str
    """The name of its module in the block."""
    rows: str
    columns: str
    transposed: bool
    """Whether it is stored as (in, out)."""

    @property
    def parameter(self) -> str:
        """The name of its weight in the backbone."""
        return f"{self.name}.weight"

    def oriented(self, tensor: Tensor) -> Tensor:
        """Convert the weight, or a tensor of its shape, to (out, in), or back."""
        return tensor.T if self.transposed else tensor


def prunable(layout: Layout, *, attention: bool = False) -> tuple[Matrix, ...]:
    """Return the matrices of the MLPs, and of attention if requested, in the order of the layers."""
    parts = ("mlp", "attention") if attention else ("mlp",)
    found = []
    for parameter in layout.parameters:
        if parameter.block is None or not parameter.multiplies or parameter.part not in parts:
            continue
        transposed = isinstance(parameter.member, _Conv1D)
        rows, columns = reversed(parameter.axes) if transposed else parameter.axes
        name, block = parameter.name.removesuffix(".weight"), parameter.block
        inside = name.removeprefix(f"{layout.family.blocks}.{block}.")
        matrix = Matrix(
            name=name, block=block, inside=inside, rows=rows, columns=columns, transposed=transposed
        )
        found.append(matrix)
    if not any("mlp" in (*terms(matrix.rows), *terms(matrix.columns)) for matrix in found):
        raise ImpossibleCut(f"the {layout.family.name} row in trundle/model/anatomy.py has no MLP; add it")
    return tuple(found)


def weight_of(backbone: nn.Module, matrix: Matrix) -> Tensor:
    """Return the weight as (out, in), sharing memory with the model."""
    return matrix.oriented(backbone.get_parameter(matrix.parameter).detach())


def _has_bias(backbone: nn.Module, matrix: Matrix) -> bool:
    """Return whether a linear layer has a bias."""
    return getattr(backbone.get_submodule(matrix.name), "bias", None) is not None


def block_weights(model: SentenceTransformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every matrix of attention and MLP inside the blocks, by module name.

    A static model and a model of an unknown family, which can't be pruned, have none.
    """
    if static_table(model) is not None:
        return
    backbone = transformer_of(model).model
    if backbone.config.model_type not in _BY_MODEL_TYPE:
        return
    for matrix in prunable(layout_of(backbone), attention=True):
        yield matrix.name, backbone.get_parameter(matrix.parameter)


def with_zeros(model: SentenceTransformer, gone: dict[str, Tensor]) -> None:
    """Set weights to zero in place where `gone`, by matrix name and as (out, in), is true."""
    backbone = transformer_of(model).model
    with torch.no_grad():
        for matrix in prunable(layout_of(backbone), attention=True):
            if matrix.name in gone:
                weight = backbone.get_parameter(matrix.parameter)
                weight.masked_fill_(matrix.oriented(gone[matrix.name]).to(weight.device), 0.0)
    setattr(backbone.config, _PRUNED, True)


def is_pruned(model: SentenceTransformer) -> bool:
    """Return whether the model's config records that it was pruned."""
    return static_table(model) is None and bool(getattr(transformer_of(model).model.config, _PRUNED, False))


def fits_grid(rows: int, columns: int) -> bool:
    """Return whether a matrix is rounded to int4: its inputs divide into blocks, and it is large."""
    return columns % BLOCK == 0 and rows * columns >= _SMALLEST


def on_grid(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix (rows, inputs) as codes −8 to 7 (rows, blocks, 32) and scales (rows, blocks, 1).

    A block that lies on a grid already keeps it. For another one the largest value becomes −8.
    """
    blocks = matrix.detach().float().reshape(*matrix.shape[:-1], -1, BLOCK)
    scales = _scale_for(blocks, _LOWEST)
    codes = blocks / scales
    left = torch.nonzero(_off_grid(codes).any(-1).flatten()).flatten()
    flat, wide = blocks.reshape(-1, BLOCK), scales.reshape(-1, 1)
    for largest in range(_HIGHEST, 0, -1):
        if len(left) == 0:
            break
        tried = _scale_for(flat[left], largest)
        fits = ~_off_grid(flat[left] / tried).any(-1)
        wide[left[fits]] = tried[fits]
        left = left[~fits]
    return (blocks / scales).round().clamp(_LOWEST, _HIGHEST), scales


def _scale_for(blocks: Tensor, code: float) -> Tensor:
    """Return the scales, as they are stored, that give the largest value of each block this code."""
    low, high = torch.aminmax(blocks, dim=-1, keepdim=True)
    scales = (torch.where(high >= -low, high, low) / code).half().float()
    return torch.where(scales == 0, torch.ones_like(scales), scales)


def _off_grid(ratios: Tensor) -> Tensor:
    codes = ratios.round()
    return ((ratios - codes).abs() > _ON_GRID) | (codes < _LOWEST) | (codes > _HIGHEST)


def _is_on_grid(matrix: Tensor) -> bool:
    """Return whether a matrix (rows, inputs) is exactly what its codes and scales give, as after rounding."""
    blocks = matrix.detach().float().reshape(*matrix.shape[:-1], -1, BLOCK)
    _, scales = on_grid(matrix)
    return not bool(_off_grid(blocks / scales).any())


def _rounded(matrix: Tensor, scales: Tensor | None = None) -> Tensor:
    """The matrix on these scales, or on those that give the largest value of each block the lowest code."""
    blocks = matrix.detach().float().reshape(*matrix.shape[:-1], -1, BLOCK)
    scales = _scale_for(blocks, _LOWEST) if scales is None else scales
    codes = (blocks / scales).round_().clamp_(_LOWEST, _HIGHEST)
    return codes.mul_(scales).flatten(-2).to(matrix.dtype)


def _rounds(parameter: Parameter) -> bool:
    """Whether int4 rounds a parameter: a matrix before pooling, or the token table."""
    if parameter.multiplies:
        return parameter.part != "pooler"
    return len(parameter.axes) == 2 and parameter.axes[0] == "vocab"


def grid_weights(model: SentenceTransformer) -> list[tuple[nn.Parameter, bool]]:
    """Return the weights that int4 rounds, each with whether it is stored as (in, out)."""
    table = static_table(model)
    found: list[tuple[nn.Parameter, bool]] = []
    if table is not None:
        found += [(weight, False) for weight in table.parameters()]
    else:
        backbone = transformer_of(model).model
        for parameter in layout_of(backbone).parameters:
            if _rounds(parameter):
                weight = backbone.get_parameter(parameter.name)
                found.append((weight, isinstance(parameter.member, _Conv1D)))
    for module in list(model)[1:]:
        found += [(weight, False) for weight in module.parameters() if weight.ndim == 2]
    return [
        (weight, transposed)
        for weight, transposed in found
        if fits_grid(*(reversed(weight.shape) if transposed else weight.shape))
    ]


def token_rows(model: SentenceTransformer) -> int:
    """Return the number of rows of the token table."""
    if (static := static_table(model)) is not None:
        return int(static.num_embeddings)
    table = transformer_of(model).model.get_input_embeddings()
    return len(cast("Tensor", table.weight))


def grid_scales(model: SentenceTransformer) -> list[Tensor]:
    """Return the scales of all weights that int4 rounds, to be kept while the weights change."""
    return [on_grid(weight.T if transposed else weight)[1] for weight, transposed in grid_weights(model)]


@contextmanager
def computing_on_grid(model: SentenceTransformer, scales: Sequence[Tensor] | None = None) -> Iterator[None]:
    """Compute with rounded weights inside the block; gradients computed there apply to the exact ones.

    Without `scales` each weight's own are computed anew.
    """
    weights = grid_weights(model)
    exact = [weight.data for weight, _ in weights]
    put_on_grid(weights, scales)
    try:
        yield
    finally:
        for (weight, _), data in zip(weights, exact, strict=True):
            weight.data = data


def put_on_grid(weights: Sequence[tuple[nn.Parameter, bool]], scales: Sequence[Tensor] | None = None) -> None:
    """Round weights to the int4 grid, in place."""
    given: Sequence[Tensor | None] = scales or [None] * len(weights)
    for (weight, transposed), kept in zip(weights, given, strict=True):
        weight.data = (
            _rounded(weight.data.T, kept).T.contiguous() if transposed else _rounded(weight.data, kept)
        )
