"""Labelled tuples as methods see them: lazy, with their source, and never with a held-out text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trundle.data.corpus import _share_not_trained_on, read_corpus
from trundle.data.examples import Example
from trundle.errors import BadInput


def write_tuples(path: Path, count: int, name: str) -> str:
    rows = [
        {"query": f"{name} query {i}", "positive": f"{name} answer {i}", "negative": f"{name} other {i}"}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_tuples_hold_no_text_that_is_share_not_trained_on(tmp_path: Path) -> None:
    corpus = read_corpus([write_tuples(tmp_path / "a.jsonl", 400, "a")], seed=3)
    kept = {text.text for part in (corpus.validation, corpus.held_out) for text in part()}
    read = list(corpus.examples())
    used = {text for example in read for text in (example.query, example.positive, *example.negatives)}
    assert kept
    assert not used & kept
    # a tuple goes when its query or positive is kept back; a negative that is kept back goes alone
    assert {len(example.negatives) for example in read} == {0, 1}
    numbers = {int(example.query.split()[-1]) for example in read}
    assert numbers == {i for i in range(400) if not {f"a query {i}", f"a answer {i}"} & kept}


@pytest.mark.parametrize(
    ("texts", "kept"), [(100, 25), (800, 200), (1280, 320), (2000, 320), (10_000, 1500), (1_000_000, 16_000)]
)
def test_the_held_out_share_is_larger_for_few_texts(texts: int, kept: int) -> None:
    assert texts * _share_not_trained_on(texts) == pytest.approx(kept)
    assert _share_not_trained_on(texts) >= _share_not_trained_on(texts + 1)


def test_few_texts_hold_out_enough_to_measure_on(tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("\n".join(f"text {number}" for number in range(1200)))
    corpus = read_corpus([str(tmp_path / "few.txt")], seed=0)
    parts = [{text.text for text in part()} for part in (corpus.train, corpus.validation, corpus.held_out)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 1200
    assert len(parts[1]) > 100
    assert len(parts[2]) > 100


def test_every_tuple_records_its_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_tuples(tmp_path / f"{name}.jsonl", 20, name)
    read = list(read_corpus([str(tmp_path)], seed=0).examples())
    assert {(Path(example.source).stem, example.query.split()[0]) for example in read} == {
        ("one", "one"),
        ("two", "two"),
    }
    assert Example(query="q", positive="p", source="a") == Example(query="q", positive="p")


def test_plain_texts_are_rejected_only_when_tuples_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_text("one\ntwo\nthree\n", encoding="utf-8")
    corpus = read_corpus([str(tmp_path / "plain.txt")], seed=0)
    with pytest.raises(BadInput, match="no column known as the query"):
        list(corpus.examples())


def test_held_out_tuples_are_in_no_other_split(tmp_path: Path) -> None:
    file = tmp_path / "tuples.jsonl"
    file.write_text("".join(f'{{"query": "q{n}", "positive": "p{n}"}}\n' for n in range(400)))
    corpus = read_corpus([str(file)], seed=0)
    parts = [
        {example.query for example in part()}
        for part in (corpus.examples, corpus.validation_examples, corpus.held_out_examples)
    ]
    assert all(parts)
    assert not parts[2] & (parts[0] | parts[1])
    assert parts[2] <= {f"q{n}" for n in range(400)}
