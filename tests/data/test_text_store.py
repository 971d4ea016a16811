"""Texts are read once: the same as the plain reader gives, from memory, the cache and all cores."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recorded_progress import RecordedProgress
from trundle.data import text_store
from trundle.data.corpus import read_corpus
from trundle.data.sampling import _drawn, distinct, draw, sample
from trundle.data.text_store import _WORKER, TextStore, _Piece, _read_store
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput

TEXTS = st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)
KINDS = st.sampled_from([None, "", "query", "document", "definition"])


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every source counts as large, and every row group is a piece."""
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text_store, "_LARGE", 0)
    monkeypatch.setattr(text_store, "_PIECE_BYTES", 1)
    monkeypatch.setattr(text_store, "usable_cores", lambda: 1)
    return tmp_path / "cache" / "texts"


def everything(store: TextStore) -> list[Text]:
    return list(store.texts(np.arange(len(store))))


def outcome(read: Any, source: str) -> object:
    try:
        return list(read(source))
    except BadInput as error:
        return str(error)


def write_table(path: Path, table: dict[str, Any], rows_per_group: int = 2) -> None:
    pq.write_table(pa.table(table), path, row_group_size=rows_per_group)


def write_sources(folder: Path) -> Iterator[str]:
    """Files of every format, right and wrong."""
    write_table(
        folder / "kinds.parquet", {"text": ["a", "b ", "ü", "a"], "kind": ["query", None, "", "document"]}
    )
    write_table(folder / "pairs.parquet", {"id": [1, 2, 3], "query": ["q"] * 3, "positive": ["p", "é", "r"]})
    write_table(folder / "hard.parquet", {"query": ["q", "r"], "negatives": [["n", "m"], []]})
    splits = {"text": ["a", "b", "c", "d"], "split": ["test", "test", "train", None]}
    write_table(folder / "splits.parquet", splits)
    write_table(folder / "measured.parquet", {"text": ["a", "b", "c"], "split": ["test"] * 3})
    write_table(folder / "null.parquet", {"text": ["a", "b", "c", None]})
    write_table(folder / "blank.parquet", {"text": ["a", "\u2003", "c", None]})
    write_table(folder / "strange.parquet", {"text": ["a", "b", "c"], "kind": ["query", "query", "verse"]})
    write_table(folder / "numbers.parquet", {"text": [1, 2, 3]})
    write_table(folder / "unknown.parquet", {"words": ["a", "b", "c"]})
    write_table(folder / "empty.parquet", {"text": pa.array([], pa.string())})
    write_table(folder / "large.parquet", {"text": pa.array(["a", "b"], pa.large_string())})
    write_table(folder / "few.parquet", {"text": pa.array(["a", "b", "a"]).dictionary_encode()})
    wrong = pa.Array.from_buffers(pa.string(), 2, pa.array([b"a", b"\xff"]).buffers())
    write_table(folder / "bytes.parquet", {"text": pa.chunked_array([["a", "b", "c"], wrong])})
    (folder / "damaged.parquet").write_bytes((folder / "pairs.parquet").read_bytes()[:-9])
    (folder / "nothing.parquet").write_bytes(b"")
    (folder / "lines.txt").write_text("one\n\n two \r\nthree", "utf-8")
    (folder / "zipped.txt.gz").write_bytes(gzip.compress(b"one\ntwo\n"))
    (folder / "rows.jsonl").write_text('{"query": "q", "positive": "p"}\n"bare"\n', "utf-8")
    (folder / "surrogate.jsonl").write_text('"fine"\n"\\ud800"\n', "utf-8")
    (folder / "rows.csv").write_text('question,answer\nq,"a\nb"\n', "utf-8")
    (folder / "short.tsv").write_text("question\tanswer\nq\n", "utf-8")
    yield from sorted(str(file) for file in folder.iterdir())
    yield f"{folder / 'unknown.parquet'}::query=words"
    yield f"{folder / 'kinds.parquet'}::text=text"
    yield f"{folder / 'pairs.parquet'}::document=absent"
    yield str(folder)
    for name in ("both", "ordered"):
        (folder / name).mkdir()
    write_table(folder / "both" / "a.parquet", {"text": ["a", "b", "c"], "split": ["test"] * 3})
    write_table(folder / "both" / "b.parquet", {"text": ["a", None]})
    yield str(folder / "both")
    write_table(folder / "ordered" / "a.parquet", {"text": ["a", "b", "c", "d", " ", "e"]})
    write_table(folder / "ordered" / "b.parquet", {"text": [None, "longer" * 1000]})
    yield str(folder / "ordered")


