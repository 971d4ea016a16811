"""A record per kind of task. Nothing is read until a task runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trundle.data.sampling import fingerprint
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.metrics import (
    _CLASSIFIER_ITERATIONS,
    _CLUSTERING_BATCH,
    _EXPERIMENTS,
    _SAMPLES_PER_LABEL,
    _classification_measures,
    _clustering_measures,
    _few_shot_samples,
    _pair_measures,
    _similarity_measures,
)
from trundle.evaluate.retrieval import _DEPTH, _Search

_WHOLE = "all"


def _read_columns(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """The named columns of a parquet file; optional ones where they are there."""
    try:
        present = pq.read_schema(path).names
        missing = [column for column in needed if column not in present]
        if missing:
            raise BadInput(
                f"{path} has no column {', '.join(missing)} (it has {', '.join(present)}); rename its columns"
            )
        return pq.read_table(path, columns=[*needed, *(column for column in optional if column in present)])
    except FileNotFoundError as error:
        raise BadInput(f"{path} is not there; a task of this kind needs it") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is not a whole parquet file ({error}); write it again") from error


def _choose_split(table: pa.Table, split: str, path: Path) -> tuple[pa.Table, str, str]:
    """The rows of a split, the split they are of, and a note where that is not the one asked for.

    A file without a split column is used whole. A file without a test part is judged on its dev part.
    """
    if "split" not in table.column_names:
        return table, _WHOLE, ""
    there = sorted(str(name) for name in pc.unique(table["split"]).to_pylist())
    used = "dev" if split == "test" and "test" not in there and "dev" in there else split
    rows = table.filter(pc.equal(table["split"], used))
    if rows.num_rows == 0:
        raise BadInput(
            f"{path} has no rows of the split {split!r}; it has {', '.join(there) or 'none at all'}"
        )
    return rows, used, "" if used == split else f"no {split} split, {used} is used"


def _texts_of(table: pa.Table, column: str, path: Path) -> list[str]:
    """A column as strings; an empty cell is refused by its row."""
    values = table[column].cast(pa.string()).to_pylist()
    for row, value in enumerate(values):
        if value is None:
            raise BadInput(
                f"{path} has no {column} in row {row} of the split; fill it in or leave the row out"
            )
    return [str(value) for value in values]


def _numbers_of(table: pa.Table, column: str, path: Path) -> list[float]:
    """A column as finite numbers."""
    try:
        values = table[column].cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path} has a {column} that is not a number ({error}); mend the column") from error
    if not pc.all(pc.is_finite(values.fill_null(float("nan")))).as_py():
        raise BadInput(
            f"{path} has a {column} that is empty or not finite; mend those rows or leave them out"
        )
    return [float(value) for value in values.to_pylist()]


_TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class _Scores:
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

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Encode the task's texts and score the vectors."""


