"""Tasks that a model is scored on: one class per kind. Nothing is read until a task runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trundle.data.sampling import fingerprint
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate import metrics
from trundle.evaluate.retrieval import _DEPTH, _Collection

_ALL_ROWS = "all"


def _read_columns(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """The named columns of a parquet file; optional ones if they exist."""
    try:
        present = pq.read_schema(path).names
        missing = [column for column in needed if column not in present]
        if missing:
            lacks = f"no column {', '.join(missing)} (it has {', '.join(present)})"
            raise BadInput(f"{path} has {lacks}; rename its columns")
        return pq.read_table(path, columns=[*needed, *(column for column in optional if column in present)])
    except FileNotFoundError as error:
        raise BadInput(f"{path} does not exist; a task of this kind needs it") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is not a complete parquet file ({error}); write it again") from error


def _choose_split(table: pa.Table, split: str, path: Path) -> tuple[pa.Table, str, str]:
    """The rows of a split, its name, and a note if it is not the requested one: dev stands in for test."""
    if "split" not in table.column_names:
        return table, _ALL_ROWS, ""
    there = sorted(str(name) for name in pc.unique(table["split"]).to_pylist())
    used = "dev" if split == "test" and "test" not in there and "dev" in there else split
    rows = table.filter(pc.equal(table["split"], used))
    if rows.num_rows == 0:
        raise BadInput(f"{path} has no rows of the split {split!r}; it has {', '.join(there) or 'none'}")
    return rows, used, "" if used == split else f"no {split} split, {used} is used"


def _texts_of(table: pa.Table, column: str, path: Path) -> list[str]:
    """A column as strings; an empty cell is an error that names its row."""
    values = table[column].cast(pa.string()).to_pylist()
    for row, value in enumerate(values):
        if value is None:
            raise BadInput(f"{path} has no {column} in row {row} of the split; fill it in")
    return [str(value) for value in values]


def _numbers_of(table: pa.Table, column: str, path: Path) -> list[float]:
    try:
        values = table[column].cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path} has a {column} that is not a number ({error}); fix the column") from error
    if not pc.all(pc.is_finite(values.fill_null(float("nan")))).as_py():
        raise BadInput(f"{path} has a {column} that is empty or not finite; fix those rows or leave them out")
    return [float(value) for value in values.to_pylist()]


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """The result of one run of a task, and its data."""

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
        """The name in results."""

    @property
    def kind(self) -> str:
        """sts, retrieval, classification, clustering, pairs, or mteb's own type."""

    @property
    def has_documents(self) -> bool:
        """Whether it encodes queries and documents separately, so that two models can share them."""

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Encode the task's texts and score the vectors."""


