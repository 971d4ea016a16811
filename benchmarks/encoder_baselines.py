"""Other ways to lose parameters, all inside the layers, to compare a cut vocabulary with. None of them is a step.

    magnitude            the smallest weights of all layers become zero
    low_rank             every matrix becomes a product of two thin ones, by its singular values
    low_rank_and_sparse  a product of two thin ones, and the rows of what it misses that are largest: LoSparse's
                         form, chosen at once and not, as there, little by little while it trains

Each takes a model and how many parameters are to go, and gives a new model whose vectors can be trained on.
"""

from __future__ import annotations

import math

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.model.heads import copy_of
from trundle.model.layout import layout_of
from trundle.model.matrices import Matrix, prunable
from trundle.model.surgery import transformer_of

LOW_RANK_SHARE = 0.5
"""Which part of what is left goes into the thin matrices, where rows are kept beside them."""


class Factored(nn.Module):
    """A linear map as right · left, with some rows beside them that are added."""

    places: Tensor

    def __init__(
        self, left: Tensor, right: Tensor, bias: Tensor | None, rows: Tensor, places: Tensor
    ) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(left), nn.Parameter(right)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.rows = nn.Parameter(rows) if len(rows) else None
        self.register_buffer("places", places)

    def forward(self, inputs: Tensor) -> Tensor:
        """The map, without ever making the whole matrix."""
        outputs = nn.functional.linear(nn.functional.linear(inputs, self.right), self.left, self.bias)
        if self.rows is None:
            return outputs
        added = nn.functional.linear(inputs, self.rows)
        return outputs.index_add(-1, self.places, added.to(outputs.dtype))


def matrices_of(model: SentenceTransformer) -> tuple[Matrix, ...]:
    return prunable(layout_of(transformer_of(model).model), attention=True)


def share_left(model: SentenceTransformer, remove: int) -> float:
    """What share of the layers' matrices may stay."""
    backbone = transformer_of(model).model
    total = sum(backbone.get_parameter(matrix.parameter).numel() for matrix in matrices_of(model))
    if remove >= total:
        raise SystemExit(f"the layers have {total:,} weights in their matrices, so {remove:,} can't go")
    return 1 - remove / total


def magnitude(model: SentenceTransformer, remove: int) -> SentenceTransformer:
    """As many zeros as parameters are to go; the smallest weights of all layers together."""
    small = copy_of(model)
    backbone = transformer_of(small).model
    weights = [backbone.get_parameter(matrix.parameter) for matrix in matrices_of(small)]
    with torch.no_grad():
        sizes = torch.cat([weight.abs().flatten() for weight in weights])
        gone = torch.zeros_like(sizes, dtype=torch.bool)
        gone[sizes.argsort()[:remove]] = True
        for weight, part in zip(
            weights, torch.split(gone, [weight.numel() for weight in weights]), strict=True
        ):
            weight.masked_fill_(part.view_as(weight), 0.0)
    return small


def low_rank(model: SentenceTransformer, remove: int) -> SentenceTransformer:
    """Every matrix keeps the same share of its parameters, all of it in two thin matrices."""
    return _factored(model, share_left(model, remove), rank_share=1.0)


def low_rank_and_sparse(model: SentenceTransformer, remove: int) -> SentenceTransformer:
    """Every matrix keeps the same share of its parameters, a part of it in whole rows."""
    return _factored(model, share_left(model, remove), rank_share=LOW_RANK_SHARE)


def _factored(model: SentenceTransformer, share: float, *, rank_share: float) -> SentenceTransformer:
    small = copy_of(model)
    backbone = transformer_of(small).model
    for matrix in matrices_of(small):
        weight = matrix.oriented(backbone.get_parameter(matrix.parameter).detach())
        made = factor(weight, share, rank_share=rank_share)
        bias = getattr(backbone.get_submodule(matrix.name), "bias", None)
        backbone.set_submodule(matrix.name, Factored(made[0], made[1], bias, made[2], made[3]))
    return small


def factor(weight: Tensor, share: float, *, rank_share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The thin matrices, the rows beside them and their places, with a share of the parameters in all."""
    outputs, inputs = weight.shape
    budget = math.floor(share * outputs * inputs)
    rank = max(1, math.floor(rank_share * budget / (outputs + inputs)))
    left, values, right = torch.linalg.svd(weight.float(), full_matrices=False)
    scale = values[:rank].sqrt()
    thin = left[:, :rank] * scale, scale[:, None] * right[:rank]
    spare = 0 if rank_share == 1 else max(0, budget - rank * (outputs + inputs)) // inputs
    missed = weight.float() - thin[0] @ thin[1]
    places = missed.norm(dim=1).argsort(descending=True)[:spare]
    return thin[0].contiguous(), thin[1].contiguous(), missed[places], places


BASELINES = {"magnitude": magnitude, "low-rank": low_rank, "low-rank+sparse": low_rank_and_sparse}
