"""Whether trundle's measures equal those of mteb and sentence-transformers, and what `evaluate` costs.

    python benchmarks/evaluators.py MODEL --data FOLDER_OF_TASKS [--rounds 3] [--tasks NAME ...]

First the vectors of one task of each kind go through mteb's and sentence-transformers' own evaluators; every measure
must be within 1e-6 of trundle's. Then `evaluate` is timed against a bare encode of the same distinct texts, interleaved;
the goal is a ratio below 1.10.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
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

import harness
from trundle.embedder import Embedder, Encode, Vectors
from trundle.evaluate import MtebTask, Task, evaluate, find_tasks
from trundle.evaluate.encoding import Memory
from trundle.evaluate.files import choose_split, numbers_of, read_columns, texts_of
from trundle.evaluate.mteb import MtebEncoder
from trundle.model import embedder, load

TASKS = ("STSBenchmark", "MRPC", "TREC", "SearchSnippets", "Cranfield")
MOST_DIFFERENCE = 1e-6
LIBRARY = "sentence-transformers"
Measures = Mapping[str, float]


class Kept(SentenceTransformer):
    """The library's own model with vectors that were computed before."""

    def __init__(self, model: Embedder) -> None:
        super().__init__(modules=[torch.nn.Identity()], device="cpu")
        self.encode = self._role(model.text)  # type: ignore[method-assign]
        self.encode_query = self._role(model.query)  # type: ignore[method-assign]
        self.encode_document = self._role(model.document)  # type: ignore[method-assign]

    def _role(self, encode: Encode) -> Any:
        def encoded(texts: Sequence[str], *, convert_to_tensor: bool = False, **_options: object) -> Any:
            return torch.from_numpy(encode(texts)) if convert_to_tensor else encode(texts)

        return encoded


def table(**columns: Sequence[object]) -> Any:
    return Dataset.from_dict({name: list(values) for name, values in columns.items()})


def by_mteb(mock: Any, data: object, model: Embedder) -> Measures:
    """Return the measures that mteb takes on our data."""

    class Given(mock):  # type: ignore[misc]
        def load_data(self, **_options: object) -> None:
            self.dataset = data
            self.data_loaded = True

    return evaluate(model, [MtebTask(task=Given())])[0].measures


def of_pairs(task: Any, model: Embedder) -> dict[str, Measures]:
    """Compare STS and pair classification."""
    label = "score" if task.kind == "sts" else "label"
    columns = read_columns(task.path, ("sentence1", "sentence2", label, "split"))
    rows, _, _ = choose_split(columns, "test", task.path)
    left, right = (texts_of(rows, name, task.path) for name in ("sentence1", "sentence2"))
    values = numbers_of(rows, label, task.path)
    if task.kind == "sts":
        theirs = by_mteb(MockSTSTask, {"test": table(sentence1=left, sentence2=right, score=values)}, model)
        library = EmbeddingSimilarityEvaluator(left, right, values, write_csv=False)(Kept(model))
        return {
            "mteb": {name: theirs[f"cosine_{name}"] for name in ("spearman", "pearson")},
            LIBRARY: {name: library[f"{name}_cosine"] for name in ("spearman", "pearson")},
        }
    labels = [int(value) for value in values]
    data = {"test": table(sentence1=left, sentence2=right, labels=labels)}
    binary = BinaryClassificationEvaluator(
        left, right, labels, write_csv=False, similarity_fn_names=["cosine"]
    )
    return {
        "mteb": {"ap": by_mteb(MockPairClassificationTask, data, model)["cosine_ap"]},
        LIBRARY: {"ap": binary(Kept(model))["cosine_ap"]},
    }


def of_classification(task: Any, model: Embedder) -> dict[str, Measures]:
    whole = read_columns(task.path, ("text", "label", "split"))
    number = {label: place for place, label in enumerate(sorted(set(texts_of(whole, "label", task.path))))}
    data = {}
    for split in ("train", "test"):
        rows, _, _ = choose_split(whole, split, task.path)
        labels = [number[label] for label in texts_of(rows, "label", task.path)]
        data[split] = table(text=texts_of(rows, "text", task.path), label=labels)
    theirs = by_mteb(MockClassificationTask, DatasetDict(data), model)
    return {"mteb": {name: theirs[name] for name in ("accuracy", "f1")}}


def of_clustering(task: Any, model: Embedder) -> dict[str, Measures]:
    rows = read_columns(task.path, ("text", "label"))
    texts, labels = texts_of(rows, "text", task.path), texts_of(rows, "label", task.path)
    data = DatasetDict(test=table(sentences=[texts], labels=[labels]))
    return {"mteb": {"v_measure": by_mteb(MockClusteringTask, data, model)["v_measure"]}}


