"""Whether trundle's figures are those of mteb and sentence-transformers, and what they cost beside encoding.

    python benchmarks/evaluators.py MODEL --data FOLDER_OF_TASKS [--rounds 3] [--tasks NAME ...]

(a) gives the vectors of one real task of each kind to mteb's and sentence-transformers' own evaluators and prints how
    far every measure is from trundle's, which must be under 1e-6;
(b) times `evaluate` on those tasks against a bare encode of the same distinct texts, in turns; the ratio must be
    under 1.10.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, disable_progress_bars
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

from trundle.embedder import Embedder, Encode, Vectors
from trundle.evaluate.mteb import _MtebEncoder, _MtebTask
from trundle.evaluate.scoring import Memory, evaluate, find_tasks
from trundle.evaluate.tasks import Task, _choose_split, _numbers_of, _read_columns, _texts_of
from trundle.model.encode import embedder
from trundle.model.load import load

TASKS = ("STSBenchmark", "MRPC", "TREC", "SearchSnippets", "Cranfield")
ROLES = ("encode", "encode_query", "encode_document")
MOST_DIFFERENCE = 1e-6
MOST_OVERHEAD = 1.10

Measures = Mapping[str, float]


class Kept(SentenceTransformer):
    """The library's own model, except that its vectors were taken already."""

    def __init__(self, model: Embedder) -> None:
        super().__init__(modules=[torch.nn.Identity()], device="cpu")
        self.encode = self._role(model.text)  # type: ignore[method-assign]
        self.encode_query = self._role(model.query)  # type: ignore[method-assign]
        self.encode_document = self._role(model.document)  # type: ignore[method-assign]

    def _role(self, encode: Encode) -> Any:
        def encoded(texts: Sequence[str], *, convert_to_tensor: bool = False, **_options: object) -> Any:
            vectors = encode(texts)
            return torch.from_numpy(vectors) if convert_to_tensor else vectors

        return encoded


def table(**columns: Sequence[object]) -> Any:
    return Dataset.from_dict({name: list(values) for name, values in columns.items()})


def by_mteb(mock: Any, data: object, model: Embedder) -> Measures:
    """The measures mteb takes on data of ours."""

    class Given(mock):  # type: ignore[misc]
        def load_data(self, **_options: object) -> None:
            self.dataset = data
            self.data_loaded = True

    [result] = evaluate(model, [_MtebTask(task=Given())])
    return result.measures


def references(task: Any, model: Embedder) -> dict[str, Measures]:
    """The measures of a task by whoever else can take them."""
    return {
        "sts": of_similarity,
        "pairs": of_pairs,
        "classification": of_classification,
        "clustering": of_clustering,
        "retrieval": of_retrieval,
    }[task.kind](task, model)


def of_similarity(task: Any, model: Embedder) -> dict[str, Measures]:
    rows, _, _ = _choose_split(
        _read_columns(task.path, ("sentence1", "sentence2", "score", "split")), "test", task.path
    )
    left, right = _texts_of(rows, "sentence1", task.path), _texts_of(rows, "sentence2", task.path)
    scores = _numbers_of(rows, "score", task.path)
    theirs = by_mteb(MockSTSTask, {"test": table(sentence1=left, sentence2=right, score=scores)}, model)
    library = EmbeddingSimilarityEvaluator(left, right, scores, write_csv=False)(Kept(model))
    return {
        "mteb": {name: theirs[f"cosine_{name}"] for name in ("spearman", "pearson")},
        "sentence-transformers": {name: library[f"{name}_cosine"] for name in ("spearman", "pearson")},
    }


def of_pairs(task: Any, model: Embedder) -> dict[str, Measures]:
    rows, _, _ = _choose_split(
        _read_columns(task.path, ("sentence1", "sentence2", "label", "split")), "test", task.path
    )
    left, right = _texts_of(rows, "sentence1", task.path), _texts_of(rows, "sentence2", task.path)
    labels = [int(label) for label in _numbers_of(rows, "label", task.path)]
    data = {"test": table(sentence1=left, sentence2=right, labels=labels)}
    library = BinaryClassificationEvaluator(
        left, right, labels, write_csv=False, similarity_fn_names=["cosine"]
    )
    return {
        "mteb": {"ap": by_mteb(MockPairClassificationTask, data, model)["cosine_ap"]},
        "sentence-transformers": {"ap": library(Kept(model))["cosine_ap"]},
    }


def of_classification(task: Any, model: Embedder) -> dict[str, Measures]:
    whole = _read_columns(task.path, ("text", "label", "split"))
    number = {label: place for place, label in enumerate(sorted(set(_texts_of(whole, "label", task.path))))}
    data = {}
    for split in ("train", "test"):
        rows, _, _ = _choose_split(whole, split, task.path)
        labels = [number[label] for label in _texts_of(rows, "label", task.path)]
        data[split] = table(text=_texts_of(rows, "text", task.path), label=labels)
    theirs = by_mteb(MockClassificationTask, DatasetDict(data), model)
    return {"mteb": {name: theirs[name] for name in ("accuracy", "f1")}}


def of_clustering(task: Any, model: Embedder) -> dict[str, Measures]:
    rows = _read_columns(task.path, ("text", "label"))
    texts, labels = _texts_of(rows, "text", task.path), _texts_of(rows, "label", task.path)
    data = DatasetDict(test=table(sentences=[texts], labels=[labels]))
    return {"mteb": {"v_measure": by_mteb(MockClusteringTask, data, model)["v_measure"]}}