@dataclass(frozen=True, kw_only=True)
class _FileTask:
    """A task kept in files; the kinds below say how they are read."""

    has_documents: ClassVar[bool] = False
    name: str
    path: Path
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class _SimilarityTask(_FileTask):
    """Sentence pairs with a score of likeness: the cosines should stand in the same order."""

    kind: ClassVar[str] = "sts"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Spearman correlation of cosine with the scores."""
        table = _read_columns(self.path, ("sentence1", "sentence2", "score"), ("split",))
        rows, split, note = _choose_split(table, self.split, self.path)
        left, right = _texts_of(rows, "sentence1", self.path), _texts_of(rows, "sentence2", self.path)
        scores = _numbers_of(rows, "score", self.path)
        return _Scores(
            main="spearman",
            measures=_similarity_measures(embedder.text(left), embedder.text(right), scores),
            split=split,
            texts=len({*left, *right}),
            fingerprint=fingerprint(zip(left, right, scores, strict=True)),
            seed=seed,
            settings={"similarity": "cosine"},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class _PairTask(_FileTask):
    """Sentence pairs labelled 1 or 0: the ones should have the higher cosines."""

    kind: ClassVar[str] = "pairs"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Average precision of cosine."""
        table = _read_columns(self.path, ("sentence1", "sentence2", "label"), ("split",))
        rows, split, note = _choose_split(table, self.split, self.path)
        left, right = _texts_of(rows, "sentence1", self.path), _texts_of(rows, "sentence2", self.path)
        labels = _numbers_of(rows, "label", self.path)
        if set(labels) != {0, 1}:
            raise BadInput(
                f"{self.path} must have the labels 0 and 1 in its {split} split; it has {set(labels)}"
            )
        return _Scores(
            main="ap",
            measures=_pair_measures(embedder.text(left), embedder.text(right), labels),
            split=split,
            texts=len({*left, *right}),
            fingerprint=fingerprint(zip(left, right, labels, strict=True)),
            seed=seed,
            settings={"similarity": "cosine"},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class _ClassificationTask(_FileTask):
    """Labelled texts: a linear classifier should learn them from a few vectors of each label."""

    kind: ClassVar[str] = "classification"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """Accuracy of few-shot logistic regression; only the training texts that are drawn get encoded."""
        table = _read_columns(self.path, ("text", "label", "split"))
        train, _, _ = _choose_split(table, _TRAIN, self.path)
        test, split, note = _choose_split(table, self.split, self.path)
        train_texts, train_labels = _texts_of(train, "text", self.path), _texts_of(train, "label", self.path)
        test_texts, test_labels = _texts_of(test, "text", self.path), _texts_of(test, "label", self.path)
        if len(set(train_labels)) < 2:
            raise BadInput(f"{self.path} has one label only in its train split; give at least two")
        samples = _few_shot_samples(train_labels, seed=seed)
        drawn = sorted(set().union(*samples))
        place = {row: position for position, row in enumerate(drawn)}
        return _Scores(
            main="accuracy",
            measures=_classification_measures(
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
                "max_iter": _CLASSIFIER_ITERATIONS,
                "samples_per_label": _SAMPLES_PER_LABEL,
                "experiments": _EXPERIMENTS,
            },
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class _ClusteringTask(_FileTask):
    """Labelled texts: the vectors should fall into groups like the labels."""

    kind: ClassVar[str] = "clustering"

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """V-measure of mini-batch k-means."""
        table = _read_columns(self.path, ("text", "label"), ("split",))
        rows, split, note = _choose_split(table, self.split, self.path)
        texts, labels = _texts_of(rows, "text", self.path), _texts_of(rows, "label", self.path)
        if len(set(labels)) < 2:
            raise BadInput(
                f"{self.path} has fewer than two labels in its {split} split; clusters need at least two"
            )
        return _Scores(
            main="v_measure",
            measures=_clustering_measures(embedder.text(texts), labels, seed=seed),
            split=split,
            texts=len(set(texts)),
            fingerprint=fingerprint(zip(texts, labels, strict=True)),
            seed=seed,
            settings={"clusters": "mini-batch k-means", "batch_size": _CLUSTERING_BATCH},
            note=note,
        )


@dataclass(frozen=True, kw_only=True)
class _RetrievalTask(_FileTask):
    """A folder of corpus, queries and judgements: the relevant documents should be the near ones."""

    kind: ClassVar[str] = "retrieval"
    has_documents: ClassVar[bool] = True

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """nDCG@10 of a search by cosine."""
        search, split, note = self.read()
        return _search_scores(search, embedder, split=split, seed=seed, note=note)

    def read(self) -> tuple[_Search, str, str]:
        """The collection, the split it is judged on, and a note where that is not the one asked for."""
        corpus_file, query_file = self.path / "corpus.parquet", self.path / "queries.parquet"
        judgement_file = self.path / "qrels.parquet"
        judgements = _read_columns(judgement_file, ("query-id", "corpus-id", "score"), ("split",))
        judgements, split, note = _choose_split(judgements, self.split, judgement_file)
        queries = _read_columns(query_file, ("_id", "text"), ("split",))
        if split == _WHOLE:
            queries, split, note = _choose_split(queries, self.split, query_file)
        elif "split" in queries.column_names:
            queries, _, _ = _choose_split(queries, split, query_file)
        corpus = _read_columns(corpus_file, ("_id", "text"), ("title",))
        documents = _texts_of(corpus, "text", corpus_file)
        if "title" in corpus.column_names:
            titles = (title or "" for title in corpus["title"].to_pylist())
            documents = [f"{title} {text}".strip() for title, text in zip(titles, documents, strict=True)]
        search = _Search.build(
            _by_id(_texts_of(queries, "_id", query_file), _texts_of(queries, "text", query_file), query_file),
            _by_id(_texts_of(corpus, "_id", corpus_file), documents, corpus_file),
            zip(
                _texts_of(judgements, "query-id", judgement_file),
                _texts_of(judgements, "corpus-id", judgement_file),
                _numbers_of(judgements, "score", judgement_file),
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

    def run(self, embedder: Embedder, *, seed: int) -> _Scores:
        """nDCG@10 of a search by cosine."""
        queries = {
            text: f"q{number}" for number, text in enumerate(dict.fromkeys(query for query, _ in self.pairs))
        }
        documents = {
            text: f"d{number}" for number, text in enumerate(dict.fromkeys(text for _, text in self.pairs))
        }
        search = _Search.build(
            {key: text for text, key in queries.items()},
            {key: text for text, key in documents.items()},
            ((queries[query], documents[document], 1) for query, document in self.pairs),
            self.name,
        )
        return _search_scores(search, embedder, split=_WHOLE, seed=seed, note="")


def _by_id(ids: Iterable[str], texts: Iterable[str], path: Path) -> dict[str, str]:
    """Texts by id; an id used twice would hide a text."""
    found: dict[str, str] = {}
    for key, text in zip(ids, texts, strict=True):
        if key in found:
            raise BadInput(f"{path} has the id {key!r} twice; give every row an id of its own")
        found[key] = text
    return found


def _search_scores(search: _Search, embedder: Embedder, *, split: str, seed: int, note: str) -> _Scores:
    return _Scores(
        main="ndcg@10",
        measures=search.measures(embedder),
        split=split,
        texts=len({*search.queries, *search.documents}),
        fingerprint=search.fingerprint,
        seed=seed,
        settings={"similarity": "cosine", "depth": _DEPTH},
        note="; ".join(part for part in (note, search.note) if part),
    )
