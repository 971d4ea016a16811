"""What an index alone says about a student, against scikit-learn's neighbours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from trundle.embedder import Embedder, Similarity, Vectors
from trundle.evaluate.index_check import _opening_words, _score_rows, _script_of
from trundle.evaluate.retrieval import nearest
from trundle.index.rows import SearchedRows

RNG = np.random.default_rng(0)
TEXTS = [f"Title of row {number}. {'More about it. ' * (number % 90)}" for number in range(300)]
TEXTS[:10] = [f"Название строки {number}. Ещё немного." for number in range(10)]
VECTORS = (RNG.normal(size=(300, 16)) * RNG.uniform(0.5, 4, size=(300, 1))).astype(np.float32)
PLACES = {text: place for place, text in enumerate(TEXTS)}
OPENINGS = {_opening_words(text): place for place, text in enumerate(TEXTS)}


def student(noise: float) -> Embedder:
    """The stored vectors with noise; a title has the vector of its row."""

    def encode(texts: Sequence[str]) -> Vectors:
        found = VECTORS[[PLACES[text] if text in PLACES else OPENINGS[text] for text in texts]]
        return (found + noise * np.random.default_rng(1).normal(size=found.shape)).astype(np.float32)

    return Embedder(name="student", text=encode, query=encode, document=encode)


def rows(similarity: Similarity = "cosine") -> SearchedRows:
    return SearchedRows(index="rows", texts=TEXTS, vectors=VECTORS, total=300, similarity=similarity)


@pytest.mark.parametrize("similarity", ["cosine", "l2"])
def test_neighbours_are_those_of_scikit_learn(similarity: Similarity) -> None:
    metric = "cosine" if similarity == "cosine" else "euclidean"
    queries = VECTORS[:40] + np.float32(0.1)
    expected = NearestNeighbors(n_neighbors=10, metric=metric, algorithm="brute").fit(VECTORS)
    np.testing.assert_array_equal(
        nearest(queries, VECTORS, 10, similarity=similarity),
        expected.kneighbors(queries, return_distance=False),
    )


def test_inner_products_prefer_long_vectors() -> None:
    found = nearest(VECTORS[:40], VECTORS, 10, similarity="inner product")
    np.testing.assert_array_equal(found, np.argsort(-(VECTORS[:40] @ VECTORS.T), axis=1)[:, :10])
    assert not np.array_equal(found, nearest(VECTORS[:40], VECTORS, 10))


@pytest.mark.parametrize("similarity", ["cosine", "inner product", "l2"])
def test_the_stored_vectors_themselves_find_everything(similarity: Similarity) -> None:
    found = _score_rows(student(0.0), rows(similarity), range(0, 300, 3))
    assert (found.queries, found.agreement, found.first) == (100, 1.0, 1.0)
    assert found.known_item is not None
    assert found.known_item == 1.0 or similarity == "inner product"


def test_agreement_falls_with_noise_in_every_group() -> None:
    asked = range(120)
    near, far = (_score_rows(student(noise), rows(), asked) for noise in (0.2, 5.0))
    assert 1 > near.agreement > far.agreement
    assert near.known_item is not None
    assert far.known_item is not None
    assert near.known_item > far.known_item
    assert [group.name for group in near.by_script] == ["Latin", "Cyrillic"]
    assert [group.rows for group in near.by_script] == [110, 10]
    assert [group.name for group in near.by_length] == [
        "under 200 characters",
        "200 to 999",
        "1,000 and more",
    ]
    for groups in (near.by_length, near.by_script):
        assert sum(group.rows for group in groups) == 120
        mean = sum(group.rows * group.agreement for group in groups) / 120
        assert mean == pytest.approx(near.agreement)


def test_scripts() -> None:
    texts = ("plain text, 12", "ein Öl", "простой текст", "東京の天気", "كتاب", "123 456", "")
    assert [_script_of(text) for text in texts] == [
        *("Latin", "Latin", "Cyrillic", "Cjk", "Arabic", "no letters", "no letters")
    ]
