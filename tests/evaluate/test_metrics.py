"""Properties of the metrics: bounds, ties, and collapsed models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.evaluate.metrics import (
    _clustering_measures,
    _few_shot_samples,
    _pair_measures,
    _similarity_measures,
)
from trundle.evaluate.retrieval import _paired_cosines


@given(st.integers(0, 1000), st.floats(0.01, 100))
def test_cosine_ignores_length(seed, factor):
    vectors = np.random.default_rng(seed).normal(size=(4, 7)).astype(np.float32)
    assert _paired_cosines(vectors, np.float32(factor) * vectors) == pytest.approx(1, abs=1e-6)
    assert _paired_cosines(vectors, -vectors) == pytest.approx(-1, abs=1e-6)


def test_a_zero_vector_has_similarity_zero():
    assert _paired_cosines(np.zeros((1, 3), np.float32), np.ones((1, 3), np.float32)).tolist() == [0]


def test_identical_pairs_tie_exactly():
    vectors = np.random.default_rng(0).normal(size=(500, 384)).astype(np.float32)
    assert np.unique(_paired_cosines(vectors, vectors)).size == 1


def test_a_collapsed_model_has_no_correlation():
    same = np.ones((5, 3), dtype=np.float32)
    assert _similarity_measures(same, same, [1, 2, 3, 4, 5]) == {"spearman": 0.0, "pearson": 0.0}


def test_a_collapsed_model_ranks_pairs_at_chance():
    same = np.ones((4, 3), dtype=np.float32)
    assert _pair_measures(same, same, [1, 0, 0, 0]) == {"ap": 0.25}


def test_spearman_depends_on_order_only():
    left = np.tile(np.array([[1, 0]], dtype=np.float32), (4, 1))
    right = np.array([[1, 0], [1, 1], [0, 1], [-1, 0]], dtype=np.float32)
    assert _similarity_measures(left, right, [5, 4.9, 0.2, 0.1])["spearman"] == pytest.approx(1)
    assert _similarity_measures(left, right, [0, 1, 2, 3])["spearman"] == pytest.approx(-1)


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=60), st.integers(0, 2**31))
def test_samples_hold_as_many_of_each_label_as_there_are_up_to_eight(labels, seed):
    samples = _few_shot_samples(labels, seed=seed)
    assert len(samples) == 10
    for sample in samples:
        assert len(set(sample)) == len(sample)
        drawn = [labels[row] for row in sample]
        assert {label: drawn.count(label) for label in "abc"} == {
            label: min(8, labels.count(label)) for label in "abc"
        }


def test_well_separated_groups_are_found():
    centres = np.array([[0, 9], [9, 0], [-9, -9]], dtype=np.float32)
    labels = [str(number % 3) for number in range(60)]
    vectors = centres[[int(label) for label in labels]] + np.float32(0.1)
    assert _clustering_measures(vectors, labels, seed=1) == {"v_measure": pytest.approx(1)}
