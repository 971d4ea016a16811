"""Weights on a grid of four bits: what an int4 file can hold, and which weights of a model such a file holds so.

A block of 32 weights that meet neighbouring inputs shares one scale, stored as float16. The weight of the block that is farthest from
zero stands at −8, so all sixteen values are used, and what is on the grid already stays exactly where it is: rounding twice
is rounding once, so a model that has learned on the grid loses nothing when it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from trundle.model.anatomy import Conv1D
from trundle.model.layout import layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

BLOCK = 32
LOWEST, HIGHEST = -8, 7
SMALLEST = 4096
"""Numbers under which a matrix stays in float: it weighs nothing."""


def fits_grid(rows: int, columns: int) -> bool:
    """Whether a matrix with so many inputs a row is cut into whole blocks, and large enough to be."""
    return columns % BLOCK == 0 and rows * columns >= SMALLEST


def on_grid(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Codes from −8 to 7 as (rows, blocks, 32) and scales as (rows, blocks, 1), for a matrix of (rows, inputs)."""
    blocks = matrix.detach().float().reshape(*matrix.shape[:-1], -1, BLOCK)
    farthest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = (farthest / LOWEST).half().float()
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (blocks / scales).round().clamp(LOWEST, HIGHEST), scales


def rounded(matrix: Tensor) -> Tensor:
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
        weight.data = rounded(weight.data.T).T.contiguous() if turned else rounded(weight.data)


def grid_bytes(shape: tuple[int, ...]) -> int:
    """What a matrix of (rows, inputs) weighs in the file: half a byte a number, two a block."""
    count = math.prod(shape)
    return count // 2 + 2 * count // BLOCK
