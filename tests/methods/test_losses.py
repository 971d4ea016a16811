from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trundle.errors import BadInput
from trundle.methods.align.imitation import _distilbert, _Heads, _minilm, _tinybert, _uniform_layers
from trundle.methods.align.leaf import _leaf

TEXTS, HEADS, TOKENS = 3, 4, 6
LENGTHS = [6, 2, 4]
MASK = torch.tensor([[1] * length + [0] * (TOKENS - length) for length in LENGTHS])


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def heads(seed: int, width: int) -> _Heads:
    query, key, value = (noise(seed + part, TEXTS, HEADS, TOKENS, width) for part in range(3))
    return _Heads(query=query, key=key, value=value)


def test_leaf_is_the_mean_distance_not_squared():
    student, target = noise(0, 5, 8), noise(1, 5, 8)
    expected = functional.pairwise_distance(student, target, eps=0.0).mean()
    torch.testing.assert_close(_leaf(student, target), expected)
    assert _leaf(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.zeros(2, 2)).item() == 2.5


def test_leaf_has_the_right_gradient():
    student, target = (noise(seed, 4, 6).detach() for seed in (0, 1))
    student.requires_grad_()
    _leaf(student, target).backward()
    step = 1e-3
    for row, column in [(0, 0), (1, 3), (3, 5)]:
        moved = torch.zeros(4, 6)
        moved[row, column] = step
        rise = _leaf((student + moved).double(), target.double()) - _leaf(
            (student - moved).double(), target.double()
        )
        assert student.grad is not None
        assert student.grad[row, column].item() == pytest.approx(rise.item() / (2 * step), abs=1e-3)


@pytest.mark.parametrize("distance", [0.0, 1e-30, 1e-12])
def test_leaf_has_a_finite_gradient_at_and_near_zero(distance: float):
    target = torch.ones(2, 3)
    student = (target * torch.tensor([[1.0], [2.0]])).requires_grad_()
    zeros = torch.zeros(2, 3)
    for ours, theirs in ((student, target), (torch.full((2, 3), distance, requires_grad=True), zeros)):
        _leaf(ours, theirs).backward()
        assert ours.grad is not None
        assert ours.grad.isfinite().all()
        assert ours.grad.norm(dim=1).max() <= 0.5001
    assert student.grad is not None
    assert student.grad[0].tolist() == [0.0, 0.0, 0.0]


def test_leaf_keeps_its_precision_when_the_vectors_are_bf16():
    student = torch.full((1, 768), 0.0361, dtype=torch.bfloat16)
    target = torch.full((1, 768), 0.0361)
    expected = (student.double() - target.double()).norm().item()
    assert _leaf(student, target).item() == pytest.approx(expected, rel=1e-4)


def test_distilbert_is_torchs_cosine_loss_over_real_tokens():
    student, teacher = noise(0, TEXTS, TOKENS, 8), noise(1, TEXTS, TOKENS, 8)
    real = MASK.bool()
    expected = torch.nn.CosineEmbeddingLoss()(student[real], teacher[real], torch.ones(int(real.sum())))
    torch.testing.assert_close(_distilbert(student, teacher, MASK), expected)


def relation_by_hand(student: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> Tensor:
    """Text by text without any padding, with torch's own divergence."""
    total = torch.zeros(())
    for text, length in enumerate(LENGTHS):
        sides = []
        for left, right in (student, teacher):
            scores = left[text, :, :length] @ right[text, :, :length].mT / math.sqrt(left.shape[-1])
            sides.append(scores.log_softmax(-1).reshape(-1, length))
        total = total + functional.kl_div(sides[0], sides[1], reduction="batchmean", log_target=True)
    return total / TEXTS


def test_minilm_is_torchs_divergence_of_both_relations_with_heads_of_other_widths():
    student, teacher = heads(0, 5), heads(10, 9)
    expected = relation_by_hand((student.query, student.key), (teacher.query, teacher.key))
    expected = expected + relation_by_hand((student.value, student.value), (teacher.value, teacher.value))
    torch.testing.assert_close(_minilm(student, teacher, MASK), expected)
    assert _minilm(student, student, MASK).item() == pytest.approx(0.0, abs=1e-6)


def test_tinybert_is_torchs_squared_error_through_the_map():
    layers = _uniform_layers(2, 4)
    ours, theirs = (
        [noise(seed, TEXTS, TOKENS, 8) for seed in range(first, first + n)] for first, n in ((0, 3), (20, 5))
    )
    scores, their_scores = (
        [noise(seed, TEXTS, HEADS, TOKENS, TOKENS) for seed in range(first, first + n)]
        for first, n in ((40, 2), (60, 4))
    )
    real = MASK.bool()
    pairs = real[:, None, :, None].expand(-1, HEADS, -1, TOKENS) & real[:, None, None, :]
    expected = sum(functional.mse_loss(ours[i][real], theirs[j][real]) for i, j in [(1, 2), (2, 4)])
    expected += sum(
        functional.mse_loss(scores[i][pairs], their_scores[j][pairs]) for i, j in [(0, 1), (1, 3)]
    )
    found = _tinybert(ours, theirs, scores, their_scores, MASK, layers=layers)
    torch.testing.assert_close(found, expected / 4)


def test_padding_changes_neither_loss_nor_gradient():
    """Losses and gradients do not depend on the values in the padding, not even on infinity."""
    states, scores = noise(0, TEXTS, TOKENS, 8), noise(1, TEXTS, HEADS, TOKENS, TOKENS)
    target, target_scores = (
        noise(2, TEXTS, TOKENS, 8).detach(),
        noise(3, TEXTS, HEADS, TOKENS, TOKENS).detach(),
    )
    padding = ~MASK.bool()
    spoiled = target_scores.masked_fill(padding[:, None, None, :], -math.inf)
    clean = _tinybert([states] * 2, [target] * 2, [scores], [target_scores], MASK, layers=[1])
    dirty = _tinybert([states] * 2, [target] * 2, [scores], [spoiled], MASK, layers=[1])
    assert clean.item() == dirty.item()
    student, teacher = heads(0, 5), heads(10, 5)
    loss = dirty + _distilbert(states, target, MASK) + _minilm(student, teacher, MASK)
    loss.backward()
    for tensor in (states, scores, student.query, student.key, student.value):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert states.grad is not None
    assert not states.grad[padding].any()
    assert student.value.grad is not None
    assert not student.value.grad.transpose(1, 2)[padding].any()


def test_layer_maps():
    assert _uniform_layers(3, 12) == (4, 8, 12)
    assert _uniform_layers(4, 6) == (2, 3, 5, 6)
    assert _uniform_layers(2, 2) == (1, 2)


def test_models_that_do_not_fit_the_loss_are_named():
    with pytest.raises(BadInput, match=r"vectors have different shapes, \(2, 3\) and \(2, 4\)"):
        _leaf(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(BadInput, match="hidden states"):
        _distilbert(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), torch.ones(1, 2))
    fewer = heads(0, 5)
    fewer = _Heads(query=fewer.query[:, :2], key=fewer.key[:, :2], value=fewer.value[:, :2])
    with pytest.raises(BadInput, match="attention heads"):
        _minilm(fewer, heads(10, 5), MASK)
