"""The matrices whose weights can be pruned, each seen as (out, in) whatever way its family stores it.

A model carries its mask in its zeros: a weight that is exactly zero in one of these matrices was pruned, and stays so. Its
config says that it was, since rounding leaves zeros, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from trundle.errors import ImpossibleCut
from trundle.model.anatomy import Conv1D, terms
from trundle.model.layout import Layout, layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

_PRUNED = "trundle_pruned"
"""What the backbone's config says of a model that was pruned."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """One linear map inside a block."""

    name: str
    """Its module's name in the backbone."""
    block: int
    inside: str
    """Its module's name in the block."""
    rows: str
    columns: str
    transposed: bool
    """Whether it is stored as (in, out)."""

    @property
    def parameter(self) -> str:
        """The name of its weight in the backbone."""
        return f"{self.name}.weight"

    def oriented(self, tensor: Tensor) -> Tensor:
        """The weight, or a tensor shaped like it, as (out, in); the same call turns (out, in) back."""
        return tensor.T if self.transposed else tensor


def prunable(layout: Layout, *, attention: bool = False) -> tuple[Matrix, ...]:
    """The matrices of the MLPs, and of attention where asked for, in the order of the layers."""
    parts = ("mlp", "attention") if attention else ("mlp",)
    found = []
    for parameter in layout.parameters:
        if parameter.block is None or not parameter.multiplies or parameter.part not in parts:
            continue
        transposed = isinstance(parameter.member, Conv1D)
        first, second = parameter.axes
        name = parameter.name.removesuffix(".weight")
        found.append(
            Matrix(
                name=name,
                block=parameter.block,
                inside=name.removeprefix(f"{layout.family.blocks}.{parameter.block}."),
                rows=second if transposed else first,
                columns=first if transposed else second,
                transposed=transposed,
            )
        )
    if not any("mlp" in (*terms(matrix.rows), *terms(matrix.columns)) for matrix in found):
        raise ImpossibleCut(
            f"the anatomy of a {layout.family.name} model names no MLP to prune; add its matrices to the row in "
            "trundle/model/anatomy.py"
        )
    return tuple(found)


def weight_of(backbone: nn.Module, matrix: Matrix) -> Tensor:
    """The weight as (out, in), sharing memory with the model."""
    return matrix.oriented(backbone.get_parameter(matrix.parameter).detach())


def has_bias(backbone: nn.Module, matrix: Matrix) -> bool:
    """Whether a map adds something to what it computes."""
    return getattr(backbone.get_submodule(matrix.name), "bias", None) is not None


def put_map(backbone: nn.Module, matrix: Matrix, weight: Tensor, gain: Tensor) -> None:
    """Give a map another weight, as (out, in), and its bias, where it has one, something more; in place."""
    with torch.no_grad():
        weight_of(backbone, matrix).copy_(weight)
        if has_bias(backbone, matrix):
            bias = backbone.get_parameter(f"{matrix.name}.bias")
            bias.add_(gain.to(bias))


def block_weights(model: SentenceTransformer) -> Iterator[tuple[str, nn.Parameter]]:
    """Every matrix of attention and MLP inside the blocks, by the name of its module; a static model has none."""
    if static_table(model) is not None:
        return
    backbone = transformer_of(model).model
    for matrix in prunable(layout_of(backbone), attention=True):
        yield matrix.name, backbone.get_parameter(matrix.parameter)


def with_zeros(model: SentenceTransformer, gone: dict[str, Tensor]) -> None:
    """Set weights of a model to zero in place: by matrix name, as (out, in), where `gone` is true."""
    backbone = transformer_of(model).model
    with torch.no_grad():
        for matrix in prunable(layout_of(backbone), attention=True):
            if matrix.name in gone:
                weight = backbone.get_parameter(matrix.parameter)
                weight.masked_fill_(matrix.oriented(gone[matrix.name]).to(weight.device), 0.0)
    setattr(backbone.config, _PRUNED, True)


def says_pruned(model: SentenceTransformer) -> bool:
    """Whether the model's zeros were put there by pruning, by its own word."""
    return static_table(model) is None and bool(getattr(transformer_of(model).model.config, _PRUNED, False))


BLOCK = 32
_LOWEST, _HIGHEST = -8, 7
_SMALLEST = 4096
"""Numbers under which a matrix stays in float: it weighs nothing."""


def fits_grid(rows: int, columns: int) -> bool:
    """Whether a matrix with so many inputs a row is cut into whole blocks, and large enough to be."""
    return columns % BLOCK == 0 and rows * columns >= _SMALLEST


def on_grid(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from −8 to 7 as (rows, blocks, 32) and scales as (rows, blocks, 1), for a matrix of (rows, inputs)."""
    blocks = matrix.detach().float().reshape(*matrix.shape[:-1], -1, BLOCK)
    farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = (farthest / _LOWEST).half().float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (blocks / scales).round().clamp(_LOWEST, _HIGHEST), scales


def _rounded(matrix: Tensor) -> Tensor:
    """The nearest matrix on the grid."""
    codes, scales = on_grid(matrix)
    return (codes * scales).flatten(-2).to(matrix.dtype)


def grid_weights(model: SentenceTransformer) -> list[tuple[nn.Parameter, bool]]:
    """The token table and every matrix that is multiplied by, each with whether its inputs lie along the first axis."""
    table = static_table(model)
    if table is None:
        found = _backbone_weights(transformer_of(model).model)
    else:
        found = [(weight, False) for weight in table.parameters()]
    for module in list(model)[1:]:
        found += [(weight, False) for weight in module.parameters() if weight.ndim == 2]
    return [
        (weight, turned)
        for weight, turned in found
        if fits_grid(*(reversed(weight.shape) if turned else weight.shape))
    ]


def _backbone_weights(backbone: PreTrainedModel) -> list[tuple[nn.Parameter, bool]]:
    found: list[tuple[nn.Parameter, bool]] = []
    for parameter in layout_of(backbone).parameters:
        looked_up = len(parameter.axes) == 2 and parameter.axes[0] == "vocab"
        if looked_up or (parameter.multiplies and parameter.part != "pooler"):
            weight = backbone.get_parameter(parameter.name)
            found.append((weight, isinstance(parameter.member, Conv1D)))
    return found


def token_rows(model: SentenceTransformer) -> int:
    """How many rows the token table has."""
    if (table := static_table(model)) is not None:
        return int(table.num_embeddings)
    return layout_of(transformer_of(model).model).sizes["vocab"]


@contextmanager
def computing_on_grid(model: SentenceTransformer) -> Iterator[None]:
    """While the block runs, the model computes with rounded weights; a gradient taken inside falls on the exact ones."""
    weights = grid_weights(model)
    exact = [weight.data for weight, _ in weights]
    put_on_grid(weights)
    try:
        yield
    finally:
        for (weight, _), data in zip(weights, exact, strict=True):
            weight.data = data


def put_on_grid(weights: Sequence[tuple[nn.Parameter, bool]]) -> None:
    """Replace weights by rounded ones."""
    for weight, turned in weights:
        weight.data = _rounded(weight.data.T).T.contiguous() if turned else _rounded(weight.data)


def _grid_bytes(shape: tuple[int, ...]) -> int:
    """What a matrix of (rows, inputs) weighs in the file: half a byte a number, two a block."""
    count = math.prod(shape)
    return count // 2 + 2 * count // BLOCK
