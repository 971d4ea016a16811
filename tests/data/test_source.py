from __future__ import annotations

import csv
import gzip
import io
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.data.texts import _BATCH_ROWS, _read_rows, parse_source
from trundle.errors import BadInput

WRITABLE = st.text(st.characters(exclude_categories=["Cs"]))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WRITABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WRITABLE, inner, max_size=3),
    max_leaves=5,
)


def values(source: Path | str) -> list[dict[str, Any]]:
    return [dict(row.values) for row in _read_rows(parse_source(str(source)))]


def refusal(source: Path | str) -> str:
    with pytest.raises(BadInput) as caught:
        values(source)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message, "an error says how to fix it"
    return message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@given(
    rows=st.lists(st.tuples(WRITABLE, WRITABLE), min_size=1),
    tabs=st.booleans(),
    zipped=st.booleans(),
    mark=st.booleans(),
)
def test_csv_and_tsv_round_trip(
    folder: Path, rows: list[tuple[str, str]], tabs: bool, zipped: bool, mark: bool
) -> None:
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter="\t" if tabs else ",").writerows([("a", "b b"), *rows])
    data = buffer.getvalue().encode("utf-8-sig" if mark else "utf-8")
    path = folder / f"rows.{'tsv' if tabs else 'csv'}{'.gz' if zipped else ''}"
    path.write_bytes(gzip.compress(data) if zipped else data)
    assert values(path) == [{"a": a, "b b": b} for a, b in rows]


@given(
    rows=st.lists(st.dictionaries(WRITABLE, JSON_VALUES, max_size=4), min_size=1),
    ascii_only=st.booleans(),
    mark=st.booleans(),
)
def test_json_lines_round_trip(
    folder: Path, rows: list[dict[str, Any]], ascii_only: bool, mark: bool
) -> None:
    lines = "\n\n".join(json.dumps(row, ensure_ascii=ascii_only) for row in rows)
    path = folder / "rows.jsonl"
    path.write_bytes(lines.encode("utf-8-sig" if mark else "utf-8"))
    assert values(path) == rows


@given(
    rows=st.lists(
        st.fixed_dictionaries({"t": st.none() | WRITABLE, "list": st.none() | st.lists(WRITABLE)}), min_size=1
    )
)
def test_parquet_round_trips(folder: Path, rows: list[dict[str, Any]]) -> None:
    path = folder / "rows.parquet"
    schema = pa.schema([("t", pa.large_string()), ("list", pa.list_(pa.string()))])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path)
    assert values(path) == rows


@given(
    lines=st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n\ufeff")).filter(str.strip),
        min_size=1,
    ),
    end=st.sampled_from(["\n", "\r\n", "\n \t\n"]),
    mark=st.booleans(),
)
def test_text_lines_round_trip(folder: Path, lines: list[str], end: str, mark: bool) -> None:
    path = folder / "lines.txt"
    path.write_bytes(end.join(lines).encode("utf-8-sig" if mark else "utf-8"))
    assert values(path) == [{"text": line} for line in lines]


def test_places(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('t,u\n"one\nmore",1\n\ntwo,2\n')
    (tmp_path / "b.jsonl").write_text('\n{"t": 1}\n"bare"\n')
    pq.write_table(pa.table({"t": ["x"] * (_BATCH_ROWS + 1)}), tmp_path / "c.parquet")
    rows = list(_read_rows(parse_source(str(tmp_path))))
    assert [row.place.removeprefix(f"{tmp_path}/") for row in (*rows[:5], rows[-1])] == [
        "a.csv:2",
        "a.csv:5",
        "b.jsonl:2",
        "b.jsonl:3",
        "c.parquet row 1",
        f"c.parquet row {_BATCH_ROWS + 1}",
    ]
    assert rows[3].values == {"text": "bare"}


def test_a_folder_is_read_in_order_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/10.TXT", "a/z.ndjson", "notes.md", ".hidden/h.txt", "b/.part.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(name))
    assert [
        json.loads(row["text"]) if "txt" in str(row).lower() else row["text"] for row in values(tmp_path)
    ] == ["a/z.ndjson", "b/10.TXT", "b/2.txt"]


