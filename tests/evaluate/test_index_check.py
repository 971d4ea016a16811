"""Whether a student can search an existing index, and how the result is described."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clusters import WIDTH, clustered, wanted
from trundle.embedder import Embedder, Similarity, Vectors, _plain, top_agreement
from trundle.errors import BadInput
from trundle.evaluate.index_check import _opening_words, check_index
from trundle.evaluate.retrieval import nearest
from trundle.index.connection import _find_columns, _TextColumns
from trundle.index.embedded import _create_embedded, _EmbeddedStore, _FolderReader
from trundle.index.readers import open_reader
from trundle.index.rows import _Wish, draw_sample

TEXTS = [f"Text number {number}. It goes on." for number in range(300)]
TRUE = dict(zip(TEXTS, clustered(len(TEXTS)), strict=True))


def embedder(noise: float, name: str, width: int = WIDTH) -> Embedder:
    """Knows the true vectors of texts and of their first sentences, more or less."""

    def encode(texts: Sequence[str]) -> Vectors:
        rng = np.random.default_rng(3)
        whole = {text.split(".")[0] + ".": text for text in TEXTS}
        rows = np.stack([TRUE[whole.get(text, text)] for text in texts])
        return (rows + noise * rng.normal(size=rows.shape)).astype(np.float32)[:, :width]

    return _plain(name, encode)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[_FolderReader]:
    _create_embedded(tmp_path / "index", wanted("binary"))
    store = _EmbeddedStore(tmp_path / "index")
    store.add(TEXTS, np.stack(list(TRUE.values())))
    store.finish()
    store.close()
    reader = _FolderReader(tmp_path / "index")
    yield reader
    reader.close()


def test_the_teacher_itself_agrees_with_itself(index: _FolderReader) -> None:
    for teacher in (None, embedder(0, "teacher")):
        found = check_index(index, embedder(0, "student"), teacher=teacher)
        assert found.agreement == found.first == 1
        assert found.cosine == pytest.approx(1)
        assert "without embedding any text again" in found.says()[2]
        assert "10.0" in found.says()[1]


def test_a_student_far_from_its_teacher_is_reported(index: _FolderReader) -> None:
    near, far = (check_index(index, embedder(noise, "student")) for noise in (0.3, 50.0))
    assert 0.4 < near.agreement < 1
    assert far.agreement < 0.2
    assert "trundle align" in far.says()[2]
    assert json.loads(json.dumps(far.as_json()))["agreement"] == far.agreement


def test_agreement_is_that_of_evaluate(index: _FolderReader) -> None:
    student, teacher = embedder(1.0, "student"), embedder(0, "teacher")
    found = check_index(index, student, teacher=teacher, texts=300, most_queries=50)
    drawn = draw_sample(index, 300, 0)
    asked = list(dict.fromkeys(filter(None, map(_opening_words, drawn.texts))))[:50]
    tops = [nearest(each.query(asked), drawn.vectors, 10) for each in (teacher, student)]
    assert found.agreement == pytest.approx(top_agreement(*tops))


@pytest.mark.parametrize("metric", ["cosine", "inner product", "l2"])
def test_the_metric_of_the_index_ranks(tmp_path: Path, metric: Similarity) -> None:
    table = {"text": TEXTS, "vector": [3 * row for row in TRUE.values()]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    reader, student = open_reader(str(tmp_path / "rows.parquet")), embedder(0.3, "student")
    reader.metric = metric
    drawn = draw_sample(reader, 300, 0)
    asked = list(drawn.texts[:100])
    rows = (student.document(asked), drawn.vectors[:100])
    queries = [each.query(list(map(_opening_words, asked))) for each in (student, embedder(0, "teacher"))]

    def by(one: Similarity) -> list[float]:
        own = [nearest(each, drawn.vectors, 10, left_out=range(100), similarity=one) for each in rows]
        found = [nearest(each, drawn.vectors, 10, similarity=one) for each in queries]
        return [top_agreement(*own), top_agreement(*found)]

    checks = [
        check_index(reader, student, teacher=teacher, most_queries=100).agreement
        for teacher in (None, embedder(0, "teacher"))
    ]
    assert checks == pytest.approx(by(metric))
    assert all(checks != pytest.approx(by(other)) for other in get_args(Similarity) if other != metric)


def test_a_teacher_that_did_not_build_the_index(index: _FolderReader) -> None:
    found = check_index(index, embedder(0, "student"), teacher=embedder(5.0, "another"))
    assert "did not build this index" in found.says()[-1]


def test_indexes_that_cant_be_checked(index: _FolderReader, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="name it with --teacher"):
        check_index(index, embedder(0, "student"), queries=["mine"])
    with pytest.raises(BadInput, match="returns vectors of width 16"):
        check_index(index, embedder(0, "student", width=16))
    _create_embedded(tmp_path / "few", wanted())
    few = _EmbeddedStore(tmp_path / "few")
    few.add(TEXTS[:5], np.stack([TRUE[text] for text in TEXTS[:5]]))
    few.close()
    with closing(_FolderReader(tmp_path / "few")) as reader, pytest.raises(BadInput, match="holds 5 texts"):
        check_index(reader, embedder(0, "student"))


def test_opening_words() -> None:
    assert [_opening_words(text) for text in ("One. Two.", "no stop", "a\nb", " ")] == [
        "One.",
        "no stop",
        "a",
        "",
    ]
    long = _opening_words("word " * 100)
    assert len(long) <= 160
    assert long.endswith("word")


def test_the_table_is_chosen_or_named() -> None:
    one = [
        ("public", "chunks", "id", "text"),
        ("public", "chunks", "content", "text"),
        ("public", "chunks", "embedding", "vector"),
        ("public", "users", "name", "varchar"),
    ]
    place = _TextColumns(schema="public", table="chunks", text="content", vector="embedding")
    assert _find_columns(one, _Wish()) == place
    two = [*one, ("public", "chunks", "small", "halfvec")]
    with pytest.raises(BadInput, match="name one with --vector-column"):
        _find_columns(two, _Wish())
    assert _find_columns(two, _Wish(table="chunks", texts="id", vectors="small")).vector == "small"
    unnamed = [("public", "t", "a", "text"), ("public", "t", "b", "text"), ("public", "t", "v", "vector")]
    with pytest.raises(BadInput, match="name one with --text-column: a, b"):
        _find_columns(unnamed, _Wish())
    with pytest.raises(BadInput, match="no column of pgvector's type"):
        _find_columns(one[:2], _Wish())
