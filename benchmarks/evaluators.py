"""Are trundle's figures those of mteb and sentence-transformers, and what does `evaluate` cost beside encoding?

    python benchmarks/evaluators.py MODEL --data FOLDER_OF_TASKS [--rounds 3]

Encodes one real task of each kind with the model, then
(a) gives the very same vectors to mteb's and sentence-transformers' own evaluators and prints the largest difference
    of every measure, which must stay under 1e-6;
(b) times `evaluate` against a bare encode of the same distinct texts, in turns; the ratio must stay under 1.10.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict
from mteb._evaluators.retrieval_evaluator import RetrievalEvaluator
from mteb.mocks.mock_tasks import (
    MockClassificationTask,
    MockPairClassificationTask,
    MockRetrievalTask,
    MockSTSTask,
)
from mteb.mocks.mock_tasks.clustering import MockClusteringTask
from mteb.models.search_wrappers import SearchEncoderWrapper
from mteb.timing import TimingStack
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

from trundle.embedder import Embedder, Encode, Vectors, plain
from trundle.evaluate import MtebTask, Task, evaluate, find_tasks
from trundle.evaluate.files import choose_split, numbers_of, read_columns, texts_of
from trundle.evaluate.mteb import MtebEncoder
from trundle.evaluate.tasks import (
    ClassificationTask,
    ClusteringTask,
    FileTask,
    PairTask,
    RetrievalTask,
    SimilarityTask,
)
from trundle.model import embedder, load

TASKS = ("STSBenchmark", "MRPC", "TREC", "SearchSnippets", "Cranfield")
SEED = 42
MOST_DIFFERENCE = 1e-6
MOST_OVERHEAD = 1.10

Measures = Mapping[str, float]


class Table:
    """Vectors that were taken once, under names that every library can look up."""

    def __init__(self, encode: Encode, texts: Sequence[str]) -> None:
        distinct = list(dict.fromkeys(texts))
        self.vectors = encode(distinct)
        self.names = [f"t{place}" for place in range(len(distinct))]
        self._name = dict(zip(distinct, self.names, strict=True))
        self._place = {name: place for place, name in enumerate(self.names)}

    def called(self, texts: Sequence[str]) -> list[str]:
        return [self._name[text] for text in texts]

    def lookup(self, names: Sequence[str]) -> Vectors:
        rows: Vectors = self.vectors[[self._place[name] for name in names]]
        return rows

    def model(self) -> SentenceTransformer:
        tokenizer = Tokenizer(WordLevel(self._place, unk_token=self.names[0]))
        tokenizer.pre_tokenizer = Whitespace()
        return SentenceTransformer(
            modules=[StaticEmbedding(tokenizer, embedding_weights=self.vectors)], device="cpu"
        )


def by_mteb(mock: Any, data: object, table: Table) -> Measures:
    """mteb's measures on data that speaks of the table's names."""

    class Given(mock):  # type: ignore[misc]
        def load_data(self, **_options: object) -> None:
            self.dataset = data
            self.data_loaded = True

    [result] = evaluate(plain("table", table.lookup), [MtebTask(task=Given())])
    return result.measures


def rows(**columns: Sequence[object]) -> Any:
    return Dataset.from_dict({name: list(values) for name, values in columns.items()})


def compare_similarity(task: SimilarityTask, model: Embedder) -> dict[str, Measures]:
    part, _, _ = choose_split(read_columns(task.path, ("sentence1", "sentence2", "score", "split")), "test", task.path)
    left, right = texts_of(part, "sentence1", task.path), texts_of(part, "sentence2", task.path)
    scores = numbers_of(part, "score", task.path)
    table = Table(model.text, [*left, *right])
    left, right = table.called(left), table.called(right)
    theirs = by_mteb(MockSTSTask, {"test": rows(sentence1=left, sentence2=right, score=scores)}, table)
    library = EmbeddingSimilarityEvaluator(left, right, scores, write_csv=False)(table.model())
    return {
        "mteb": {name: theirs[f"cosine_{name}"] for name in ("spearman", "pearson")},
        "sentence-transformers": {name: library[f"{name}_cosine"] for name in ("spearman", "pearson")},
    }


def compare_pairs(task: PairTask, model: Embedder) -> dict[str, Measures]:
    part, _, _ = choose_split(read_columns(task.path, ("sentence1", "sentence2", "label", "split")), "test", task.path)
    left, right = texts_of(part, "sentence1", task.path), texts_of(part, "sentence2", task.path)
    labels = [int(label) for label in numbers_of(part, "label", task.path)]
    table = Table(model.text, [*left, *right])
    left, right = table.called(left), table.called(right)
    theirs = by_mteb(
        MockPairClassificationTask, {"test": rows(sentence1=left, sentence2=right, labels=labels)}, table
    )
    library = BinaryClassificationEvaluator(
        left, right, labels, write_csv=False, similarity_fn_names=["cosine"]
    )(table.model())
    return {"mteb": {"ap": theirs["cosine_ap"]}, "sentence-transformers": {"ap": library["cosine_ap"]}}


def compare_classification(task: ClassificationTask, model: Embedder) -> dict[str, Measures]:
    whole = read_columns(task.path, ("text", "label", "split"))
    number = {label: place for place, label in enumerate(sorted(set(texts_of(whole, "label", task.path))))}
    table = Table(model.text, texts_of(whole, "text", task.path))
    data = {}
    for split in ("train", "test"):
        part, _, _ = choose_split(whole, split, task.path)
        labels = [number[label] for label in texts_of(part, "label", task.path)]
        data[split] = rows(text=table.called(texts_of(part, "text", task.path)), label=labels)
    theirs = by_mteb(MockClassificationTask, DatasetDict(data), table)
    return {"mteb": {name: theirs[name] for name in ("accuracy", "f1")}}


def compare_clustering(task: ClusteringTask, model: Embedder) -> dict[str, Measures]:
    whole = read_columns(task.path, ("text", "label"))
    texts, labels = texts_of(whole, "text", task.path), texts_of(whole, "label", task.path)
    table = Table(model.text, texts)
    data = DatasetDict(test=rows(sentences=[table.called(texts)], labels=[labels]))
    return {"mteb": {"v_measure": by_mteb(MockClusteringTask, data, table)["v_measure"]}}


def compare_retrieval(task: RetrievalTask, model: Embedder) -> dict[str, Measures]:
    search, _, _ = task.read()
    documents = Table(model.document, search.documents)
    queries = Table(model.query, search.queries)
    # Ids fall with the place for mteb and rise for sentence-transformers: so each breaks ties as trundle does.
    falling = [f"d{len(search.documents) - place:07}" for place in range(len(search.documents))]
    rising = [f"d{place:07}" for place in range(len(search.documents))]
    asked = [f"q{row}" for row in range(len(search.queries))]
    judged = {query: {falling[d]: grade for d, grade in grades.items()} for query, grades in zip(asked, search.grades, strict=True)}
    evaluator = RetrievalEvaluator(
        rows(id=falling, text=documents.called(search.documents), title=[""] * len(falling)),
        rows(id=asked, text=queries.called(search.queries)),
        task_metadata=MockRetrievalTask.metadata,
        hf_split="test",
        hf_subset="default",
        top_k=100,
        timer=TimingStack(),
    )
    encoder = MtebEncoder(
        Embedder(name="table", text=queries.lookup, query=queries.lookup, document=documents.lookup)
    )
    found = evaluator(SearchEncoderWrapper(encoder), encode_kwargs={"batch_size": 32, "show_progress_bar": False})
    theirs = evaluator.evaluate(judged, found, [10, 100])
    each = list(theirs.all_scores.values())
    binary = {query: {rising[d] for d, grade in grades.items() if grade > 0} for query, grades in zip(asked, search.grades, strict=True)}
    shared = Table(lambda _texts: np.vstack([queries.vectors, documents.vectors]), [*(f"q {t}" for t in search.queries), *(f"d {t}" for t in dict.fromkeys(search.documents))])
    library = InformationRetrievalEvaluator(
        dict(zip(asked, shared.called([f"q {text}" for text in search.queries]), strict=True)),
        dict(zip(rising, shared.called([f"d {text}" for text in search.documents]), strict=True)),
        binary,
        mrr_at_k=[10],
        precision_recall_at_k=[10, 100],
        write_csv=False,
    )(shared.model())
    graded = any(grade not in (0, 1) for grades in search.judged for grade in grades)
    names = ("recall@10", "recall@100", "mrr@10") if graded else ("ndcg@10", "recall@10", "recall@100", "mrr@10")
    return {
        "mteb": {
            "ndcg@10": float(np.mean([one["ndcg_cut_10"] for one in each])),
            "recall@10": float(np.mean([one["recall_10"] for one in each])),
            "recall@100": float(np.mean([one["recall_100"] for one in each])),
            "mrr@10": theirs.mrr["MRR@10"],
        },
        "sentence-transformers": {name: library[f"cosine_{name}"] for name in names},
    }
