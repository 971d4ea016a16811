"""Parts of parquet files give the texts of the complete file, from a path or from storage."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trundle.data.texts import read_texts
from trundle.errors import BadInput
from trundle.scale import shard_plan
from trundle.scale.shard_plan import _list_parts, _read_part, _read_parts


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shard_plan, "_PART_ROWS", 50)
    for name, rows in (("a/2", 130), ("a/10", 20), ("b", 75), (".hidden/c", 10)):
        path = tmp_path / f"{name}.parquet"
        path.parent.mkdir(exist_ok=True)
        table = pa.table(
            {
                "question": [f"{name} {row} ä" for row in range(rows)],
                "answer": [f"to {row}" for row in range(rows)],
                "negatives": [[f"not {row}"] * (row % 3) for row in range(rows)],
                "split": ["test" if row % 7 == 0 else "train" for row in range(rows)],
            }
        )
        pq.write_table(table, path, row_group_size=20)
    return tmp_path


@pytest.mark.parametrize("columns", ["", "::text=answer", "::query=question,document=answer"])
@pytest.mark.parametrize("storage", ["", "file://"])
def test_parts_cover_the_whole_file(folder: Path, columns: str, storage: str) -> None:
    whole = list(read_texts(f"{folder}{columns}"))
    found = _list_parts([f"{storage}{folder}{columns}"])
    assert [piece.groups for piece in found] == [(0,), (0, 1, 2), (3, 4, 5), (6,), (0, 1, 2), (3,)]
    assert list(_read_parts(found)) == whole
    alone = [list(_read_part(piece)) for piece in reversed(found)]
    assert [text for texts in reversed(alone) for text in texts] == whole


def test_a_bad_row_is_named_by_its_number_in_the_file(folder: Path) -> None:
    texts = ["good"] * 120
    texts[100] = " "
    pq.write_table(pa.table({"text": texts}), folder / "bad.parquet", row_group_size=20)
    found = _list_parts([str(folder / "bad.parquet")])
    with pytest.raises(BadInput, match=r"bad\.parquet row 101 has no text"):
        list(_read_part(found[1]))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("nowhere://bucket/file.parquet", "can't be read"),
        ("file:///no/such/folder", "holds no parquet files"),
        ("{}/damaged.parquet", "can't be read"),
        ("file://{}/damaged.parquet", "can't be read"),
        ("{}/empty.parquet", "has no rows"),
        ("{}/b.parquet::text=title", "has no column 'title'"),
        ("file://{}/b.parquet::text", "is not a data source"),
    ],
)
def test_unreadable_files_give_one_sentence(folder: Path, source: str, says: str) -> None:
    (folder / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), folder / "empty.parquet")
    with pytest.raises(BadInput, match=says) as caught:
        _list_parts([source.format(folder)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["nowhere", "file"])
def test_keys_are_not_shown(scheme: str) -> None:
    with pytest.raises(BadInput) as caught:
        _list_parts([f"{scheme}://user:secret@host/no/such?token=secret"])
    assert "secret" not in str(caught.value)


def test_a_file_without_train_rows_is_rejected(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a"], "split": ["test"]}), folder / "test.parquet")
    with pytest.raises(BadInput, match="no rows of the split 'train'"):
        list(_read_parts(_list_parts([str(folder / "test.parquet")])))