def of_retrieval(task: Any, model: Embedder) -> dict[str, Measures]:
    search, _, _ = task.read()
    asked = [f"q{row}" for row in range(len(search.queries))]
    # With falling ids mteb breaks ties as trundle does, with rising ones sentence-transformers.
    falling = [f"d{len(search.documents) - place:07}" for place in range(len(search.documents))]
    rising = [f"d{place:07}" for place in range(len(search.documents))]
    grades = dict(zip(asked, search.grades, strict=True))
    evaluator = RetrievalEvaluator(
        table(id=falling, text=search.documents, title=[""] * len(falling)),
        table(id=asked, text=search.queries),
        task_metadata=MockRetrievalTask.metadata,
        hf_split="test",
        hf_subset="default",
        top_k=100,
        timer=TimingStack(),
    )
    encode = {"batch_size": 32, "show_progress_bar": False}
    found = evaluator(SearchEncoderWrapper(MtebEncoder(model)), encode_kwargs=encode)
    judged = {query: {falling[at]: int(grade) for at, grade in own.items()} for query, own in grades.items()}
    theirs = evaluator.evaluate(judged, found, [10, 100])
    library = InformationRetrievalEvaluator(
        dict(zip(asked, search.queries, strict=True)),
        dict(zip(rising, search.documents, strict=True)),
        {query: {rising[at] for at, grade in own.items() if grade > 0} for query, own in grades.items()},
        mrr_at_k=[10],
        precision_recall_at_k=[10, 100],
        write_csv=False,
    )(Kept(model))
    ours = {"ndcg@10": "ndcg_cut_10", "recall@10": "recall_10", "recall@100": "recall_100"}
    by_name = {
        name: float(np.mean([one[key] for one in theirs.all_scores.values()])) for name, key in ours.items()
    }
    # sentence-transformers has no grades, so its nDCG is another measure where there are some.
    graded = any(grade > 1 for own in search.judged for grade in own)
    compared = [name for name in (*ours, "mrr@10") if not (graded and name == "ndcg@10")]
    return {
        "mteb": by_name | {"mrr@10": theirs.mrr["MRR@10"]},
        LIBRARY: {name: library[f"cosine_{name}"] for name in compared},
    }


REFERENCES = {
    "sts": of_pairs,
    "pairs": of_pairs,
    "classification": of_classification,
    "clustering": of_clustering,
    "retrieval": of_retrieval,
}


def differences(model: Embedder, tasks: Sequence[Any]) -> float:
    """Print every measure next to the reference and return the largest difference."""
    kept, largest = Memory().remember(model, "benchmark"), 0.0
    for task in tasks:
        [ours] = evaluate(kept, [task])
        for reference, measures in REFERENCES[task.kind](task, kept).items():
            for name, value in measures.items():
                apart = abs(ours.measures[name] - value)
                largest = max(largest, apart)
                print(f"{task.name:16}{name:12}{ours.measures[name]:12.8f}  {reference:24}{apart:12.1e}")
    return largest


def overhead(library: SentenceTransformer, tasks: Sequence[Task], rounds: int) -> None:
    """Time `evaluate` on all tasks against a bare encode of the texts it asks for."""
    model = embedder(library)
    asked: dict[str, dict[str, None]] = {"encode": {}, "encode_query": {}, "encode_document": {}}
    inside = [0.0]

    def listening(role: str, encode: Encode) -> Encode:
        def listened(texts: Sequence[str]) -> Vectors:
            asked[role].update(dict.fromkeys(texts))
            began = time.perf_counter()
            vectors = encode(texts)
            inside[-1] += time.perf_counter() - began
            return vectors

        return listened

    text, query, document = map(listening, asked, (model.text, model.query, model.document))
    heard = Embedder(name=model.name, text=text, query=query, document=document)

    def whole() -> None:
        inside.append(0.0)
        evaluate(heard, tasks)

    def bare() -> None:
        for role, texts in asked.items():
            if texts:
                getattr(library, role)(list(texts), show_progress_bar=False)

    ways = {
        "evaluate": lambda: harness.timed(whole),
        "bare": lambda: harness.timed(bare),
    }
    found = harness.interleave(ways, rounds)
    for place, name in enumerate(("by the clock", "of CPU time")):
        ours, theirs = ([one[place] for one in found[way]] for way in ways)
        print(f"evaluate to a bare encode, {name}: {harness.ratio_of(ours, theirs)}")
    own = harness.ratio_of([one[0] for one in found["evaluate"]], inside[2:])  # without the warm-up
    print(f"evaluate to the encoding inside it: {own}")


def main() -> int:
    parser = harness.make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    options = parser.parse_args()
    disable_progress_bars()
    library, tasks = load(options.model), find_tasks(options.tasks, options.data)
    largest = differences(embedder(library), tasks)
    print(f"largest difference {largest:.1e} (at most {MOST_DIFFERENCE:.0e})")
    overhead(library, tasks, options.rounds)
    return int(largest >= MOST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
