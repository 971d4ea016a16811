"""The same vectors in mteb: our data in its mock tasks, and its mock data in our tasks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from trundle.embedder import Embedder, _plain
from trundle.errors import BadInput, MissingExtra
from trundle.evaluate.metrics import (
    _classification_measures,
    _clustering_measures,
    _few_shot_samples,
    _pair_measures,
    _similarity_measures,
)
from trundle.evaluate.retrieval import _Collection
from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.model.encode import embedder
from trundle.model.heads import paired


class Lazily:
    """A module that is imported when it is used: mteb takes seconds, and every process collects all tests."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self.name), attribute)


mteb, own, datasets = map(Lazily, ("mteb", "trundle.evaluate.mteb", "datasets"))
mock_tasks = Lazily("mteb.mocks.mock_tasks")

# mteb's mock classification tasks have two test rows, of which one label may never be predicted.
pytestmark = [
    pytest.mark.skipif(find_spec("mteb") is None, reason="the extra eval can't be installed here"),
    pytest.mark.filterwarnings("ignore:Precision is ill-defined:sklearn.exceptions.UndefinedMetricWarning"),
]

RANDOM = np.random.default_rng(11)
LABELS = 6
NAMES = [f"text {number:04}" for number in range(900)]
GROUPS = RANDOM.integers(0, LABELS, len(NAMES))
VECTORS = (RANDOM.normal(size=(LABELS, 24))[GROUPS] + 2 * RANDOM.normal(size=(len(NAMES), 24))).astype(
    np.float32
)
PLACE = {name: place for place, name in enumerate(NAMES)}


def lookup(texts):
    return VECTORS[[PLACE[text] for text in texts]]


TABLE = _plain("table", lookup)


def mteb_measures(mock: type, data: object) -> dict[str, float]:
    """What mteb makes of the table of vectors on this data."""

    class Given(mock):
        def load_data(self, **_options):
            self.dataset = data
            self.data_loaded = True

    task = Given()
    task.filter_eval_splits(["test"])
    [result] = evaluate(TABLE, [own._MtebTask(task=task)])
    return dict(result.measures)


def rows(**columns):
    return datasets.Dataset.from_dict({name: list(values) for name, values in columns.items()})


def test_similarity():
    left, right = NAMES[:400], NAMES[400:800]
    scores = np.round(
        np.einsum("ij,ij->i", lookup(left), lookup(right)) + 9 * RANDOM.normal(size=400)
    ).tolist()
    theirs = mteb_measures(
        mock_tasks.MockSTSTask, {"test": rows(sentence1=left, sentence2=right, score=scores)}
    )
    ours = _similarity_measures(lookup(left), lookup(right), scores)
    assert 0.2 < ours["spearman"] < 0.98
    assert ours == pytest.approx({name: theirs[f"cosine_{name}"] for name in ours}, abs=1e-6)


def test_pairs():
    left, right = NAMES[:400], NAMES[400:800]
    labels = (GROUPS[:400] == GROUPS[400:800]).astype(int).tolist()
    theirs = mteb_measures(
        mock_tasks.MockPairClassificationTask, {"test": rows(sentence1=left, sentence2=right, labels=labels)}
    )
    ours = _pair_measures(lookup(left), lookup(right), labels)
    assert 0.2 < ours["ap"] < 0.98
    assert ours == pytest.approx({"ap": theirs["cosine_ap"]}, abs=1e-6)


def test_classification():
    train, test = NAMES[:500], NAMES[500:]
    theirs = mteb_measures(
        mock_tasks.MockClassificationTask,
        datasets.DatasetDict(
            train=rows(text=train, label=GROUPS[:500]), test=rows(text=test, label=GROUPS[500:])
        ),
    )
    labels = [f"label {group}" for group in GROUPS]
    samples = _few_shot_samples(labels[:500], seed=42)
    ours = _classification_measures(lookup(train), labels[:500], lookup(test), labels[500:], samples)
    assert 0.2 < ours["accuracy"] < 0.98
    assert ours == pytest.approx({name: theirs[name] for name in ours}, abs=1e-6)


def test_clustering():
    theirs = mteb_measures(
        import_module("mteb.mocks.mock_tasks.clustering").MockClusteringTask,
        datasets.DatasetDict(test=rows(sentences=[NAMES], labels=[GROUPS.tolist()])),
    )
    ours = _clustering_measures(lookup(NAMES), [str(group) for group in GROUPS], seed=42)
    assert 0.05 < ours["v_measure"] < 0.98
    assert ours == pytest.approx({"v_measure": theirs["v_measure"]}, abs=1e-6)


