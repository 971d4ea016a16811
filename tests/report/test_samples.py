"""Searches against sentence-transformers, and the projection of equal vectors."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers.util import semantic_search

from trundle.report.measuring import _find_top, _principal_plane


def test_what_is_found_first_is_what_sentence_transformers_finds() -> None:
    rng = np.random.default_rng(0)
    queries, documents = (rng.normal(size=(n, 16)).astype(np.float32) for n in (7, 60))
    top = _find_top(queries, documents, 10)
    for row, hits in enumerate(semantic_search(queries, documents, top_k=10)):
        assert list(top[row].documents) == [hit["corpus_id"] for hit in hits]
        assert top[row].cosines == pytest.approx([hit["score"] for hit in hits], abs=1e-4)


def test_equal_vectors_are_one_point() -> None:
    same = np.ones((5, 4), dtype=np.float32)
    plane, shown = _principal_plane(same)
    assert not plane.transform(same).any()
    assert shown == 1.0
