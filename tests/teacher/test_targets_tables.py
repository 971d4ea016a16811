"""A table of existing vectors becomes a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fake_teacher import ROLE_OF, WIDTH, assert_holds, make_texts, vector
from recorded_progress import RecordedProgress
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.teacher.stored import _teacher_from_parquet


def table(path: Path, vectors: Any, *, column: str = "vector", **columns: Any) -> Path:
    pq.write_table(pa.table({**columns, column: vectors}), path, row_group_size=7)
    return path


def listed(texts: Sequence[Text], kind: Any = None) -> Any:
    rows = [vector(ROLE_OF[text.kind], text.text).tolist() for text in texts]
    return pa.array(rows, type=kind or pa.list_(pa.float32()))


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float64()),
        pa.large_list(pa.float32()),
        pa.list_(pa.float32(), WIDTH),
    ],
    ids=str,
)
def test_a_table_becomes_targets(tmp_path: Path, kind: Any) -> None:
    texts = make_texts(30)
    columns: dict[str, Any] = {"text": [text.text for text in texts], "kind": [text.kind for text in texts]}
    teacher = _teacher_from_parquet(
        table(tmp_path / "t.parquet", listed(texts, kind), column="embedding", **columns)
    )
    told = RecordedProgress()
    targets = teacher.targets(tmp_path / "targets", shard_size=4, progress=told)
    assert_holds(targets, texts)
    assert (targets.normalised, told.units, told.tasks) == (True, 30, [("teacher vectors", 30)])
    assert_holds(teacher.targets(tmp_path / "targets", shard_size=4), texts)
    other = _teacher_from_parquet(table(tmp_path / "u.parquet", listed(texts[::-1]), **columns))
    with pytest.raises(BadInput, match="choose another folder"):
        other.targets(tmp_path / "targets", shard_size=4)


def test_a_table_without_kinds_keeps_the_first_duplicate(tmp_path: Path) -> None:
    rows = [[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]
    teacher = _teacher_from_parquet(table(tmp_path / "t.parquet", rows, text=["a", "b", "a"]))
    targets = teacher.targets(tmp_path / "targets")
    assert (targets.texts([0, 1]), targets.kinds([0, 1])) == (["a", "b"], [None, None])
    np.testing.assert_array_equal(targets.vectors([0, 1]), rows[:2])
    assert not targets.normalised


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"vector": [1.0, 2.0, 3.0]}, "row 9 has a vector of another width"),
        ({"vector": [1.0, float("nan")]}, "row 9 has a vector with NaN"),
        ({"vector": [1.0, None]}, "row 9 has a vector with NaN"),
        ({"vector": [1.0, 1e300]}, "row 9 has a vector with NaN"),
        ({"vector": [0.0, 0.0]}, "row 9 has a vector of zeros"),
        ({"vector": None}, "row 9 has no vector"),
        ({"vector": []}, "row 9 has no vector"),
        ({"text": " "}, "row 9 has no text"),
        ({"text": None}, "row 9 has no text"),
        ({"kind": "passage"}, "row 9 has the kind 'passage'"),
    ],
    ids=str,
)
def test_a_bad_row_of_a_table_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [{"text": f"{i}", "vector": [1.0, i], "kind": None} for i in range(12)]
    rows[8].update(row)
    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in ("text", "kind")}
    vectors = pa.array([row["vector"] for row in rows], type=pa.list_(pa.float64()))
    teacher = _teacher_from_parquet(table(tmp_path / "t.parquet", vectors, **columns))
    with pytest.raises(BadInput, match=message):
        teacher.targets(tmp_path / "targets", shard_size=4)


def test_a_file_that_is_no_table_of_vectors_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 not really")
    for name in ("junk.parquet", "absent.parquet"):
        with pytest.raises(BadInput, match="not a parquet file"):
            _teacher_from_parquet(tmp_path / name)
    with pytest.raises(BadInput, match="needs 'text' and 'vector'"):
        _teacher_from_parquet(table(tmp_path / "a.parquet", [[1.0]], column="v", text=["a"]))
    with pytest.raises(BadInput, match="must hold lists of numbers"):
        _teacher_from_parquet(table(tmp_path / "b.parquet", ["1.0"], text=["a"]))
    empty = table(
        tmp_path / "c.parquet", pa.array([], pa.list_(pa.float32())), text=pa.array([], pa.string())
    )
    with pytest.raises(BadInput, match="no texts"):
        _teacher_from_parquet(empty).targets(tmp_path / "targets")
