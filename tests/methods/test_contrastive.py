"""The losses against sentence-transformers' own, on random vectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.losses import (
    AnglELoss,
    CoSENTLoss,
    MultipleNegativesRankingLoss,
)

from trundle.errors import BadInput
from trundle.methods.contrast.contrastive import _angle, _cosine, _infonce

PicoModel = Callable[[str], SentenceTransformer]


def vectors(rows: int, seed: int, width: int = 16) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("temperature", [0.05, 0.02])
def test_infonce_is_the_ranking_loss_of_the_library(
    pico_model: PicoModel, negatives: int, temperature: float
):
    queries, positive = vectors(8, 1).requires_grad_(), vectors(8, 2)
    hard = [vectors(8, 3 + number) for number in range(negatives)]
    theirs = MultipleNegativesRankingLoss(pico_model("bert"), scale=1 / temperature)
    expected = theirs.compute_loss_from_embeddings([queries, positive, *hard], None)
    (slope,) = torch.autograd.grad(expected, queries)
    found = _infonce(queries, torch.cat([positive, *hard]), torch.arange(8), temperature=temperature)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, queries)[0], slope)


@pytest.mark.parametrize(("ours", "theirs"), [(_cosine, CoSENTLoss), (_angle, AnglELoss)])
@pytest.mark.parametrize("labels", [[1.0, 0.0, 1.0, 0.0, 0.0], [0.1, 0.9, 0.4, 0.4, 0.7], [1.0] * 5])
def test_orders_of_pairs_are_those_of_the_library(pico_model: PicoModel, ours, theirs, labels: list[float]):
    left, right, given_labels = vectors(5, 1).requires_grad_(), vectors(5, 2), torch.tensor(labels)
    expected = theirs(pico_model("bert")).compute_loss_from_embeddings([left, right], given_labels)
    (slope,) = torch.autograd.grad(expected, left, allow_unused=True)
    found = ours(left, right, given_labels)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, left)[0], slope)


def test_excluded_documents_do_not_count():
    queries, documents = vectors(3, 1), vectors(5, 2)
    excluded = torch.zeros(3, 5, dtype=torch.bool)
    excluded[:, 4] = True
    answers = torch.arange(3)
    torch.testing.assert_close(
        _infonce(queries, documents, answers, excluded=excluded), _infonce(queries, documents[:4], answers)
    )


@given(scale=st.floats(0.01, 100.0), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_lengths_of_vectors_do_not_count(scale: float, seed: int):
    queries, documents, labels = vectors(4, seed), vectors(4, seed + 100), torch.tensor([1.0, 0.0, 1.0, 0.0])
    answers = torch.arange(4)
    torch.testing.assert_close(
        _infonce(queries * scale, documents, answers), _infonce(queries, documents, answers)
    )
    for loss in (_angle, _cosine):
        torch.testing.assert_close(loss(queries, documents * scale, labels), loss(queries, documents, labels))


def test_autocast_does_not_round_the_scores():
    queries, documents, answers = vectors(4, 1), vectors(4, 2), torch.arange(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = _infonce(queries, documents, answers)
    assert found == _infonce(queries, documents, answers)


def test_the_angle_needs_an_even_width():
    with pytest.raises(BadInput, match="15 is odd"):
        _angle(vectors(2, 1, width=15), vectors(2, 2, width=15), torch.tensor([0.0, 1.0]))
