from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput


def json_lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def read(tmp_path: Path, *rows: Any) -> list[tuple[str, str | None]]:
    return [(text.text, text.kind) for text in read_texts([json_lines(tmp_path / "t.jsonl", *rows)])]


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert list(read_texts(str(path))) == [Text(text="one"), Text(text="  two ")]


def test_sources_follow_one_another(tmp_path: Path) -> None:
    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("one")
    second.write_text("two")
    assert [text.text for text in read_texts([str(second), str(first)])] == ["two", "one"]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("bare", [("bare", None)]),
        ({"text": "a"}, [("a", None)]),
        ({"id": 7, "sentence": "a"}, [("a", None)]),
        ({"title": "t", "text": "a"}, [("a", None)]),
        ({"title": "t", "abstract": "a"}, [("a", None)]),
        ({"title": "t"}, [("t", None)]),
        ({"query": "q"}, [("q", "query")]),
        ({"question": "q", "id": 1}, [("q", "query")]),
        ({"passage": "p", "title": "t"}, [("p", "document")]),
        ({"document": "d"}, [("d", "document")]),
        ({"definition": "d"}, [("d", "definition")]),
        ({"text": "d", "query": "q"}, [("q", "query"), ("d", "document")]),
        (
            {"negative": "n", "positive": "p", "query": "q"},
            [("q", "query"), ("p", "document"), ("n", "document")],
        ),
        ({"query": "q", "positive": "p", "negative": None}, [("q", "query"), ("p", "document")]),
        (
            {"query": "q", "positive": "p", "negatives": ["m", "n"]},
            [("q", "query"), ("p", "document"), ("m", "document"), ("n", "document")],
        ),
        (
            {"query": "q", "positive": "p", "negative_10": "n", "negative_2": "m"},
            [("q", "query"), ("p", "document"), ("m", "document"), ("n", "document")],
        ),
        ({"sentence1": "a", "sentence2": "b", "label": 0}, [("a", None), ("b", None)]),
        ({"text": "a", "kind": "definition"}, [("a", "definition")]),
        ({"text": "a", "kind": None}, [("a", None)]),
        ({"query": "a", "kind": "document"}, [("a", "document")]),
    ],
)
def test_columns_imply_texts_and_kinds(
    tmp_path: Path, row: Any, expected: list[tuple[str, str | None]]
) -> None:
    assert read(tmp_path, row) == expected


def test_rows_of_one_file_may_differ(tmp_path: Path) -> None:
    assert read(tmp_path, {"query": "q"}, {"text": "a"}, "bare") == [
        ("q", "query"),
        ("a", None),
        ("bare", None),
    ]


def test_named_columns_win(tmp_path: Path) -> None:
    source = json_lines(tmp_path / "t.jsonl", {"text": "no", "asked": "q", "kind": "news", "told": "d"})
    assert list(read_texts(f"{source}::query=asked,document=told")) == [
        Text(text="q", kind="query"),
        Text(text="d", kind="document"),
    ]
    lines = tmp_path / "t.txt"
    lines.write_text("why")
    assert list(read_texts(f"{lines}::query=text")) == [Text(text="why", kind="query")]


def test_unusual_texts_pass_unchanged(tmp_path: Path) -> None:
    odd = ["a\x00b", "\u200d", "𝒳 é e\u0301", "x" * 1_000_000, "two\nlines\r\n", " padded "]
    assert [text for text, _ in read(tmp_path, *odd)] == odd


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"text": ""}, "no text in column 'text'"),
        ({"text": " \n\t"}, "no text in column 'text'"),
        ({"text": None}, "no text in column 'text'"),
        ({"text": 7}, "holds int instead of text in column 'text'"),
        ({"text": ["a"]}, "holds list instead of text"),
        ({"query": "q", "positive": None}, "no text in column 'positive'"),
        ({"query": "q", "negatives": ["n", ""]}, "no text in column 'negatives'"),
        ({"text": "a\ud800b"}, "an unpaired surrogate, \\ud800, in column 'text'"),
        ({"text": "a", "kind": "news"}, "has the kind 'news'; write one of query, document, definition"),
        ({"id": 1, "score": 2}, "no column known to hold texts (columns: id, score)"),
        ({}, "no column known to hold texts (columns: none)"),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_place(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, "fine", row)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 't.jsonl'}:2 ")
    assert words in message
    assert ";" in message
    assert "\n" not in message


def test_the_suggested_fix_for_surrogates_works(tmp_path: Path) -> None:
    broken = "a\ud800b"
    with pytest.raises(BadInput) as caught:
        read(tmp_path, broken)
    fix = str(caught.value).partition("clean it with ")[2]
    assert fix == "text.encode('utf-8', 'replace').decode('utf-8')"
    assert read(tmp_path, broken.encode("utf-8", "replace").decode("utf-8")) == [("a?b", None)]


def test_a_missing_file_is_rejected_before_the_first_text_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"absent.txt does not exist"):
        read_texts([str(tmp_path / "absent.txt")])


def test_a_table_without_a_known_column_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"_id": ["a"], "vector": [[0.5]]}), path)
    with pytest.raises(BadInput, match=r"row 1 has no column .*_id, vector"):
        list(read_texts(str(path)))


def test_shared_texts_are_read_completely(shared_data: Path) -> None:
    table = pq.read_table(shared_data / "texts" / "documents.parquet")
    expected = zip(table["text"].to_pylist(), table["kind"].to_pylist(), strict=True)
    assert [
        (text.text, text.kind) for text in read_texts(str(shared_data / "texts" / "documents.parquet"))
    ] == list(expected)
