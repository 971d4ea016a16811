from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.feature_extraction.text import HashingVectorizer

from trundle.embedder import Embedder, Vectors, _plain

Write = Callable[[str, Mapping[str, Sequence[object]]], Path]


def bag_of_words(name: str = "bag of words", width: int = 64) -> Embedder:
    """A cheap real embedder: hashed word counts."""
    vectorizer = HashingVectorizer(n_features=width)

    def encode(texts: Sequence[str]) -> Vectors:
        return vectorizer.transform(texts).toarray().astype(np.float32)

    return _plain(name, encode)


@pytest.fixture
def words() -> Embedder:
    return bag_of_words()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a parquet file under a fresh root of tasks."""

    def put(place: str, columns: Mapping[str, Sequence[object]]) -> Path:
        path = tmp_path / "tasks" / f"{place}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(dict(columns)), path)
        return path

    return put


@pytest.fixture
def root(write: Write) -> Path:
    """A small root with one task of each kind."""
    write(
        "sts/Likeness",
        {
            "sentence1": ["a cat sat", "a dog ran", "rain fell", "old dev row"],
            "sentence2": ["the cat sat", "stock prices rose", "rain was falling", "old dev line"],
            "score": [5.0, 0.0, 3.0, 2.0],
            "split": ["test", "test", "test", "dev"],
        },
    )
    write(
        "pairs/Same",
        {
            "sentence1": ["a cat", "a dog", "red"],
            "sentence2": ["a cat", "a house", "red"],
            "label": [1, 0, 1],
            "split": ["dev", "dev", "dev"],
        },
    )
    write(
        "classification/Animals",
        {
            "text": ["cat one", "cat two", "dog one", "dog two", "cat three", "dog three"],
            "label": ["cat", "cat", "dog", "dog", "cat", "dog"],
            "split": ["train", "train", "train", "train", "test", "test"],
        },
    )
    write("clustering/Groups", {"text": ["x x", "x", "y y", "y"], "label": ["x", "x", "y", "y"]})
    write(
        "retrieval/Small/corpus",
        {"_id": ["d1", "d2", "d3"], "title": ["Cats", "", "Rain"], "text": ["they purr", "dogs bark", ""]},
    )
    write(
        "retrieval/Small/queries",
        {"_id": ["q1", "q2"], "text": ["cats purr", "dogs"], "split": ["test", "test"]},
    )
    return write(
        "retrieval/Small/qrels",
        {"query-id": ["q1", "q2"], "corpus-id": ["d1", "d2"], "score": [1, 2], "split": ["test", "test"]},
    ).parents[2]
