from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trundle.data.examples import Example, _read_examples
from trundle.errors import BadInput

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
EXAMPLES = st.lists(
    st.builds(Example, query=WORDS, positive=WORDS, negatives=st.lists(WORDS, max_size=3).map(tuple)),
    min_size=1,
)


def json_lines(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def read(tmp_path: Path, *rows: Any) -> list[Example]:
    return list(_read_examples(json_lines(tmp_path / "t.jsonl", *rows)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tuples")


@given(examples=EXAMPLES)
def test_every_format_gives_the_same_examples(folder: Path, examples: list[Example]) -> None:
    rows = [{"query": e.query, "positive": e.positive, "negatives": list(e.negatives)} for e in examples]
    json_lines(folder / "t.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), folder / "t.parquet")
    with (folder / "t.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["query", "positive", "negative_1", "negative_2", "negative_3"])
        writer.writerows(
            [e.query, e.positive, *e.negatives, *[""] * (3 - len(e.negatives))] for e in examples
        )
    for name in ("t.jsonl", "t.parquet", "t.csv"):
        assert list(_read_examples(str(folder / name))) == examples


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "positive": "p"},
        {"question": "q", "answer": "p", "id": 3},
        {"anchor": "q", "positive": "p", "text": "other"},
        {"sentence1": "q", "sentence2": "p"},
        {"title": "q", "body": "p"},
        {"title": "q", "text": "p"},
        {"title": "q", "abstract": "p"},
        {"query": "q", "title": "t", "passage": "p", "text": "other"},
        {"question": "q", "context": "p"},
        {"query": "q", "positive": "p", "negative": None},
        {"query": "q", "positive": "p", "negatives": []},
        {"query": "q", "positive": "p", "negative_1": "", "negative_2": None},
    ],
)
def test_columns_of_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, row) == [Example(query="q", positive="p")]


@pytest.mark.parametrize(
    "row",
    [
        {"query": "q", "positive": "p", "negatives": ["m", "n"]},
        {"query": "q", "positive": "p", "negative": ["m", "n"]},
        {"query": "q", "positive": "p", "negative": "m", "negatives": ["n"]},
        {"query": "q", "positive": "p", "negative_10": "n", "negative_9": "m"},
        {"query": "q", "positive": "p", "negative_0": "m", "negative_1": None, "negative_2": "n"},
    ],
)
def test_columns_of_negatives(tmp_path: Path, row: dict[str, Any]) -> None:
    assert read(tmp_path, row) == [Example(query="q", positive="p", negatives=("m", "n"))]


def test_labels_choose_the_positives(tmp_path: Path) -> None:
    rows = [
        {"sentence1": "a", "sentence2": "b", "label": label}
        for label in (0, 1, True, False, "1", "0", 1.0, 0.0)
    ]
    assert len(read(tmp_path, *rows)) == 4
    csv_path = tmp_path / "t.csv"
    csv_path.write_text("sentence1,sentence2,label\na,b,0\nc,d,1\n")
    assert list(_read_examples(str(csv_path))) == [Example(query="c", positive="d")]


def test_named_columns(tmp_path: Path) -> None:
    row = {"asked": "q", "told": "p", "wrong": "n", "label": 5, "query": "no"}
    source = json_lines(tmp_path / "t.jsonl", row)
    assert list(_read_examples(f"{source}::query=asked,positive=told,negative=wrong")) == [
        Example(query="q", positive="p", negatives=("n",))
    ]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"query": "q", "score": 1}, "no column known as the positive (columns: query, score)"),
        ({"text": "p"}, "no column known as the query (columns: text)"),
        ({"id": 1}, "no column known as the query or positive (columns: id)"),
        ({"query": "", "positive": "p"}, "no text in column 'query'"),
        ({"query": "q", "positive": None}, "no text in column 'positive'"),
        ({"query": "q", "positive": ["p"]}, "holds list instead of text in column 'positive'"),
        ({"query": "q", "positive": "p", "negative": 3}, "holds int instead of text in column 'negative'"),
        ({"query": "q", "positive": "p", "negative": " "}, "no text in column 'negative'"),
        ({"query": "q", "positive": "p", "negatives": ["n", None]}, "no text in column 'negatives'"),
        ({"query": "q", "positive": "\udfff"}, "an unpaired surrogate, \\udfff, in column 'positive'"),
        ({"query": "q", "positive": "p", "label": 2}, "has the label 2"),
        ({"query": "q", "positive": "p", "label": None}, "has the label None"),
        ({"query": "q", "positive": "p", "label": [1]}, "has the label [1]"),
    ],
)
def test_a_bad_row_is_one_sentence_with_its_place(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput) as caught:
        read(tmp_path, {"query": "q", "positive": "p"}, row)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 't.jsonl'}:2 ")
    assert words in message
    assert ";" in message
    assert "\n" not in message


def test_a_source_without_a_positive_pair_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no row with label 1; "):
        read(tmp_path, {"sentence1": "a", "sentence2": "b", "label": 0})


def test_shared_triplets_and_pairs(shared_data: Path) -> None:
    triplets = pq.read_table(shared_data / "triplets" / "chemistry.parquet").to_pylist()
    found = list(_read_examples(str(shared_data / "triplets" / "chemistry.parquet")))
    assert [(e.query, e.positive, e.negatives) for e in found] == [
        (row["query"], row["positive"], (row["negative"],) if row["negative"] else ()) for row in triplets
    ]
    rows = pq.read_table(shared_data / "pairs" / "RTE.parquet").to_pylist()
    positives = [row for row in rows if row["split"] == "train" and row["label"] == 1]
    assert len(list(_read_examples(str(shared_data / "pairs" / "RTE.parquet")))) == len(positives)
