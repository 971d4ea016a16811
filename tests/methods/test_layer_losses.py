"""The arithmetic of the curve against the loss of sentence-transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from trundle.methods.depth.curve import LayerCurve, _deeper_dip, _layer_losses, _pick_layers


@pytest.mark.parametrize("negatives", [0, 1, 3])
def test_the_loss_is_the_librarys(negatives: int) -> None:
    torch.manual_seed(negatives)
    texts: Any = [torch.randn(3, 5, 8) for _ in range(2 + negatives)]
    ours = _layer_losses(texts[0], torch.cat(texts[1:], dim=1), scale=20.0)
    reference = MultipleNegativesRankingLoss(model=torch.nn.Identity(), scale=20.0)
    for layer, loss in enumerate(ours):
        expected = reference.compute_loss_from_embeddings([part[layer] for part in texts], None)
        torch.testing.assert_close(loss, expected, atol=1e-5, rtol=1e-5)


def test_the_loss_is_exact_in_half_precision() -> None:
    torch.manual_seed(0)
    queries, candidates = torch.randn(1, 6, 64).bfloat16(), torch.randn(1, 6, 64).bfloat16()
    ours = _layer_losses(queries, candidates)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(
        ours, _layer_losses(queries.double(), candidates.double()), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize(
    ("losses", "small", "large"),
    [
        ([1.0], None, 1),
        ([1.0, 2.0], 1, 2),
        ([2.0, 1.0, 1.5], 1, 2),
        ([5, 3, 4, 9, 8, 2, 3, 7], 2, 6),
        ([5, 3, 3, 9, 8, 2, 2, 7], 2, 6),
        ([8, 7, 6, 5, 4, 3], 3, 6),
    ],
)
def test_small_and_large_are_the_minima_of_the_halves(
    losses: list[float], small: int | None, large: int
) -> None:
    assert _pick_layers(losses) == (small, large)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=40))
def test_each_pick_is_the_lowest_of_its_half(losses: list[float]) -> None:
    small, large = _pick_layers(losses)
    middle = len(losses) // 2
    assert small is not None
    assert 1 <= small <= middle < large <= len(losses)
    assert losses[small - 1] == min(losses[:middle])
    assert losses[large - 1] == min(losses[middle:])


@pytest.mark.parametrize(
    ("losses", "deeper"),
    [
        ([4.28, 4.48, 4.6, 4.5, 4.45, 4.4, 4.37, 4.65, 4.7, 4.8, *[4.9] * 20], 7),  # as SmolLM2-135M's
        ([4.28, *[4.5] * 29], None),  # flat beyond: no dip
        ([4.9, 4.8, 4.7, 4.3, 4.6, 4.7, 4.4, 4.6, *[4.9] * 22], None),  # small is deep enough
        ([4.28, 4.48, 4.3, 4.6], None),  # one of four is no shallow cut
        ([1.0], None),
    ],
)
def test_a_very_shallow_small_has_the_next_dip_named(losses: list[float], deeper: int | None) -> None:
    assert _deeper_dip(losses) == deeper
    advice = LayerCurve(losses=tuple(losses), tuples=1280).advice
    assert (advice is None) is (deeper is None)
    if advice is not None:
        assert "small keeps 1 of 30 layers" in advice
        assert advice.endswith("also try keep 7")
