"""Losses that learn from labels, as pure functions of vectors: which texts belong together and which do not.

`infonce` ranks the right document above all others of the batch. `angle` and `cosine` order labelled pairs: whatever
pair has the higher label shall have the higher similarity. All of them see directions only, never lengths.

What this is not: nothing here knows texts, batches or models.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from trundle.errors import BadInput

TEMPERATURE = 0.05


def infonce(
    queries: Tensor,
    documents: Tensor,
    answers: Tensor,
    *,
    excluded: Tensor | None = None,
    temperature: float = TEMPERATURE,
) -> Tensor:
    """The mean cross-entropy of finding each query's document among all documents by cosine over temperature.

    `answers[i]` is the row of query i's document. Where `excluded` is true, a document is no rival for a query.
    """
    with torch.autocast(queries.device.type, enabled=False):
        scores = directions(queries) @ directions(documents).T / temperature
    if excluded is not None:
        scores = scores.masked_fill(excluded, -torch.inf)
    return functional.cross_entropy(scores, answers)


def cosine(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """CoSENT: pairs ordered by their cosine."""
    return ordering((directions(left) * directions(right)).sum(dim=-1) / temperature, labels)


def distil(left: Tensor, right: Tensor, like: tuple[Tensor, Tensor]) -> Tensor:
    """Vanilla distillation: the squared error of pairs' cosines against those of a teacher's vectors."""
    ours = (directions(left) * directions(right)).sum(dim=-1)
    theirs = (directions(like[0]) * directions(like[1])).sum(dim=-1)
    return functional.mse_loss(ours, theirs)


def angle(left: Tensor, right: Tensor, labels: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """AnglE: pairs ordered by the angle between two complex vectors, whose slope does not fade where a cosine's does."""
    return ordering(angle_similarity(left, right) / temperature, labels)


def angle_similarity(left: Tensor, right: Tensor) -> Tensor:
    """|cos(x, y) + Σ(bc − ad)/(‖x‖‖y‖)| with x = a + ib and y = c + id, halves of a vector being its two parts."""
    if left.shape[-1] % 2:
        raise BadInput(
            f"the angle loss splits vectors in halves, and {left.shape[-1]} is odd; use the objective infonce or cosine"
        )
    x, y = directions(left), directions(right)
    (a, b), (c, d) = x.chunk(2, dim=-1), y.chunk(2, dim=-1)
    return ((x * y).sum(dim=-1) + (b * c - a * d).sum(dim=-1)).abs()


def ordering(scores: Tensor, labels: Tensor) -> Tensor:
    """log(1 + Σ exp(s_i − s_j)) over all pairs i, j of scores in the wrong order's way: label_i < label_j."""
    differences = scores[:, None] - scores[None, :]
    wrong_way = labels[:, None] < labels[None, :]
    terms = differences.masked_fill(~wrong_way, -torch.inf).flatten()
    return torch.cat([terms.new_zeros(1), terms]).logsumexp(dim=0)


def directions(vectors: Tensor) -> Tensor:
    """Vectors of length 1, in full precision: half precision can't tell cosines of near texts apart."""
    return functional.normalize(vectors.float(), dim=-1)