def of_retrieval(task: Any, model: Embedder) -> dict[str, Measures]:
    search, _, _ = task.read()
    asked = [f"q{row}" for row in range(len(search.queries))]
    # Ids fall with the place for mteb and rise for sentence-transformers: so each breaks ties as trundle does.
    falling = [f"d{len(search.documents) - place:07}" for place in range(len(search.documents))]
    rising = [f"d{place:07}" for place in range(len(search.documents))]
    judgements = list(zip(asked, search.grades, strict=True))
    evaluator = RetrievalEvaluator(
        table(id=falling, text=search.documents, title=[""] * len(falling)),
        table(id=asked, text=search.queries),
        task_metadata=MockRetrievalTask.metadata,
        hf_split="test",
        hf_subset="default",
        top_k=100,
        timer=TimingStack(),
    )
    options = {"batch_size": 32, "show_progress_bar": False}
    found = evaluator(SearchEncoderWrapper(_MtebEncoder(model)), encode_kwargs=options)
    judged = {
        query: {falling[place]: int(grade) for place, grade in grades.items()} for query, grades in judgements
    }
    theirs = evaluator.evaluate(judged, found, [10, 100])
    each = list(theirs.all_scores.values())
    library = InformationRetrievalEvaluator(
        dict(zip(asked, search.queries, strict=True)),
        dict(zip(rising, search.documents, strict=True)),
        {
            query: {rising[place] for place, grade in grades.items() if grade > 0}
            for query, grades in judgements
        },
        mrr_at_k=[10],
        precision_recall_at_k=[10, 100],
        write_csv=False,
    )(Kept(model))
    # sentence-transformers knows no grades, so its nDCG is another measure where there are some.
    graded = any(grade > 1 for grades in search.judged for grade in grades)
    return {
        "mteb": {
            "ndcg@10": float(np.mean([one["ndcg_cut_10"] for one in each])),
            "recall@10": float(np.mean([one["recall_10"] for one in each])),
            "recall@100": float(np.mean([one["recall_100"] for one in each])),
            "mrr@10": theirs.mrr["MRR@10"],
        },
        "sentence-transformers": {
            name: library[f"cosine_{name}"]
            for name in ("ndcg@10", "recall@10", "recall@100", "mrr@10")
            if not (graded and name == "ndcg@10")
        },
    }


def differences(model: Embedder, tasks: Sequence[Task]) -> float:
    """Print every measure beside the others' and return the largest difference."""
    kept = Memory().remember(model, "benchmark")
    largest = 0.0
    print(f"{'task':16}{'measure':12}{'trundle':>12}  {'reference':24}{'difference':>12}")
    for task in tasks:
        [ours] = evaluate(kept, [task])
        for reference, measures in references(task, kept).items():
            for name, value in measures.items():
                apart = abs(ours.measures[name] - value)
                largest = max(largest, apart)
                print(f"{task.name:16}{name:12}{ours.measures[name]:12.8f}  {reference:24}{apart:12.1e}")
    return largest


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock, and of processor time, which other programs on the machine disturb less."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def overhead(library: SentenceTransformer, tasks: Sequence[Task], rounds: int) -> float:
    """Print and return the median over rounds of the time of `evaluate` by that of a bare encode.

    The two take turns task by task, so that whatever else the machine does falls on both.
    """
    model = embedder(library)
    asked: dict[str, dict[str, dict[str, None]]] = {task.name: {role: {} for role in ROLES} for task in tasks}

    inside = 0.0

    def listening(task: str, role: str, encode: Encode) -> Encode:
        def listened(texts: Sequence[str]) -> Vectors:
            nonlocal inside
            asked[task][role].update(dict.fromkeys(texts))
            began = time.perf_counter()
            vectors = encode(texts)
            inside += time.perf_counter() - began
            return vectors

        return listened

    def whole(task: Task) -> None:
        roles = dict(zip(ROLES, (model.text, model.query, model.document), strict=True))
        text, query, document = (listening(task.name, role, encode) for role, encode in roles.items())
        evaluate(Embedder(name=model.name, text=text, query=query, document=document), [task])

    def bare(task: Task) -> None:
        for role, texts in asked[task.name].items():
            if texts:
                getattr(library, role)(list(texts), show_progress_bar=False)

    print(
        f"\n{'evaluate s':>12}{'bare s':>12}{'ratio':>8}{'of processor time':>19}{'evaluate / its own encoding':>29}"
    )
    ratios = []
    for number in range(rounds):
        spent = np.zeros((2, 2))
        inside = 0.0
        for place, task in enumerate(tasks):
            # The first round must evaluate first, to hear which texts there are.
            turns = (1, 0) if number > 0 and (number + place) % 2 else (0, 1)
            for turn in turns:
                spent[turn] += timed(partial((whole, bare)[turn], task))
        clock, processor = spent[0] / spent[1]
        ratios.append(float(clock))
        print(
            f"{spent[0, 0]:12.2f}{spent[1, 0]:12.2f}{clock:8.3f}{processor:19.3f}{spent[0, 0] / inside:29.3f}"
        )
    count = sum(len(texts) for roles in asked.values() for texts in roles.values())
    print(f"{count} distinct texts")
    return median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    options = parser.parse_args()
    disable_progress_bars()
    library = load(options.model)
    tasks = find_tasks(options.tasks, options.data)
    largest = differences(embedder(library), tasks)
    ratio = overhead(library, tasks, options.rounds)
    print(f"\nlargest difference {largest:.1e} (at most {MOST_DIFFERENCE:.0e})")
    print(f"evaluate takes {ratio:.3f} times a bare encode (at most {MOST_OVERHEAD:.2f})")
    return 0 if largest < MOST_DIFFERENCE and ratio < MOST_OVERHEAD else 1


if __name__ == "__main__":
    sys.exit(main())
