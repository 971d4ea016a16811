"""What a student is pulled towards, as pure functions of tensors.

`leaf` is the loss of LEAF and needs only vectors. The other three are what it is compared with; they look inside both
models, so both must read the same tokens. Padding never counts: `mask` is 1 for a real token and 0 for padding.

What this is not: nothing here runs a model or knows where its hidden states are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from trundle.errors import BadInput


def leaf(student: Tensor, target: Tensor) -> Tensor:
    """LEAF: the mean distance ‖y − ŷ‖₂ of a text, not squared.

    At distance zero the slope of a norm is undefined; torch's vector norm gives 0 there, which is what is wanted.
    """
    _same_shape("vectors", student, target)
    distances: Tensor = torch.linalg.vector_norm(student.float() - target.float(), dim=-1)
    return distances.mean()


def distilbert(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """DistilBERT: 1 − cosine of the last hidden states, averaged over the real tokens of the batch."""
    _same_shape("hidden states", student, teacher)
    cosine = functional.cosine_similarity(student.float(), teacher.float(), dim=-1)
    return _mean_where(1 - cosine, mask)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Queries, keys and values of a layer, each of shape (texts, heads, tokens, width of a head)."""

    query: Tensor
    key: Tensor
    value: Tensor


def minilm(student: Heads, teacher: Heads, mask: Tensor) -> Tensor:
    """MiniLM: attention and value relations of the last layer; heads may differ in width but not in number."""
    attention = _relation_divergence((student.query, student.key), (teacher.query, teacher.key), mask)
    values = _relation_divergence((student.value, student.value), (teacher.value, teacher.value), mask)
    return attention + values


def _relation_divergence(
    student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor], mask: Tensor
) -> Tensor:
    """KL(teacher ‖ student) of how each token relates to all others: mean over heads and tokens, then over texts."""
    ours, theirs = _relations(*student, mask), _relations(*teacher, mask)
    _same_shape("attention heads", ours, theirs)
    real = mask.bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    per_pair = (theirs.exp() * (theirs - ours)).masked_fill(~pairs, 0.0)
    per_text = per_pair.sum(dim=(1, 2, 3)) / (ours.shape[1] * real.sum(dim=1).clamp(min=1))
    return per_text.mean()


def _relations(left: Tensor, right: Tensor, mask: Tensor) -> Tensor:
    """Log-softmax over the real tokens of left·rightᵀ/√width. Padding gets a finite floor: −∞ would make NaN slopes."""
    scores = left.float() @ right.float().transpose(-1, -2) / math.sqrt(left.shape[-1])
    floor = torch.finfo(scores.dtype).min
    return scores.masked_fill(~mask.bool()[:, None, None, :], floor).log_softmax(dim=-1)


def tinybert(
    student_states: Sequence[Tensor],
    teacher_states: Sequence[Tensor],
    student_scores: Sequence[Tensor],
    teacher_scores: Sequence[Tensor],
    mask: Tensor,
    *,
    layers: Sequence[int],
) -> Tensor:
    """TinyBERT: squared errors of embeddings, hidden states and attention scores (before softmax), summed over layers.

    `states` start with the embeddings; `layers[i]` is the teacher's layer, counted from 1, that the student's layer
    i + 1 imitates. A student of another width gives its states already projected to the teacher's.
    """
    if len(student_states) != len(layers) + 1 or len(student_scores) != len(layers):
        raise BadInput(f"the layer map has {len(layers)} entries; give one for each layer of the student")
    if not all(1 <= layer <= len(teacher_scores) for layer in layers):
        raise BadInput(
            f"the layer map {list(layers)} must name layers of the teacher, 1 to {len(teacher_scores)}"
        )
    real = mask.bool()
    pairs = real[:, None, :, None] & real[:, None, None, :]
    loss = torch.zeros((), device=mask.device)
    for state, layer in zip(student_states, [0, *layers], strict=True):
        loss = loss + _squared_error("hidden states", state, teacher_states[layer], real[:, :, None])
    for scores, layer in zip(student_scores, layers, strict=True):
        loss = loss + _squared_error("attention heads", scores, teacher_scores[layer - 1], pairs)
    return loss


def uniform_layers(student: int, teacher: int) -> tuple[int, ...]:
    """Which teacher layer each student layer imitates when they are spread evenly; the last imitates the last."""
    return tuple(-(-layer * teacher // student) for layer in range(1, student + 1))


def _squared_error(what: str, student: Tensor, teacher: Tensor, where: Tensor) -> Tensor:
    _same_shape(what, student, teacher)
    keep = where.expand_as(student)
    # Padding may hold −∞ scores: it is replaced before the subtraction, so that no NaN enters the slope.
    error = student.float().masked_fill(~keep, 0.0) - teacher.float().masked_fill(~keep, 0.0)
    return _mean_where(error.square(), keep)


def _mean_where(values: Tensor, where: Tensor) -> Tensor:
    keep = where.bool()
    return values.masked_fill(~keep, 0.0).sum() / keep.sum().clamp(min=1)


def _same_shape(what: str, student: Tensor, teacher: Tensor) -> None:
    if student.shape != teacher.shape:
        raise BadInput(
            f"the student's {what} have shape {tuple(student.shape)} and the teacher's {tuple(teacher.shape)}; "
            "this loss needs them alike, choose another loss or student"
        )
