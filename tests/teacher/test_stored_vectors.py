"""Rows of an index as a store of targets, and vectors that are found by their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from fake_teacher import Teacher as FakeTeacher
from fake_teacher import build, vector
from recorded_progress import RecordedProgress
from trundle.data.texts import Text
from trundle.embedder import Similarity, Vectors
from trundle.errors import BadInput
from trundle.index.rows import _RowBatch, _RowCounts
from trundle.teacher import labelling, teacher_kind, without_secrets
from trundle.teacher.stored import IndexRows, stored_embedder

WIDTH = 8


@dataclass
class Reader:
    """An index in memory that breaks after some batches on request."""

    texts: list[str]
    vectors: Vectors
    metric: Similarity = "cosine"
    where: str = "memory"
    breaks_after: int | None = None
    counts: _RowCounts = field(default_factory=_RowCounts)
    scans: int = 0

    @property
    def count(self) -> int:
        return len(self.texts)

    @property
    def width(self) -> int:
        return int(self.vectors.shape[1])

    def rows(self, sample: int | None = None, seed: int = 0) -> Iterator[_RowBatch]:  # noqa: ARG002
        self.scans += 1
        for start in range(0, min(sample or self.count, self.count), 4):
            if self.breaks_after is not None and start // 4 == self.breaks_after:
                raise BadInput("the server went away")
            part = slice(start, start + 4)
            ids = tuple(map(str, range(start, start + 4)))
            yield _RowBatch(raw_ids=list(ids), texts=tuple(self.texts[part]), vectors=self.vectors[part])

    def close(self) -> None:
        pass


def reader(count: int = 20, scale: float = 3.0) -> Reader:
    texts = [f"row {number}" for number in range(count)]
    lengths = scale * np.arange(1, count + 1, dtype=np.float32)[:, None]
    return Reader(texts, lengths * np.stack([vector("document", text) for text in texts]))


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows reach the store in fours, not in thousands."""
    monkeypatch.setattr(labelling, "_HASHED_TEXTS", 4)


def test_vectors_compared_by_cosine_get_length_1(tmp_path: Path) -> None:
    targets = IndexRows(reader=reader()).targets(tmp_path)
    assert targets.normalised
    assert set(targets.kinds(range(20))) == {"document"}
    expected = np.stack([vector("document", text) for text in targets.texts(range(20))])
    np.testing.assert_allclose(targets.vectors(range(20)), expected, atol=1e-3)


@pytest.mark.parametrize("metric", ["inner product", "l2"])
def test_other_vectors_keep_their_length(tmp_path: Path, metric: Similarity) -> None:
    source = reader(scale=1e5)  # too long for half precision
    source.metric = metric
    targets = IndexRows(reader=source).targets(tmp_path)
    assert not targets.normalised
    np.testing.assert_array_equal(targets.vectors(range(20)), source.vectors)


@pytest.mark.usefixtures("small_steps")
def test_an_interrupted_reading_resumes_and_a_finished_one_is_not_repeated(tmp_path: Path) -> None:
    source = reader()
    rows = IndexRows(reader=source)
    source.breaks_after = 3
    with pytest.raises(BadInput, match="went away"):
        rows.targets(tmp_path, shard_size=4)
    stored = len(list(tmp_path.glob("*.vectors.npy")))
    assert stored > 0
    source.breaks_after = None
    assert len(rows.targets(tmp_path, shard_size=4)) == 20
    scans = source.scans
    assert len(rows.targets(tmp_path, shard_size=4)) == 20
    assert source.scans == scans
    assert len(replace(rows, fresh=True).targets(tmp_path, shard_size=4)) == 20
    assert source.scans > scans


@pytest.mark.usefixtures("small_steps")
def test_an_index_that_changed_meanwhile_is_read_again(tmp_path: Path) -> None:
    source, progress = reader(), RecordedProgress()
    source.breaks_after = 3
    with pytest.raises(BadInput):
        IndexRows(reader=source).targets(tmp_path, shard_size=4)
    source.breaks_after, source.texts[0] = None, "another text"
    targets = IndexRows(reader=source).targets(tmp_path, shard_size=4, progress=progress)
    assert targets.texts([0]) == ["another text"]
    assert any("has changed" in said for said in progress.lines)


def test_reading_stops_when_its_time_is_over(tmp_path: Path) -> None:
    assert len(IndexRows(reader=reader(), seconds=0.0).targets(tmp_path)) == 4


def test_vectors_are_found_by_text_and_role(tmp_path: Path) -> None:
    source = reader()
    source.texts[1] = source.texts[0]
    targets = IndexRows(reader=source).targets(tmp_path)
    known = stored_embedder(targets, "memory")
    np.testing.assert_array_equal(known.document(["row 5"]), known.query(["row 5"]))
    np.testing.assert_allclose(known.text(["row 7"])[0], vector("document", "row 7"), atol=1e-3)
    with pytest.raises(BadInput, match="as the teacher"):
        known.query(["unknown"])
    maker = FakeTeacher()
    both = stored_embedder(targets, "memory", maker=maker.embedder).query(["row 5", "unknown", "row 7"])
    assert maker.calls == [["unknown"]]
    np.testing.assert_array_equal(both[1], vector("query", "unknown"))
    np.testing.assert_allclose(both[2], vector("document", "row 7"), atol=1e-3)


def test_a_text_stored_in_two_roles_is_found_in_its_own(tmp_path: Path) -> None:
    targets = build(tmp_path, [Text(text="a", kind="document"), Text(text="a", kind="query")])
    known = stored_embedder(targets, "store")
    np.testing.assert_allclose(known.query(["a"])[0], vector("query", "a"), atol=1e-3)
    np.testing.assert_allclose(known.document(["a"])[0], vector("document", "a"), atol=1e-3)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://me:s3cr3t@host/db?table=chunks", "postgresql://me@host/db?table=chunks"),
        ("postgresql://me:a/b@c@host/db", "postgresql://me@host/db"),
        ("qdrant://host:6333/chunks?api_key=s3cr3t", "qdrant://host:6333/chunks?api_key=…"),
        (
            "postgresql://host/db?user=me&password=s3cr3t&table=x",
            "postgresql://host/db?user=me&password=…&table=x",
        ),
        ("a folder:with@signs", "a folder:with@signs"),
    ],
)
def test_no_secret_is_shown(address: str, shown: str) -> None:
    assert without_secrets(address) == shown


def test_a_teacher_is_what_its_name_says(tmp_path: Path) -> None:
    (tmp_path / "chroma.sqlite3").touch()
    (tmp_path / "vectors.faiss").touch()
    names = ["https://server/v1", "rows.parquet", "postgresql://host/db", "all-MiniLM-L6-v2", str(tmp_path)]
    kinds = [teacher_kind(name) for name in [*names, str(tmp_path / "vectors.faiss")]]
    assert kinds == ["endpoint", "table", "index", "model", "index", "index"]
