"""A record per kind of task. Nothing is read until a task runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from trundle.data import fingerprint
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate import metrics
from trundle.evaluate.files import WHOLE, choose_split, numbers_of, read_columns, texts_of
from trundle.evaluate.ranking import DEPTH
from trundle.evaluate.search import Search

TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What one run of a task found, and on what."""

    main: str
    measures: Mapping[str, float]
    split: str
    texts: int
    fingerprint: str
    seed: int
    settings: Mapping[str, Any]
    note: str = ""


class Task(Protocol):
    """Something a model can be scored on."""

    @property
    def name(self) -> str:
        """What results call it."""

    @property
    def kind(self) -> str:
        """sts, retrieval, classification, clustering, pairs, or what mteb calls it."""

    @property
    def has_documents(self) -> bool:
        """Whether it encodes queries and documents apart, so that two models can share the work."""

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """Encode the task's texts and score the vectors."""


@dataclass(frozen=True, kw_only=True)
class FileTask:
    """A task kept in files; the kinds below say how they are read."""

    has_documents: ClassVar[bool] = False
    name: str
    path: Path
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class SimilarityTask(FileTask):
    """Sentence pairs with a score of likeness: the cosines should stand in the same order."""

    kind: ClassVar[str] = "sts"

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """Spearman correlation of cosine with the scores."""
        table = read_columns(self.path, ("sentence1", "sentence2", "score"), ("split",))
        rows, split, note = choose_split(table, self.split, self.path)
        left, right = texts_of(rows, "sentence1", self.path), texts_of(rows, "sentence2", self.path)
        scores = numbers_of(rows, "score", self.path)
        return Scores(
            main="spearman",
            measures=metrics.similarity_measures(embedder.text(left), embedder.text(right), scores),
            split=split,
            texts=len({*left, *right}),
            fingerprint=fingerprint(zip(left, right, scores, strict=True)),
            seed=seed,
            settings={"similarity": "cosine"},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class PairTask(FileTask):
    """Sentence pairs labelled 1 or 0: the ones should have the higher cosines."""

    kind: ClassVar[str] = "pairs"

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """Average precision of cosine."""
        table = read_columns(self.path, ("sentence1", "sentence2", "label"), ("split",))
        rows, split, note = choose_split(table, self.split, self.path)
        left, right = texts_of(rows, "sentence1", self.path), texts_of(rows, "sentence2", self.path)
        labels = numbers_of(rows, "label", self.path)
        if set(labels) != {0, 1}:
            raise BadInput(
                f"{self.path} must have the labels 0 and 1 in its {split} split; it has {set(labels)}"
            )
        return Scores(
            main="ap",
            measures=metrics.pair_measures(embedder.text(left), embedder.text(right), labels),
            split=split,
            texts=len({*left, *right}),
            fingerprint=fingerprint(zip(left, right, labels, strict=True)),
            seed=seed,
            settings={"similarity": "cosine"},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class ClassificationTask(FileTask):
    """Labelled texts: a linear classifier should learn them from a few vectors of each label."""

    kind: ClassVar[str] = "classification"

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """Accuracy of few-shot logistic regression; only the training texts that are drawn get encoded."""
        table = read_columns(self.path, ("text", "label", "split"))
        train, _, _ = choose_split(table, TRAIN, self.path)
        test, split, note = choose_split(table, self.split, self.path)
        train_texts, train_labels = texts_of(train, "text", self.path), texts_of(train, "label", self.path)
        test_texts, test_labels = texts_of(test, "text", self.path), texts_of(test, "label", self.path)
        if len(set(train_labels)) < 2:
            raise BadInput(f"{self.path} has one label only in its train split; give at least two")
        samples = metrics.few_shot_samples(train_labels, seed=seed)
        drawn = sorted(set().union(*samples))
        place = {row: position for position, row in enumerate(drawn)}
        return Scores(
            main="accuracy",
            measures=metrics.classification_measures(
                embedder.text([train_texts[row] for row in drawn]),
                [train_labels[row] for row in drawn],
                embedder.text(test_texts),
                test_labels,
                [[place[row] for row in sample] for sample in samples],
            ),
            split=split,
            texts=len({*test_texts, *(train_texts[row] for row in drawn)}),
            fingerprint=fingerprint([train_texts, train_labels, test_texts, test_labels]),
            seed=seed,
            settings={
                "classifier": "logistic regression",
                "max_iter": metrics.CLASSIFIER_ITERATIONS,
                "samples_per_label": metrics.SAMPLES_PER_LABEL,
                "experiments": metrics.EXPERIMENTS,
            },
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class ClusteringTask(FileTask):
    """Labelled texts: the vectors should fall into groups like the labels."""

    kind: ClassVar[str] = "clustering"

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """V-measure of mini-batch k-means."""
        table = read_columns(self.path, ("text", "label"), ("split",))
        rows, split, note = choose_split(table, self.split, self.path)
        texts, labels = texts_of(rows, "text", self.path), texts_of(rows, "label", self.path)
        if len(set(labels)) < 2:
            raise BadInput(
                f"{self.path} has fewer than two labels in its {split} split; clusters need at least two"
            )
        return Scores(
            main="v_measure",
            measures=metrics.clustering_measures(embedder.text(texts), labels, seed=seed),
            split=split,
            texts=len(set(texts)),
            fingerprint=fingerprint(zip(texts, labels, strict=True)),
            seed=seed,
            settings={"clusters": "mini-batch k-means", "batch_size": metrics.CLUSTERING_BATCH},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class RetrievalTask(FileTask):
    """A folder of corpus, queries and judgements: the relevant documents should be the near ones."""

    kind: ClassVar[str] = "retrieval"
    has_documents: ClassVar[bool] = True

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """nDCG@10 of a search by cosine."""
        search, split, note = self.read()
        return _search_scores(search, embedder, split=split, seed=seed, note=note)

    def read(self) -> tuple[Search, str, str]:
        """The collection, the split it is judged on, and a note where that is not the one asked for."""
        corpus_file, query_file = self.path / "corpus.parquet", self.path / "queries.parquet"
        judgement_file = self.path / "qrels.parquet"
        judgements = read_columns(judgement_file, ("query-id", "corpus-id", "score"), ("split",))
        judgements, split, note = choose_split(judgements, self.split, judgement_file)
        queries = read_columns(query_file, ("_id", "text"), ("split",))
        if split == WHOLE:
            queries, split, note = choose_split(queries, self.split, query_file)
        elif "split" in queries.column_names:
            queries, _, _ = choose_split(queries, split, query_file)
        corpus = read_columns(corpus_file, ("_id", "text"), ("title",))
        documents = texts_of(corpus, "text", corpus_file)
        if "title" in corpus.column_names:
            titles = (title or "" for title in corpus["title"].to_pylist())
            documents = [f"{title} {text}".strip() for title, text in zip(titles, documents, strict=True)]
        search = Search.build(
            _by_id(texts_of(queries, "_id", query_file), texts_of(queries, "text", query_file), query_file),
            _by_id(texts_of(corpus, "_id", corpus_file), documents, corpus_file),
            zip(
                texts_of(judgements, "query-id", judgement_file),
                texts_of(judgements, "corpus-id", judgement_file),
                numbers_of(judgements, "score", judgement_file),
                strict=True,
            ),
            str(self.path),
        )
        return search, split, note


@dataclass(frozen=True, kw_only=True)
class KnownItemTask:
    """Queries that each have a document of their own, held in memory: it should rank above all others.

    Queries that are equal share their documents, and equal documents are one.
    """

    kind: ClassVar[str] = "retrieval"
    has_documents: ClassVar[bool] = True
    name: str
    pairs: Sequence[tuple[str, str]] = field(repr=False)

    def run(self, embedder: Embedder, *, seed: int) -> Scores:
        """nDCG@10 of a search by cosine."""
        queries = {
            text: f"q{number}" for number, text in enumerate(dict.fromkeys(query for query, _ in self.pairs))
        }
        documents = {
            text: f"d{number}" for number, text in enumerate(dict.fromkeys(text for _, text in self.pairs))
        }
        search = Search.build(
            {key: text for text, key in queries.items()},
            {key: text for text, key in documents.items()},
            ((queries[query], documents[document], 1) for query, document in self.pairs),
            self.name,
        )
        return _search_scores(search, embedder, split=WHOLE, seed=seed, note="")


def _by_id(ids: Iterable[str], texts: Iterable[str], path: Path) -> dict[str, str]:
    """Texts by id; an id used twice would hide a text."""
    found: dict[str, str] = {}
    for key, text in zip(ids, texts, strict=True):
        if key in found:
            raise BadInput(f"{path} has the id {key!r} twice; give every row an id of its own")
        found[key] = text
    return found


def _search_scores(search: Search, embedder: Embedder, *, split: str, seed: int, note: str) -> Scores:
    return Scores(
        main="ndcg@10",
        measures=search.measures(embedder),
        split=split,
        texts=len({*search.queries, *search.documents}),
        fingerprint=search.fingerprint,
        seed=seed,
        settings={"similarity": "cosine", "depth": DEPTH},
        note="; ".join(part for part in (note, search.note) if part),
    )
