"""Searches and projections against sentence-transformers and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers.util import semantic_search
from sklearn.decomposition import PCA

from trundle.report.measuring import _find_top, _on_a_plane


def test_what_is_found_first_is_what_sentence_transformers_finds() -> None:
    rng = np.random.default_rng(0)
    queries, documents = (rng.normal(size=(n, 16)).astype(np.float32) for n in (7, 60))
    top = _find_top(queries, documents, 10)
    for row, hits in enumerate(semantic_search(queries, documents, top_k=10)):
        assert top.positions[row].tolist() == [hit["corpus_id"] for hit in hits]
        assert top.cosines[row] == pytest.approx([hit["score"] for hit in hits], abs=1e-5)


def test_the_plane_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(1)
    teacher = (rng.normal(size=(80, 12)) * np.linspace(3, 0.1, 12)).astype(np.float32)
    student = teacher + rng.normal(scale=0.05, size=teacher.shape).astype(np.float32)
    plane = _on_a_plane(teacher, student)
    reference = PCA(n_components=2).fit(teacher.astype(np.float64))
    assert plane.shown == pytest.approx(reference.explained_variance_ratio_.sum())
    theirs, ours = reference.transform(teacher), reference.transform(student)
    turned = np.sign((theirs * plane.teacher).sum(axis=0))
    assert plane.teacher * turned == pytest.approx(theirs, abs=1e-4)
    assert plane.student * turned == pytest.approx(ours, abs=1e-4)


def test_equal_vectors_coincide_and_a_collapsed_model_works() -> None:
    same = np.ones((5, 4), dtype=np.float32)
    plane = _on_a_plane(same, same)
    assert np.array_equal(plane.teacher, plane.student)
    assert plane.shown == 1.0