@dataclass(frozen=True, kw_only=True)
class _FileTask:
    """A task in files; the kinds below say how they are read."""

    has_documents: ClassVar[bool] = False
    name: str
    path: Path
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class _SentencePairTask(_FileTask):
    """Sentence pairs with a similarity score, or labelled 1 or 0."""

    kind: Literal["sts", "pairs"]

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Spearman correlation of cosine with the score, or its average precision for the label."""
        column = "score" if self.kind == "sts" else "label"
        table = _read_columns(self.path, ("sentence1", "sentence2", column), ("split",))
        rows, split, note = _choose_split(table, self.split, self.path)
        left, right = _texts_of(rows, "sentence1", self.path), _texts_of(rows, "sentence2", self.path)
        numbers = _numbers_of(rows, column, self.path)
        if self.kind == "pairs" and set(numbers) != {0, 1}:
            raise BadInput(f"the labels of {self.path} ({split}) must be 0 and 1; they are {set(numbers)}")
        measure = metrics._pair_measures if self.kind == "pairs" else metrics._similarity_measures
        return _Scores(
            main="ap" if self.kind == "pairs" else "spearman",
            measures=measure(embedder.text(left), embedder.text(right), numbers),
            split=split,
            texts=len({*left, *right}),
            fingerprint=fingerprint(zip(left, right, numbers, strict=True)),
            seed=seed,
            settings={"similarity": "cosine"},
            note=note,
        )


class _ClassificationTask(_FileTask):
    """Labelled texts: accuracy of a linear classifier trained on a few vectors of each label."""

    kind = "classification"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        table = _read_columns(self.path, ("text", "label", "split"))
        train, _, _ = _choose_split(table, "train", self.path)
        test, split, note = _choose_split(table, self.split, self.path)
        train_texts, train_labels = _texts_of(train, "text", self.path), _texts_of(train, "label", self.path)
        test_texts, test_labels = _texts_of(test, "text", self.path), _texts_of(test, "label", self.path)
        if len(set(train_labels)) < 2:
            raise BadInput(f"{self.path} has only one label in its train split; add a second one")
        samples = metrics._few_shot_samples(train_labels, seed=seed)
        sampled = sorted(set().union(*samples))
        place = {row: position for position, row in enumerate(sampled)}
        places = [[place[row] for row in sample] for sample in samples]
        shots, labels = [train_texts[row] for row in sampled], [train_labels[row] for row in sampled]
        train_vectors, test_vectors = embedder.text(shots), embedder.text(test_texts)
        return _Scores(
            main="accuracy",
            measures=metrics._classification_measures(
                train_vectors, labels, test_vectors, test_labels, places
            ),
            split=split,
            texts=len({*test_texts, *shots}),
            fingerprint=fingerprint([train_texts, train_labels, test_texts, test_labels]),
            seed=seed,
            settings={
                "classifier": "logistic regression",
                "max_iter": metrics._CLASSIFIER_ITERATIONS,
                "samples_per_label": metrics._SAMPLES_PER_LABEL,
                "experiments": metrics._EXPERIMENTS,
            },
            note=note,
        )


class _ClusteringTask(_FileTask):
    """Labelled texts: V-measure of clusters of their vectors."""

    kind = "clustering"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        table = _read_columns(self.path, ("text", "label"), ("split",))
        rows, split, note = _choose_split(table, self.split, self.path)
        texts, labels = _texts_of(rows, "text", self.path), _texts_of(rows, "label", self.path)
        if len(set(labels)) < 2:
            raise BadInput(f"{self.path} has fewer than two labels in its {split} split; add a second one")
        return _Scores(
            main="v_measure",
            measures=metrics._clustering_measures(embedder.text(texts), labels, seed=seed),
            split=split,
            texts=len(set(texts)),
            fingerprint=fingerprint(zip(texts, labels, strict=True)),
            seed=seed,
            settings={"clusters": "mini-batch k-means", "batch_size": metrics._CLUSTERING_BATCH},
            note=note,
        )


class _RetrievalTask(_FileTask):
    """A folder of corpus, queries and judgements."""

    kind = "retrieval"
    has_documents = True

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        collection, split, note = self.read()
        return _retrieval_scores(collection, embedder, split=split, seed=seed, note=note)

    def read(self) -> tuple[_Collection, str, str]:
        names = ("corpus.parquet", "queries.parquet", "qrels.parquet")
        corpus_file, query_file, judgement_file = (self.path / name for name in names)
        judgements = _read_columns(judgement_file, ("query-id", "corpus-id", "score"), ("split",))
        judgements, split, note = _choose_split(judgements, self.split, judgement_file)
        queries = _read_columns(query_file, ("_id", "text"), ("split",))
        if split == _ALL_ROWS:
            queries, split, note = _choose_split(queries, self.split, query_file)
        elif "split" in queries.column_names:
            queries, _, _ = _choose_split(queries, split, query_file)
        corpus = _read_columns(corpus_file, ("_id", "text"), ("title",))
        documents = _texts_of(corpus, "text", corpus_file)
        if "title" in corpus.column_names:
            titled = zip(corpus["title"].to_pylist(), documents, strict=True)
            documents = [f"{title or ''} {text}".strip() for title, text in titled]
        asked = _by_id(queries, _texts_of(queries, "text", query_file), query_file)
        ids = (_texts_of(judgements, f"{kind}-id", judgement_file) for kind in ("query", "corpus"))
        grades = zip(*ids, _numbers_of(judgements, "score", judgement_file), strict=True)
        held = _by_id(corpus, documents, corpus_file)
        return _Collection.build(asked, held, grades, str(self.path)), split, note


@dataclass(frozen=True, kw_only=True)
class KnownItemTask:
    """Queries in memory that each have one relevant document.

    Equal queries share their documents, and equal documents are one.
    """

    kind: ClassVar[str] = "retrieval"
    has_documents: ClassVar[bool] = True
    name: str
    pairs: Sequence[tuple[str, str]] = field(repr=False)

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """nDCG@10 of a search by cosine."""
        queries = {text: f"q{number}" for number, text in enumerate(dict.fromkeys(q for q, _ in self.pairs))}
        documents = {text: f"d{place}" for place, text in enumerate(dict.fromkeys(d for _, d in self.pairs))}
        judgements = ((queries[query], documents[document], 1) for query, document in self.pairs)
        asked, held = ({key: text for text, key in keys.items()} for keys in (queries, documents))
        collection = _Collection.build(asked, held, judgements, self.name)
        return _retrieval_scores(collection, embedder, split=_ALL_ROWS, seed=seed, note="")


_TASK_KINDS: Mapping[str, Callable[..., Task]] = {
    "sts": partial(_SentencePairTask, kind="sts"),
    "retrieval": _RetrievalTask,
    "classification": _ClassificationTask,
    "clustering": _ClusteringTask,
    "pairs": partial(_SentencePairTask, kind="pairs"),
}


def _by_id(table: pa.Table, texts: Iterable[str], path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, text in zip(_texts_of(table, "_id", path), texts, strict=True):
        if key in found:
            raise BadInput(f"{path} has the id {key!r} twice; use every id once")
        found[key] = text
    return found


def _retrieval_scores(
    collection: _Collection, embedder: Embedder, *, split: str, seed: int, note: str
) -> _Scores:
    return _Scores(
        main="ndcg@10",
        measures=collection.measures(embedder),
        split=split,
        texts=len({*collection.queries, *collection.documents}),
        fingerprint=collection.fingerprint,
        seed=seed,
        settings={"similarity": "cosine", "depth": _DEPTH},
        note="; ".join(part for part in (note, collection.note) if part),
    )
