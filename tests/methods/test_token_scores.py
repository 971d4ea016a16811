"""Token scores against scikit-learn and the model's attention, choices against brute force."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from sklearn.feature_extraction.text import TfidfVectorizer

import pico
from trundle.data.sampling import nearest, representatives
from trundle.methods.vocabulary.scores import (
    _attention_scores,
    _best_tokens,
    _passed_down,
    _spilling,
    _tfidf_scores,
    count_tokens,
    tokenised,
)
from trundle.model.token_map import read_vocabulary
from trundle.model.tokenizer import NO_MERGES, MergeTree

Models = Callable[[str], SentenceTransformer]


def test_counts_are_those_of_the_tokenizer(pico_model: Models) -> None:
    vocabulary = read_vocabulary(pico_model("gpt2"))
    texts = [*pico.TEXTS, "", "the the the"]
    counts = count_tokens(tokenised(vocabulary.backend, texts), vocabulary.size)
    one_by_one = [vocabulary.backend.encode(text, add_special_tokens=False).ids for text in texts]
    assert counts.texts == len(texts)
    assert counts.tokens == sum(map(len, one_by_one))
    for number in range(vocabulary.size):
        assert counts.occurrences[number] == sum(ids.count(number) for ids in one_by_one)
        assert counts.documents[number] == sum(number in ids for ids in one_by_one)


def test_long_texts_are_counted_to_the_end(pico_model: Models) -> None:
    vocabulary = read_vocabulary(pico_model("bert"))
    counts = count_tokens(tokenised(vocabulary.backend, ["the " * 5000]), vocabulary.size)
    assert counts.tokens == 5000


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=12), min_size=1, max_size=9), st.integers(1, 4)
)
def test_tfidf_equals_scikit_learn(documents: list[list[int]], chunk: int) -> None:
    """Smooth idf, rows of length 1, mean over documents; whatever chunks the texts come in."""
    names = [f"t{number}" for number in range(9)]
    reference = TfidfVectorizer(analyzer=lambda ids: [names[number] for number in ids], vocabulary=names)
    expected = np.asarray(reference.fit_transform(documents).mean(axis=0)).ravel()
    chunks = [
        (np.concatenate(part), np.array([len(ids) for ids in part]))
        for start in range(0, len(documents), chunk)
        for part in [documents[start : start + chunk]]
    ]
    with _spilling() as spill:
        counts = count_tokens(spill.through(chunks), 9)
        scores = _tfidf_scores(spill.again(), counts)
    np.testing.assert_allclose(scores, expected, atol=1e-12)


@pytest.mark.parametrize("family", pico.CONFIGS)
def test_attention_is_what_the_model_gives(family: str, pico_model: Models) -> None:
    """The attention of each token sums to 1, so the attention received sums to the number of tokens."""
    model = pico_model(family)
    usual = model[0].model.config._attn_implementation
    before = model.encode(pico.TEXTS)
    scores = _attention_scores(model, pico.TEXTS, read_vocabulary(model).size)
    features = [model[0].preprocess([text])["input_ids"][0].tolist() for text in pico.TEXTS]
    received = sum(scores[number] for ids in features for number in ids)
    assert received == pytest.approx(sum(map(len, features)), rel=1e-4)
    assert model[0].model.config._attn_implementation == usual
    np.testing.assert_array_equal(model.encode(pico.TEXTS), before)


def test_attention_is_measured_on_truncated_texts(
    pico_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes memory by the square of the tokens."""
    short = copy.deepcopy(pico_model("bert"))
    short.max_seq_length = 6
    size = read_vocabulary(short).size
    expected = _attention_scores(short, pico.TEXTS, size)
    monkeypatch.setattr("trundle.methods.vocabulary.scores.LONGEST", 6)
    np.testing.assert_array_equal(_attention_scores(pico_model("bert"), pico.TEXTS, size), expected)


@pytest.mark.usefixtures("no_doubles")
def test_attention_is_measured_on_a_device_without_float64(pico_model: Models) -> None:
    assert _attention_scores(pico_model("bert"), pico.TEXTS, read_vocabulary(pico_model("bert")).size).any()


# choices


def tree(merges: list[tuple[str, str]], letters: str) -> tuple[MergeTree, dict[str, int]]:
    tokens = [*letters, *("".join(merge) for merge in merges)]
    vocab = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    return MergeTree(
        {"model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges]}}
    ), vocab


MERGES = [("a", "b"), ("ab", "c"), ("d", "e"), ("abc", "de"), ("c", "d"), ("ab", "ab"), ("cd", "e")]


@settings(max_examples=60)
@given(st.lists(st.integers(0, 50), min_size=12, max_size=12), st.integers(5, 12))
def test_the_best_tokens_leave_the_fewest_tokens_any_choice_can(counts: list[int], keep: int) -> None:
    """Against every closed choice: the kept merges of a text are the sum of the counts passed down."""
    found, vocab = tree(MERGES, "abcde")
    occurrences = np.array(counts, dtype=float)
    merged_down = _passed_down(occurrences, found)
    letters = set(range(5))
    order = np.argsort(-merged_down, kind="stable").tolist()
    chosen = _best_tokens(order, letters, keep, found)

    def saved(kept: set[int]) -> float:
        return float(sum(merged_down[number] for number in kept - letters))

    closed = [
        {*letters, *extra}
        for size in range(keep - 4)
        for extra in itertools.combinations(range(5, len(vocab)), size)
        if found.with_halves(extra) <= {*letters, *extra}
    ]
    assert set(chosen) == found.with_halves(chosen)
    assert len(chosen) <= keep
    assert saved(set(chosen)) == max(saved(kept) for kept in closed)


def test_passed_down_scores_count_merges() -> None:
    found, vocab = tree(MERGES, "abcde")
    scores = np.zeros(len(vocab))
    scores[vocab["abcde"]] = 3
    scores[vocab["abab"]] = 2
    down = _passed_down(scores, found)
    assert {token: down[number] for token, number in vocab.items()} == {
        "abcde": 3, "abc": 3, "de": 3, "abab": 2, "ab": 3 + 4,
        "a": 7, "b": 7, "c": 3, "d": 3, "e": 3, "cd": 0, "cde": 0,
    }  # fmt: skip


def test_other_tokenizers_need_no_halves() -> None:
    scores = np.array([3.0, 1.0, 2.0])
    np.testing.assert_array_equal(_passed_down(scores, NO_MERGES), scores)
    assert _best_tokens([0, 2, 1], [1], 2, NO_MERGES) == [0, 1]


@pytest.mark.parametrize("count", [1, 7, 50, 399, 400, 1000])
def test_the_requested_number_of_representatives(count: int) -> None:
    vectors = np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32)
    found = representatives(vectors, count, seed=1)
    assert len(found) == len(set(found.tolist())) == min(count, 400)


@pytest.mark.parametrize("different", [9000, 3, 1])
def test_many_representatives_of_many_vectors(different: int) -> None:
    """Also where most of them are the same, as the rows of tokens that were never trained may be."""
    some = np.random.default_rng(0).normal(size=(different, 4)).astype(np.float32)
    found = representatives(some[np.arange(9000) % different], 1500, seed=1)
    assert len(set(found.tolist())) == 1500


def test_representatives_are_nearest_to_their_cluster_centre() -> None:
    middles = np.eye(3, dtype=np.float32)
    points = np.concatenate(
        [middles, *(middles + side * np.roll(middles, 1, axis=1) for side in (0.2, -0.2))]
    )
    assert set(representatives(points, 3, seed=0).tolist()) == {0, 1, 2}
    assert nearest(points, middles).tolist() == [0, 1, 2] * 3
