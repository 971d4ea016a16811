"""The same vectors in the evaluators of sentence-transformers."""

from __future__ import annotations

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.evaluation import (
    BinaryClassificationEvaluator,
    EmbeddingSimilarityEvaluator,
    InformationRetrievalEvaluator,
)
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from trundle.embedder import Embedder, _plain
from trundle.evaluate.metrics import _pair_measures, _similarity_measures
from trundle.evaluate.retrieval import _Collection

WORDS = 600
RANDOM = np.random.default_rng(3)
VECTORS = RANDOM.normal(size=(WORDS, 16)).astype(np.float32)
NAMES = [f"w{number:03}" for number in range(WORDS)]


@pytest.fixture(scope="module")
def model() -> SentenceTransformer:
    tokenizer = Tokenizer(WordLevel({name: place for place, name in enumerate(NAMES)}, unk_token=NAMES[0]))
    tokenizer.pre_tokenizer = Whitespace()
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=VECTORS)], device="cpu")


@pytest.fixture(scope="module")
def table(model: SentenceTransformer) -> Embedder:
    embedder = _plain("table", model.encode)
    assert np.array_equal(embedder.text(NAMES), VECTORS)
    return embedder


def test_retrieval(model, table):
    documents, queries = NAMES[:500], NAMES[500:]
    near = np.argsort(-(VECTORS[500:] @ VECTORS[:500].T), axis=1)
    relevant = {
        query: {
            documents[place] for place in RANDOM.choice(near[row, :150], size=1 + row % 12, replace=False)
        }
        for row, query in enumerate(queries)
    }
    theirs = InformationRetrievalEvaluator(
        {name: name for name in queries},
        {name: name for name in documents},
        relevant,
        mrr_at_k=[10],
        ndcg_at_k=[10],
        precision_recall_at_k=[10, 100],
        write_csv=False,
    )(model)
    ours = _Collection.build(
        {name: name for name in queries},
        {name: name for name in documents},
        [(query, document, 1) for query, found in relevant.items() for document in found],
        "binary",
    ).measures(table)
    assert 0.02 < ours["ndcg@10"] < 0.9
    assert ours == pytest.approx({measure: theirs[f"cosine_{measure}"] for measure in ours}, abs=1e-6)


def test_similarity(model, table):
    left, right = NAMES[:300], NAMES[300:]
    cosines = np.einsum("ij,ij->i", VECTORS[:300], VECTORS[300:])
    scores = np.round(cosines + RANDOM.normal(size=300) * 3).tolist()
    theirs = EmbeddingSimilarityEvaluator(left, right, scores, write_csv=False)(model)
    ours = _similarity_measures(table.text(left), table.text(right), scores)
    assert 0.2 < ours["spearman"] < 0.98
    assert ours == pytest.approx({measure: theirs[f"{measure}_cosine"] for measure in ours}, abs=1e-6)


def test_pairs(model, table):
    left, right = NAMES[:300], NAMES[300:]
    cosines = np.einsum("ij,ij->i", VECTORS[:300], VECTORS[300:])
    labels = (cosines + RANDOM.normal(size=300) * 4 > 0).astype(int).tolist()
    theirs = BinaryClassificationEvaluator(
        left, right, labels, write_csv=False, similarity_fn_names=["cosine"]
    )
    ours = _pair_measures(table.text(left), table.text(right), labels)
    assert 0.5 < ours["ap"] < 0.98
    assert ours == pytest.approx({"ap": theirs(model)["cosine_ap"]}, abs=1e-6)
