from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from trundle.methods.weights.pruning import (
    _BINS,
    _alignment,
    _best_neurons,
    _choose,
    _count_alignment,
    _dai,
    _how_many,
    _lowest,
    _lowest_in_rows,
    _neuron_scores,
    _on_one_scale,
    _random_scores,
    _two_of_four,
    _wanda,
)
from trundle.records import WEIGHTS_FILE, PrunedMatrix, WeightMap, read_weight_map

MATRICES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 7), st.integers(1, 9)),
    elements=st.floats(-3, 3, width=32).map(lambda value: round(value * 4) / 4),
)
"""Round values, so that many are equal."""


def test_dai_is_the_formula_weight_by_weight() -> None:
    torch.manual_seed(0)
    weight, general, domain, s = torch.randn(3, 5), torch.rand(3, 5), torch.rand(3, 5), torch.rand(3, 1) - 0.5
    found = _dai(weight, general, domain, s, alpha=0.3, beta=0.7, gamma=0.4, scale="raw")
    for row in range(3):
        for column in range(5):
            size = abs(float(weight[row, column]))
            term = float(domain[row, column]) - 0.7 * float(general[row, column])
            expected = (term * size + 0.4 * math.sqrt(size)) * (1 + 0.3 * float(s[row, 0]))
            assert float(found[row, column]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", ["mean", "largest"])
def test_scaled_scores_do_not_depend_on_the_size_of_the_loss(scale: str) -> None:
    fisher, weight, s = torch.rand(4, 6), torch.randn(4, 6), torch.zeros(4, 1)
    scaled = _on_one_scale(fisher, scale)
    assert (scaled.mean() if scale == "mean" else scaled.max()) == pytest.approx(1.0)
    assert torch.equal(_on_one_scale(fisher, "raw"), fisher)
    plain = _dai(weight, fisher, fisher.flip(0), s, beta=0.5, scale=scale)
    other = _dai(weight, 1e-9 * fisher, 1e-6 * fisher.flip(0), s, beta=0.5, scale=scale)
    torch.testing.assert_close(other, plain)


def test_a_matrix_without_gradients_is_scored_by_magnitude() -> None:
    weight, none = torch.randn(4, 6), torch.zeros(4, 6)
    score = _dai(weight, none, none, _alignment(none, none))
    torch.testing.assert_close(score, 0.5 * weight.abs().sqrt())


@pytest.mark.parametrize("by", ["row", "tensor"])
def test_alignment_is_the_cosine(by: str) -> None:
    general, domain = torch.randn(4, 6), torch.randn(4, 6)
    found = _alignment(general, domain, by)
    if by == "row":
        expected = torch.nn.functional.cosine_similarity(general, domain, dim=1)[:, None]
    else:
        expected = torch.nn.functional.cosine_similarity(general.flatten(), domain.flatten(), dim=0).view(
            1, 1
        )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(_alignment(general, general, by), torch.ones_like(found))
    torch.testing.assert_close(_alignment(1e-9 * general, -1e-9 * general, by), -torch.ones_like(found))


def test_wanda_is_magnitude_times_the_input_length() -> None:
    weight, inputs = torch.randn(3, 4), torch.randn(50, 4)
    expected = weight.abs() * torch.linalg.vector_norm(inputs, dim=0)
    torch.testing.assert_close(_wanda(weight, inputs.square().sum(dim=0).sqrt()), expected)


@given(MATRICES, st.data())
def test_exactly_the_lowest_are_removed_and_ties_go_to_the_first(
    scores: np.ndarray, drawn: st.DataObject
) -> None:
    count = drawn.draw(st.integers(0, scores.size))
    gone = _lowest(torch.from_numpy(scores), count).numpy()
    expected = np.zeros(scores.size, dtype=bool)
    expected[np.argsort(scores, axis=None, kind="stable")[:count]] = True
    np.testing.assert_array_equal(gone.ravel(), expected)


@given(MATRICES, st.fractions(0, Fraction(99, 100)))
def test_a_share_is_exact_in_all_three_ways(scores: np.ndarray, share: Fraction) -> None:
    both = {"a": torch.from_numpy(scores), "b": torch.from_numpy(scores[:, ::-1].copy()) + 1}
    rows, columns = scores.shape
    gone = {way: _choose(both, share, way) for way in ("global", "tensor", "row")}
    assert sum(int(mask.sum()) for mask in gone["global"].values()) == _how_many(2 * scores.size, share)
    for name in both:
        assert int(gone["tensor"][name].sum()) == _how_many(scores.size, share)
        assert (gone["row"][name].sum(dim=1) == _how_many(columns, share)).all()
    kept = torch.cat([both[name][~gone["global"][name]] for name in both])
    lost = torch.cat([both[name][gone["global"][name]] for name in both])
    assert not len(lost) or not len(kept) or lost.max() <= kept.min()
    assert rows == gone["row"]["a"].shape[0]


def test_a_share_gives_the_expected_count() -> None:
    assert _how_many(10, Fraction("0.3")) == 3
    assert _how_many(10, Fraction("0.7")) == 7
    assert _how_many(1536, Fraction("30/100")) == 460


def test_two_of_four_against_a_plain_loop() -> None:
    scores = torch.randn(5, 12)
    gone = _two_of_four(scores)
    for row in range(5):
        for start in range(0, 12, 4):
            four = scores[row, start : start + 4].tolist()
            worst = sorted(range(4), key=four.__getitem__)[:2]
            assert [place in worst for place in range(4)] == gone[row, start : start + 4].tolist()


def test_neurons_sum_rows_before_and_columns_after() -> None:
    fused, down = torch.rand(6, 4), torch.rand(4, 3)
    axes = {"fused": (["mlp", "mlp"], ["hidden"]), "down": (["hidden"], ["mlp"])}
    found = _neuron_scores({"fused": fused, "down": down}, axes)
    expected = [
        float(fused[neuron].sum() + fused[neuron + 3].sum() + down[:, neuron].sum()) for neuron in range(3)
    ]
    assert found.tolist() == pytest.approx(expected)
    assert _best_neurons(torch.tensor([3.0, 1.0, 2.0, 3.0]), 2) == (0, 3)


def test_rows_keep_their_own_count() -> None:
    assert _lowest_in_rows(torch.tensor([[1.0, 0.0, 2.0]]), 1).tolist() == [[False, True, False]]


def test_the_map_counts_every_weight_once_and_survives_json(tmp_path: Path) -> None:
    aligned = {"a": torch.tensor([[-1.0], [0.0], [1.0]]), "b": torch.tensor([[0.5]])}
    found = _count_alignment(aligned, {"a": 12, "b": 8})
    assert (found.conflicting, found.specific, found.shared) == (4, 4, 12)
    assert sum(found.counts) == 20
    assert len(found.counts) == _BINS
    drawn = WeightMap(
        says="x", matrices=(PrunedMatrix(layer=0, matrix="up", weights=8, kept=4),), alignment=found
    )
    (tmp_path / WEIGHTS_FILE).write_text(drawn.as_text())
    assert read_weight_map(tmp_path) == drawn


def test_random_scores_are_reproducible_on_every_device() -> None:
    """The meta device stands for a GPU here."""
    scores = _random_scores({"a": torch.empty(2, 3), "b": torch.empty(4, 5, device="meta")}, seed=3)
    assert scores["b"].device.type == "meta"
    assert torch.equal(scores["a"], _random_scores({"a": torch.ones(2, 3)}, seed=3)["a"])