@pytest.mark.parametrize("cores", [1, 2])
def test_the_same_texts_and_errors_as_the_plain_reader(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    (tmp_path / "data").mkdir()
    sources = list(write_sources(tmp_path / "data"))
    if cores > 1:  # one file of these sizes is one piece, which needs no other process
        sources = [source for source in sources if Path(source).is_dir()]
    plain = [outcome(read_texts, source) for source in sources]
    assert sum(isinstance(one, str) for one in plain) > (10 if cores == 1 else 1)
    for large in (0, 2**40) if cores == 1 else (0,):
        monkeypatch.setattr(text_store, "_LARGE", large)
        monkeypatch.setattr(text_store, "usable_cores", lambda: cores)
        stored = [outcome(lambda source: everything(_read_store(source)), source) for source in sources]
        assert dict(zip(sources, stored, strict=True)) == dict(zip(sources, plain, strict=True))
        assert cores > 1 or stored == [
            outcome(lambda source: everything(_read_store(source)), source) for source in sources
        ]


@given(rows=st.lists(st.tuples(TEXTS, KINDS), min_size=1, max_size=20), large=st.booleans())
def test_any_table_comes_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str | None]], large: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    kind = pa.large_string() if large else pa.string()
    texts, kinds = (pa.array(column, kind) for column in zip(*rows, strict=True))
    write_table(path, {"text": texts, "kind": kinds}, 3)
    store = _read_store(str(path))
    assert everything(store) == list(read_texts(str(path)))
    assert store.fingerprint == TextStore.of(read_texts(str(path))).fingerprint
    assert _drawn(store.keys()[:, 0], 5).tolist() == [draw(text, 5) for text, _ in rows]


def test_workers_import_no_torch() -> None:
    code = "import sys, trundle.data.text_store; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_script_without_a_main_guard_reads_on_all_cores(cached: Path, tmp_path: Path) -> None:
    write_table(tmp_path / "t.parquet", {"text": list("abcdef")})
    script = tmp_path / "script.py"
    script.write_text(
        "from trundle.data import text_store\n"
        "text_store._LARGE, text_store._PIECE_BYTES, text_store.usable_cores = 0, 1, lambda: 2\n"
        f"print(len(text_store._read_store({str(tmp_path / 't.parquet')!r})))\n"
    )
    assert subprocess.run([sys.executable, str(script)], capture_output=True, text=True).stdout == "6\n"


