"""The matrices whose weights can be pruned, each seen as (out, in) whatever way its family stores it.

A model carries its mask in its zeros: a weight that is exactly zero in one of these matrices was pruned, and stays so. Its
config says that it was, since rounding leaves zeros, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from trundle.errors import ImpossibleCut
from trundle.model.anatomy import Conv1D, terms
from trundle.model.layout import Layout, layout_of
from trundle.model.static import static_table
from trundle.model.surgery import transformer_of

PRUNED = "trundle_pruned"
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
    setattr(backbone.config, PRUNED, True)


def says_pruned(model: SentenceTransformer) -> bool:
    """Whether the model's zeros were put there by pruning, by its own word."""
    return static_table(model) is None and bool(getattr(transformer_of(model).model.config, PRUNED, False))
