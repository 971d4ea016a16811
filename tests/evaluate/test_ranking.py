"""Rankings and their metrics against pytrec_eval and numpy's full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.retrieval import _Collection, nearest, unit

TREC = {"ndcg@10": "ndcg_cut_10", "recall@10": "recall_10", "recall@100": "recall_100"}

# Few distinct directions, so that many documents score the same.
DIRECTIONS = np.array([[1, 0], [0, 1], [1, 1], [-1, 0], [2, 1]], dtype=np.float32)


def table(vectors: dict[str, np.ndarray]) -> Embedder:
    def encode(texts):
        return np.array([vectors[text] for text in texts], dtype=np.float32)

    return Embedder(name="table", text=encode, query=encode, document=encode)


def trec_measures(
    search_scores: dict[str, dict[str, float]], judgements: dict[str, dict[str, int]]
) -> dict[str, float]:
    """The means pytrec_eval gives over queries that have a positive judgement."""
    pytrec_eval = pytest.importorskip("pytrec_eval", reason="the extra eval can't be installed here")
    positive = {query: grades for query, grades in judgements.items() if any(g > 0 for g in grades.values())}
    evaluator = pytrec_eval.RelevanceEvaluator(positive, {"ndcg_cut.10", "recall.10", "recall.100"})
    rows = list(evaluator.evaluate({query: search_scores[query] for query in positive}).values())
    cut = {
        query: dict(sorted(found.items(), key=lambda pair: (pair[1], pair[0]))[-10:])
        for query, found in search_scores.items()
    }
    first = pytrec_eval.RelevanceEvaluator(positive, {"recip_rank"}).evaluate(
        {query: cut[query] for query in positive}
    )
    means = {ours: float(np.mean([row[theirs] for row in rows])) for ours, theirs in TREC.items()}
    return {**means, "mrr@10": float(np.mean([row["recip_rank"] for row in first.values()]))}


@st.composite
def collections(draw):
    names = draw(st.lists(st.text("abc019é", min_size=1, max_size=4), min_size=1, max_size=150, unique=True))
    documents = {name: draw(st.integers(0, len(DIRECTIONS) - 1)) for name in names}
    queries = {
        f"query {n}": draw(st.integers(0, len(DIRECTIONS) - 1)) for n in range(draw(st.integers(1, 4)))
    }
    judged = st.sampled_from([*names, "gone 1", "gone 2"])
    judgements = {
        query: draw(st.dictionaries(judged, st.integers(-1, 3), min_size=1, max_size=15)) for query in queries
    }
    judgements[next(iter(queries))][draw(judged)] = draw(st.integers(1, 3))
    return documents, queries, judgements


@settings(max_examples=150)
@given(collections())
def test_measures_are_those_of_trec_eval_with_ties_grades_and_absent_documents(collection):
    documents, queries, judgements = collection
    vectors = {f"text of {name}": DIRECTIONS[way] for name, way in {**documents, **queries}.items()}
    search = _Collection.build(
        {name: f"text of {name}" for name in queries},
        {name: f"text of {name}" for name in documents},
        [
            (query, document, grade)
            for query, grades in judgements.items()
            for document, grade in grades.items()
        ],
        "random",
    )
    cosines = (
        unit(np.array([DIRECTIONS[way] for way in queries.values()]))
        @ unit(np.array([DIRECTIONS[way] for way in documents.values()])).T
    ).astype(np.float32)
    run = {
        query: {document: float(score) for document, score in zip(documents, row, strict=True)}
        for query, row in zip(queries, cosines, strict=True)
    }
    assert search.measures(table(vectors)) == pytest.approx(trec_measures(run, judgements), abs=1e-6)


@settings(max_examples=60)
@given(
    documents=st.integers(1, 60),
    k=st.integers(1, 70),
    at_once=st.integers(1, 70),
    kinds=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_nearest_is_the_stable_full_sort_whatever_the_size_of_the_blocks(documents, k, at_once, kinds, seed):
    random = np.random.default_rng(seed)
    distinct = random.normal(size=(kinds, 8)).astype(np.float32)
    held = distinct[random.integers(0, kinds, documents)]
    asked = random.normal(size=(5, 8)).astype(np.float32)
    scores = (unit(asked) @ unit(held).T).astype(np.float32)
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trundle.evaluate.retrieval._DOCUMENTS_AT_ONCE", at_once)
        assert nearest(asked, held, k).tolist() == expected.tolist()


def test_more_queries_than_fit_in_one_block_are_all_ranked():
    random = np.random.default_rng(0)
    held = random.normal(size=(20, 4)).astype(np.float32)
    asked = random.normal(size=(2500, 4)).astype(np.float32)
    scores = (unit(asked) @ unit(held).T).astype(np.float32)
    assert nearest(asked, held, 3).tolist() == np.argsort(-scores, axis=1, kind="stable")[:, :3].tolist()


def test_a_left_out_document_is_never_ranked():
    held = np.eye(3, dtype=np.float32)
    assert nearest(held, held, 3, left_out=[0, -1, 2]).tolist() == [[1, 2, -1], [1, 0, 2], [0, 1, -1]]


def test_a_document_is_left_out_only_if_it_equals_the_query():
    queries = {"1": "pigs fly", "2": "rain falls", "3": "old  Songs"}
    documents = {"1": "pigs can fly", "2": "snow falls", "3": "songs of old", "4": "x"}
    judgements = [("1", "4", 1), ("2", "4", 1), ("3", "3", 1), ("9", "4", 1)]
    search = _Collection.build(queries, documents, judgements, "ids")
    left_out = [search.documents[place] if place >= 0 else None for place in search.own]
    assert left_out == ["pigs can fly", None, None]


def test_a_query_that_is_a_document_does_not_find_itself():
    search = _Collection.build(
        {"1": "pigs fly"}, {"1": "pigs fly", "2": "pigs swim"}, [("1", "2", 1)], "self"
    )
    found = search.measures(table({"pigs fly": np.array([1, 0]), "pigs swim": np.array([0, 1])}))
    assert found["mrr@10"] == 1


def test_queries_without_a_positive_judgement_are_left_out_and_reported():
    search = _Collection.build(
        {"a": "a", "b": "b"}, {"d": "d"}, [("a", "d", 1), ("a", "e", 1), ("b", "d", 0)], "few"
    )
    assert search.queries == ("a",)
    assert search.judged == ((1, 1),)
    assert search.note == (
        "1 queries without a positive judgement left out; 1 judged documents are not in the collection"
    )


@pytest.mark.parametrize(("documents", "grade"), [({"d": "d"}, 0), ({}, 1)])
def test_a_collection_without_documents_or_positives_is_rejected(documents, grade):
    with pytest.raises(BadInput, match="empty one"):
        _Collection.build({"a": "a"}, documents, [("a", "d", grade)], "empty one")


def test_the_fingerprint_follows_content_not_the_order_of_rows():
    documents = {"d1": "one", "d2": "two"}
    one = _Collection.build({"a": "a"}, documents, [("a", "d1", 1), ("a", "d2", 1)], "x")
    turned = _Collection.build(
        {"a": "a"}, dict(reversed(documents.items())), [("a", "d2", 1), ("a", "d1", 1)], "x"
    )
    other = _Collection.build({"a": "a"}, documents, [("a", "d1", 1), ("a", "d2", 2)], "x")
    assert one.fingerprint == turned.fingerprint != other.fingerprint