def test_a_second_opening_reads_nothing(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, told = tmp_path / "t.txt", RecordedProgress()
    source.write_text("\n".join(f"text {n}" for n in range(3000)))
    first = read_corpus([str(source)], seed=0, progress=told)
    facts, train = first.facts(), list(first.train())
    assert told.tasks == [("reading megabytes of text", told.units)]
    monkeypatch.setattr("trundle.data.texts._lines", lambda path: pytest.fail(f"{path} is read again"))
    monkeypatch.chdir(tmp_path)
    second = read_corpus(["t.txt"], seed=0)
    assert [{**fact, "source": str(source)} for fact in second.facts()] == list(facts)
    assert list(second.train()) == train
    assert len(list(cached.glob("*/store.json"))) == 1


@pytest.mark.parametrize("damage", ["texts.bin", "index.npy", "store.json", "keys", "missing"])
def test_a_damaged_entry_is_written_again(cached: Path, tmp_path: Path, damage: str) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\nthree\n")
    expected = everything(_read_store(str(tmp_path / "t.txt")))
    (entry,) = (path for path in cached.iterdir() if path.is_dir())
    if damage == "missing":
        (entry / "store.json").unlink()
    elif damage == "keys":
        content = bytearray((entry / "index.npy").read_bytes())
        content[-30] ^= 1
        (entry / "index.npy").write_bytes(content)
    else:
        os.truncate(entry / damage, (entry / damage).stat().st_size - 1)
    assert everything(_read_store(str(tmp_path / "t.txt"))) == expected
    assert text_store._open(entry) is not None


def test_another_format_or_a_changed_source_is_another_entry(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "t.txt"
    source.write_text("one\n")
    first = _read_store(str(source))
    monkeypatch.setattr(text_store, "_FORMAT", 2)
    assert _read_store(str(source)).fingerprint == first.fingerprint
    source.write_text("two\n")
    os.utime(source, ns=(1, 1))
    assert [text.text for text in everything(_read_store(str(source)))] == ["two"]
    assert [text.text for text in everything(first)] == ["one"]
    assert len(list(cached.glob("*/store.json"))) == 3


def test_a_source_that_changes_while_it_is_read_is_refused(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "t.txt"
    source.write_text("one\n")
    read = text_store._read_piece

    def changed(*given: Any) -> Any:
        os.utime(source, ns=(1, 1))
        return read(*given)

    monkeypatch.setattr(text_store, "_read_piece", changed)
    with pytest.raises(BadInput, match="changed while it was read"):
        _read_store(str(source))
    assert not list(cached.glob("*/store.json"))


def test_without_a_cache_texts_are_read_all_the_same(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.txt").write_text("one\ntwo\n")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "file" / "below"))
    told = RecordedProgress()
    assert [text.text for text in everything(_read_store(str(tmp_path / "t.txt"), told))] == ["one", "two"]
    assert "can't be cached" in told.lines[0]


def test_two_processes_that_start_together_read_once(cached: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n".join(f"text {n}" for n in range(20_000)))
    code = (
        "from trundle.data import text_store; text_store._LARGE = 0\n"
        "from recorded_progress import RecordedProgress\n"
        f"told = RecordedProgress(); store = text_store._read_store({str(tmp_path / 't.txt')!r}, told)\n"
        "print(store.fingerprint, len(told.tasks))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    both = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    printed = sorted(process.communicate()[0].split() for process in both)
    assert printed[0][0] == printed[1][0]
    assert [tasks for _, tasks in printed] == ["0", "1"]
    assert [path.name for path in cached.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("most", [None, 0, 100, 10_000])
def test_distinct_texts_are_those_of_the_plain_way(tmp_path: Path, most: int | None) -> None:
    rows = [{"text": f"text {n % 700}", "kind": ("query", "document")[n % 3 == 0]} for n in range(1500)]
    (tmp_path / "one.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    (tmp_path / "two.txt").write_text("\n".join(f"text {n}" for n in range(500, 900)), "utf-8")
    corpus = read_corpus([str(tmp_path / "one.jsonl"), str(tmp_path / "two.txt")], seed=2)
    plain = distinct(corpus.train(), key=lambda text: f"{text.kind}\0{text.text}")
    expected = list(plain) if most is None else sample(plain, most, seed=7)
    assert list(corpus.distinct_train(most, 7)) == expected
    assert most == 0 or expected
    if most is not None:
        assert list(corpus.sample_train(most, 7)) == sample(corpus.train(), most, seed=7)


def test_parts_are_disjoint_whatever_the_kind_and_agree_with_single_texts(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "kind": kind} for n in range(3000) for kind in ("query", "document")]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    corpus = read_corpus([str(tmp_path / "t.jsonl")], seed=4)
    parts = [{text.text for text in part()} for part in (corpus.train, corpus.validation, corpus.held_out)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 3000
    assert len(parts[0]) == pytest.approx(0.85 * 3000, rel=0.03)
    assert len(parts[1]) == pytest.approx(len(parts[2]), rel=0.25)
    assert parts[0] == {f"text {n}" for n in range(3000) if corpus.may_train_on(f"text {n}")}


def test_the_environment_and_a_copy_of_its_texts_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trundle.data.environment import _Documented

    pairs = [
        _Documented(package=f"p{n % 20}", name=f"n{n}", query=f"query {n}", document=f"document {n}")
        for n in range(1000)
    ]
    monkeypatch.setattr("trundle.data.corpus.environment_pairs", lambda **_: pairs)
    copy = tmp_path / "copy.txt"
    copy.write_text("\n".join(text for pair in pairs for text in (pair.query, pair.document)), "utf-8")
    corpus = read_corpus(["environment", str(copy)], seed=0)
    train, held_out = ([text.text for text in part()] for part in (corpus.train, corpus.held_out))
    assert train
    assert held_out
    assert all(map(corpus.may_train_on, train))
    assert not set(train) & {text.text for part in (corpus.validation, corpus.held_out) for text in part()}
    assert {fact["source"]: fact["texts"] for fact in corpus.facts()} == {
        "environment": 2000,
        str(copy): 2000,
    }


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "endless.txt")  # reading it waits for ever
    piece = _Piece(file=tmp_path / "endless.txt", columns={}, megabytes=1)
    with subprocess.Popen([sys.executable, "-c", _WORKER], stdin=subprocess.PIPE) as worker:
        assert worker.stdin is not None
        pickle.dump([(piece, tmp_path / "0")], worker.stdin)
        worker.stdin.flush()
        while not (tmp_path / "0").exists():
            time.sleep(0.01)
        worker.stdin.close()
        try:
            assert worker.wait(60) == 1
        finally:
            worker.kill()