def test_named_columns_are_renamed_and_hide_the_others(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,question text,reply\n1,why,because\n")
    assert values(f"{path}::query=question text, positive=reply") == [{"query": "why", "positive": "because"}]
    table = tmp_path / "t.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["b"]}), table)
    assert values(f"{table}::text=body") == [{"text": "b"}]


def test_unwanted_parquet_columns_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"text": ["a"], "vector": [[0.5, 0.5]]}), path)
    (row,) = _read_rows(parse_source(str(path)), lambda column: column == "text")
    assert (row.columns, row.values) == (("text", "vector"), {"text": "a"})


def parquet_bytes(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="snappy")
    return buffer.getvalue()


def undecodable() -> pa.Table:
    offsets = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    return pa.table({"t": pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff\xfe")])})


WHOLE = parquet_bytes(pa.table({"t": [f"{n} bottles" for n in range(1000)]}))
BAD_FILES: dict[str, tuple[str, bytes, Sequence[str]]] = {
    "empty text": ("t.txt", b"", ["t.txt has no rows"]),
    "blank text": ("t.txt", b"\n  \n", ["t.txt has no rows"]),
    "empty json": ("t.jsonl", b"", ["t.jsonl has no rows"]),
    "only a header": ("t.csv", b"a,b\n", ["t.csv has no rows"]),
    "empty gzip": ("t.txt.gz", b"", ["t.txt.gz has no rows"]),
    "empty parquet": ("t.parquet", b"", ["t.parquet has no rows"]),
    "parquet without rows": (
        "t.parquet",
        parquet_bytes(pa.table({"t": pa.array([], pa.string())})),
        ["no rows"],
    ),
    "latin-1 text": ("t.txt", "fine\ncafé\n".encode("latin-1"), ["t.txt:2", "UTF-8", "0xe9"]),
    "utf-16 text": ("t.csv", "a,b\n1,2\n".encode("utf-16"), ["t.csv:1", "UTF-8"]),
    "undecodable json": ("t.jsonl", b'{"t": 1}\n\n{"t": "\xff"}\n', ["t.jsonl:3", "UTF-8"]),
    "undecodable csv": ("t.csv", b"a\nx\n\xff\n", ["t.csv:3", "UTF-8"]),
    "undecodable parquet": ("t.parquet", parquet_bytes(undecodable()), ["t.parquet row 2", "UTF-8"]),
    "broken json": ("t.jsonl", b'{"t": 1}\n{"t": \n', ["t.jsonl:2", "not JSON"]),
    "deep json": ("t.jsonl", b"[" * 100_000, ["t.jsonl:1", "not JSON"]),
    "long number": ("t.jsonl", b'{"t": ' + b"1" * 5000 + b"}", ["t.jsonl:1", "not JSON"]),
    "json list": ("t.jsonl", b'{"t": 1}\n["a"]\n', ["t.jsonl:2", "JSON object"]),
    "json number": ("t.ndjson", b"7\n", ["t.ndjson:1", "JSON object"]),
    "short row": ("t.csv", b"a,b\n1,2\n3\n", ["t.csv:3", "1 fields", "header has 2"]),
    "long row": ("t.tsv", b"a\tb\n1\t2\t3\n", ["t.tsv:2", "3 fields"]),
    "ragged after a long field": ("t.csv", b'a,b\n"1\n1\n",2\n3\n', ["t.csv:5"]),
    "open quote": ("t.csv", b'a,b\n1,2\n3,"4\n5,6\n', ["t.csv:3", "quote"]),
    "loose quote": ("t.csv", b'a,b\n"1"x,2\n', ["t.csv:2", "quote"]),
    "repeated csv column": ("t.csv", b"a,b,a\n1,2,3\n", ["two columns called 'a'"]),
    "repeated parquet column": (
        "t.parquet",
        parquet_bytes(pa.table([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])),
        ["two columns called 'a'"],
    ),
    "not gzip": ("t.txt.gz", b"plain", ["t.txt.gz", "gzip"]),
    "gzip cut short": ("t.txt.gz", gzip.compress(b"abc\n" * 999)[:-9], ["t.txt.gz", "gzip"]),
    "not parquet": ("t.parquet", b"PAR1 but no", ["t.parquet", "parquet"]),
    "parquet cut short": ("t.parquet", WHOLE[:-20], ["t.parquet", "parquet"]),
    "parquet with a hole": ("t.parquet", WHOLE[:40] + bytes(400) + WHOLE[440:], ["t.parquet", "parquet"]),
    "unknown suffix": ("t.docx", b"x", ["t.docx", ".txt, .jsonl, .ndjson, .csv, .tsv, .parquet"]),
    "zipped parquet": ("t.parquet.gz", WHOLE, ["t.parquet.gz", "not a kind of file"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_sentence_with_its_place(tmp_path: Path, case: str) -> None:
    name, data, expected = BAD_FILES[case]
    (tmp_path / name).write_bytes(data)
    message = refusal(tmp_path / name)
    for part in expected:
        assert part in message


def test_a_bad_source_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for source, part in {
        f"{tmp_path}/absent.txt": "does not exist",
        f"{tmp_path}/empty": "no data files",
        f"{tmp_path}/t.txt::": "role=column",
        f"{tmp_path}/t.txt::text": "role=column",
        f"{tmp_path}/t.txt::text=a,text=b": "role=column",
        "": "names no file",
        "::text=a": "names no file",
    }.items():
        with pytest.raises(BadInput, match=part):
            parse_source(source)


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet"])
def test_a_missing_column_error_lists_the_columns(tmp_path: Path, name: str) -> None:
    (tmp_path / "t.csv").write_text("id,body\n1,x\n")
    (tmp_path / "t.jsonl").write_text('{"id": 1, "body": "x"}')
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "t.parquet")
    message = refusal(f"{tmp_path / name}::text=bodies")
    assert "'bodies'" in message
    assert "id, body" in message


def test_long_fields_pass(tmp_path: Path) -> None:
    long = "wörd " * 200_000
    (tmp_path / "t.csv").write_text(f"text\n{long}\n", encoding="utf-8")
    (tmp_path / "t.txt").write_text(long, encoding="utf-8")
    assert [row["text"] for row in values(tmp_path)] == [long, long]


BIG_ROWS = 20_000
BIG_ROW = "x" * 1000


@pytest.mark.parametrize("name", ["big.txt", "big.csv", "big.jsonl", "big.csv.gz"])
def test_a_text_file_is_streamed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.writelines(f'"{number}{BIG_ROW}"\n'.encode() for number in range(BIG_ROWS + 1))
    tracemalloc.start()
    count = sum(1 for _ in _read_rows(parse_source(str(path))))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count >= BIG_ROWS
    assert peak < BIG_ROWS * len(BIG_ROW) / 10


PEAK_OF_READING = """
import re, sys
from pathlib import Path
from trundle.data.texts import _read_rows, parse_source

def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

small, big = sys.argv[1:]
list(_read_rows(parse_source(small)))
before = peak()
count = sum(1 for _ in _read_rows(parse_source(big)))
print(count, peak() - before)
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="needs the peak memory Linux keeps for a process"
)
def test_a_parquet_file_of_one_row_group_is_streamed(tmp_path: Path) -> None:
    small, big = tmp_path / "small.parquet", tmp_path / "big.parquet"
    rows = 4 * BIG_ROWS
    table = pa.table({"text": [f"{number}{BIG_ROW}" for number in range(rows)]})
    pq.write_table(table[:10], small, compression="none", use_dictionary=False)
    pq.write_table(table, big, compression="none", use_dictionary=False, row_group_size=rows)
    run = subprocess.run(
        [sys.executable, "-c", PEAK_OF_READING, str(small), str(big)],
        capture_output=True,
        text=True,
        check=True,
    )
    count, growth = map(int, run.stdout.split())
    assert count == rows
    assert growth < big.stat().st_size / 2


@pytest.mark.parametrize(("name", "broken"), [("t.txt", b"\xff"), ("t.jsonl", b"{"), ("t.csv", b"1,2\n")])
def test_rows_before_the_damage_are_read(tmp_path: Path, name: str, broken: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(b'"text"\n' * 5 + broken)
    rows = _read_rows(parse_source(str(path)))
    assert len(list(islice(rows, 4))) == 4
    with pytest.raises(BadInput, match=rf"{name}:6"):
        list(rows)


def test_only_the_train_split_is_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("text,split\none,train\ntwo,test\nthree,dev\nfour,train\n")
    assert [row.values["text"] for row in _read_rows(parse_source(str(file)))] == ["one", "four"]
    assert [row.values["query"] for row in _read_rows(parse_source(f"{file}::query=text"))] == ["one", "four"]
    file.write_text("text,split\ntwo,test\n")
    with pytest.raises(BadInput, match="no rows of the split 'train'"):
        list(_read_rows(parse_source(str(file))))
