"""A student compared with its teacher on vectors small enough to check by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.embedder import Embedder, _plain, top_agreement
from trundle.errors import BadInput
from trundle.evaluate import fidelity
from trundle.evaluate.fidelity import FEWEST_DOCUMENTS, _distances, measure_fidelity, measure_within

DOCUMENTS = {"east": (1, 0), "north": (0, 1), "west": (-1, 0), "north-east": (1, 1)}
TEACHER = {"q": (2, 1), **DOCUMENTS}


def table(name: str, vectors: dict[str, tuple[float, ...]]) -> Embedder:
    return _plain(name, lambda texts: np.array([vectors[text] for text in texts], dtype=np.float32))


def test_a_copy_of_the_teacher_agrees_in_everything():
    found = measure_fidelity(table("copy", TEACHER), table("teacher", TEACHER), ["q"], list(DOCUMENTS), k=2)
    assert (found.cosine, found.distance) == (pytest.approx(1), 0)
    assert (found.agreement_asymmetric, found.agreement_standard) == (1, 1)
    assert (found.student, found.teacher, found.queries, found.documents, found.k) == (
        "copy",
        "teacher",
        1,
        4,
        2,
    )


@pytest.mark.parametrize(("k", "shared"), [(2, 0), (3, 2 / 3)])
def test_a_rotated_space_agrees_with_itself_but_not_with_the_teachers_index(k, shared):
    # Turned by 90 degrees: (x, y) → (−y, x). For q the teacher finds north-east, east, north, and so does the
    # student among its own vectors; but on the teacher's, its query (−1, 2) finds north, west, north-east.
    turned = {text: (-y, x) for text, (x, y) in TEACHER.items()}
    found = measure_fidelity(table("turned", turned), table("teacher", TEACHER), ["q"], list(DOCUMENTS), k=k)
    assert found.agreement_standard == 1
    assert found.agreement_asymmetric == pytest.approx(shared)
    assert found.cosine == pytest.approx(0, abs=1e-7)
    # Each vector moves by √2 of its length: √5, 1, 1, 1, √2.
    assert found.distance == pytest.approx(2**0.5 * (5**0.5 + 3 + 2**0.5) / 5)


def test_the_best_and_worst_texts_come_with_their_errors():
    student = {**TEACHER, "west": (2, 0), "east": (1, 0.5)}
    found = measure_fidelity(
        table("s", student), table("t", TEACHER), ["q"], list(DOCUMENTS), k=1, examples=2
    )
    assert [(error.text, error.distance) for error in found.farthest] == [("west", 3.0), ("east", 0.5)]
    assert [error.cosine for error in found.farthest] == pytest.approx([-1, 2 / 5**0.5])
    assert [(error.text, error.distance) for error in found.closest] == [("q", 0.0), ("north", 0.0)]
    assert json.loads(json.dumps(found.as_json()))["farthest"][0]["text"] == "west"


def test_repeated_texts_count_once():
    found = measure_fidelity(table("s", TEACHER), table("t", TEACHER), ["q", "q"], [*DOCUMENTS, "east"], k=1)
    assert (found.queries, found.documents) == (1, 4)


def test_agreement_counts_shared_documents_whatever_their_order():
    teacher = np.array([[1, 2, 3], [4, 5, 6]])
    student = np.array([[3, 1, 9], [7, 8, 9]])
    assert top_agreement(teacher, student) == pytest.approx((2 / 3 + 0) / 2)
    assert top_agreement(teacher, teacher[:, ::-1]) == 1


@given(st.integers(0, 1000))
def test_distance_is_zero_only_to_itself_and_the_same_both_ways(seed):
    one, other = np.random.default_rng(seed).normal(size=(2, 5, 3)).astype(np.float32)
    assert not _distances(one, one).any()
    assert (_distances(one, other) > 0).all()
    assert _distances(one, other) == pytest.approx(_distances(other, one))


def test_more_examples_than_texts_gives_all_of_them():
    vectors = np.eye(2, dtype=np.float32)
    given = {"a": tuple(vectors[0]), "b": tuple(vectors[1])}
    doubled = {"a": tuple(2 * vectors[0]), "b": tuple(2 * vectors[1])}
    found = measure_fidelity(table("s", given), table("t", doubled), ["a"], ["a", "b"], k=1)
    assert [error.text for error in found.closest] == ["a", "a", "b"]
    assert [error.text for error in found.farthest] == ["b", "a", "a"]


def test_differing_widths_are_rejected_with_a_fix():
    wide = {text: (*vector, 0) for text, vector in TEACHER.items()}
    with pytest.raises(BadInput, match=r"2 and of 3 dimensions.*align"):
        measure_fidelity(table("s", TEACHER), table("t", wide), ["q"], list(DOCUMENTS), k=1)


@pytest.mark.parametrize(("queries", "k"), [([], 1), (["q"], 0), (["q"], 4)])
def test_invalid_comparisons_are_rejected(queries, k):
    with pytest.raises(BadInput, match="pass"):
        measure_fidelity(table("s", TEACHER), table("t", TEACHER), queries, list(DOCUMENTS), k=k)


@pytest.mark.parametrize(
    ("queries", "documents", "cost", "compared"),
    [
        (500, 1500, 0.001, 2000),
        (500, 1500, 0.02, 1072),  # 67 texts, doubled four times; 2,000 would take 40 s
        (500, 1500, 9.0, 67),
        (1950, 50, 9.0, 100),
        (1, 1999, 9.0, 52),
        (28, 52, 0.3, 80),
    ],
)
def test_a_comparison_takes_as_many_texts_as_fit(queries, documents, cost, compared, monkeypatch):
    now, encoded = 0.0, []
    monkeypatch.setattr(fidelity, "time", SimpleNamespace(monotonic=lambda: now))

    def vectors(texts):
        return np.array([[int(text[1:]) + 1, 1] for text in texts], dtype=np.float32)

    def encode(texts):
        nonlocal now
        now += cost * len(texts)
        encoded.extend(texts)
        return vectors(texts)

    def compare(seconds):
        encoded.clear()
        texts = [f"q{number}" for number in range(queries)], [f"d{number}" for number in range(documents)]
        found = measure_within(seconds, _plain("s", encode), _plain("t", vectors), *texts, seed=0)
        assert len(encoded) == len(set(encoded)) == found.queries + found.documents
        return found, set(encoded)

    found, texts = compare(30.0)
    assert found.queries + found.documents == compared
    fewest, first = compare(0.0)
    assert FEWEST_DOCUMENTS <= fewest.documents <= FEWEST_DOCUMENTS + 1
    assert first <= texts