def test_retrieval_with_grades():
    queries, documents = NAMES[:60], NAMES[60:]
    near = np.argsort(-(lookup(queries) @ lookup(documents).T), axis=1)
    judged = {
        query: {
            documents[place]: int(RANDOM.integers(0, 4))
            for place in RANDOM.choice(near[row, :200], 20, replace=False)
        }
        for row, query in enumerate(queries)
    }
    theirs = mteb_measures(
        mock_tasks.MockRetrievalTask,
        {
            "default": {
                "test": import_module("mteb.abstasks.retrieval_dataset_loaders").RetrievalSplitData(
                    queries=rows(id=queries, text=queries),
                    corpus=rows(id=documents, text=documents, title=[""] * len(documents)),
                    relevant_docs=judged,
                    top_ranked=None,
                )
            }
        },
    )
    ours = _Collection.build(
        {name: name for name in queries},
        {name: name for name in documents},
        [(query, document, grade) for query, grades in judged.items() for document, grade in grades.items()],
        "graded",
    ).measures(TABLE)
    assert 0.02 < ours["ndcg@10"] < 0.9
    # mteb rounds all but the reciprocal rank to five places.
    assert ours == pytest.approx({name: theirs[name.replace("@", "_at_")] for name in ours}, abs=5.1e-6)
    assert ours["mrr@10"] == pytest.approx(theirs["mrr_at_10"], abs=1e-6)


def test_roles_and_modes_reach_mteb(words):
    asked: dict[str, set[str]] = {"text": set(), "query": set(), "document": set()}

    def role(name):
        def encode(texts):
            asked[name].update(texts)
            return words.text(texts)

        return encode

    student = Embedder(name="student", text=role("text"), query=role("query"), document=role("document"))
    tasks = [
        own._MtebTask(task=mock_tasks.MockRetrievalTask()),
        own._MtebTask(task=mock_tasks.MockClassificationTask()),
        own._MtebTask(task=mock_tasks.MockAggregatedTask()),
    ]
    results = evaluate(student, tasks, documents=words)
    assert [(result.task, result.kind, result.mode, result.documents) for result in results] == [
        ("mteb:MockRetrievalTask", "retrieval", "standard", None),
        ("mteb:MockRetrievalTask", "retrieval", "asymmetric", "bag of words"),
        ("mteb:MockClassificationTask", "classification", "standard", None),
        ("mteb:MockMultilingualInstructionReranking", "instructionreranking", "standard", None),
        ("mteb:MockMultilingualInstructionReranking", "instructionreranking", "asymmetric", "bag of words"),
    ]
    assert asked["query"] == {"This is a test sentence", "This is another test sentence"}
    assert asked["document"] == {
        "Title of d1 This is a positive sentence",
        "Title of d2 This is another positive sentence",
    }
    assert "This is another train sentence" in asked["text"]
    assert results[0].main == "ndcg_at_10"
    assert results[0].score == results[0].measures["ndcg_at_10"]
    assert results[0].split == "val, test"
    assert "test/default/recall_at_10" in results[0].measures


def test_many_languages_keep_their_own_figures(words):
    [result] = evaluate(words, [own._MtebTask(task=mock_tasks.MockMultilingualClassificationTask())])
    assert {"test/eng/accuracy", "test/fra/accuracy"} <= result.measures.keys()


def test_narrow_queries_on_wide_documents_are_rejected():
    narrow = _plain("narrow", lambda texts: np.ones((len(texts), 2), dtype=np.float32))
    wide = _plain("wide", lambda texts: np.ones((len(texts), 3), dtype=np.float32))
    with pytest.raises(BadInput, match="align"):
        evaluate(narrow, [own._MtebTask(task=mock_tasks.MockRetrievalTask())], documents=wide)


def test_mteb_tasks_are_found_by_name():
    [task] = find_tasks(["mteb:STS12"])
    assert (task.name, task.kind, task.has_documents) == ("mteb:STS12", "sts", False)
    [search] = find_tasks(["mteb:SciFact"])
    assert (search.kind, search.has_documents) == ("retrieval", True)


@pytest.mark.parametrize(
    ("name", "split", "message"),
    [
        ("STS122", "test", "mteb has no task STS122.*STS"),
        ("CIFAR10", "test", "needs image"),
        ("STS12", "dev", "not evaluated on the split 'dev'; it has test"),
    ],
)
def test_what_mteb_does_not_have_is_rejected(name, split, message):
    with pytest.raises(BadInput, match=message):
        find_tasks([f"mteb:{name}"], split=split)


def test_without_mteb_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mteb", None)
    monkeypatch.delitem(sys.modules, "trundle.evaluate.mteb")
    with pytest.raises(MissingExtra, match=r"trundle\[eval\]"):
        find_tasks(["mteb:STS12"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # mteb's own
def test_mteb_uses_a_pair_as_it_is(pico_model: Callable[[str], SentenceTransformer]) -> None:
    student, teacher = pico_model("bert"), pico_model("mpnet")
    theirs = mteb.evaluate(
        paired(student, teacher), mock_tasks.MockRetrievalTask(), cache=None, co2_tracker=False
    )
    _, ours = evaluate(
        embedder(student, name="student"),
        [own._MtebTask(task=mock_tasks.MockRetrievalTask())],
        documents=embedder(teacher, name="teacher"),
    )
    assert theirs.task_results[0].get_score() == pytest.approx(ours.score)
