"""The index in a folder: it finds the nearest texts and survives interruptions and damage."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors

from clusters import WIDTH, clustered, wanted
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, EmptyTexts, WriteFailed
from trundle.index.base import _Precision
from trundle.index.embedded import _create_embedded, _EmbeddedStore, _encode_codes, _FolderReader, _scan
from trundle.index.readers import build_index, create_store, open_store

PRECISIONS: tuple[_Precision, ...] = ("float", "int8", "binary")


def filled(
    folder: Path, texts: list[str], precision: _Precision = "float", exact_up_to: int = 10**6
) -> _EmbeddedStore:
    _create_embedded(folder, wanted(precision))
    store = _EmbeddedStore(folder, exact_up_to=exact_up_to)
    vectors = clustered(len(texts))
    store.add(texts[:200], vectors[:200])
    store.add(texts[200:], vectors[200:])
    store.finish()
    return store


def places(store: _EmbeddedStore, queries: np.ndarray, k: int = 10) -> list[list[int]]:
    return [[int(one.text.split()[-1]) for one in row] for row in store.search(queries, k)]


def recall(found: list[list[int]], truth: np.ndarray) -> float:
    return float(
        np.mean([len(set(row) & set(best)) / len(best) for row, best in zip(found, truth, strict=True)])
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_nearest_are_those_of_scikit_learn(
    tmp_path: Path, texts: list[str], precision: _Precision
) -> None:
    filled(tmp_path / "index", texts, precision).close()
    store = _EmbeddedStore(tmp_path / "index")
    queries = clustered(30, seed=1)
    distances, truth = NearestNeighbors(metric="cosine").fit(clustered(len(texts))).kneighbors(queries, 10)
    found = store.search(queries, 10)
    if precision == "float":
        assert places(store, queries) == truth.tolist()
        scores = [[one.score for one in row] for row in found]
        np.testing.assert_allclose(scores, 1 - distances, atol=1e-5)
    assert recall(places(store, queries), truth) > (0.99 if precision != "binary" else 0.9)
    assert store.count() == 600
    store.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_large_set_is_searched_through_a_graph(
    tmp_path: Path, texts: list[str], precision: _Precision
) -> None:
    pytest.importorskip("usearch", reason="needs the extra `index`")
    folder = tmp_path / "index"
    store = filled(folder, texts, precision, exact_up_to=100)
    assert (folder / "graph.usearch").is_file()
    queries = clustered(30, seed=1)
    with closing(_EmbeddedStore(folder)) as plain:
        exact = np.array(places(plain, queries))
    assert recall(places(store, queries), exact) > 0.95
    late = clustered(1, seed=99)
    store.add(["text number 600"], late)  # not in the graph
    store.close()
    again = _EmbeddedStore(folder, exact_up_to=100)
    assert places(again, late)[0][0] == 600
    assert recall(places(again, queries), exact) > 0.95
    again.finish()
    assert places(again, late)[0][0] == 600
    again.close()
    (folder / "graph.usearch").write_bytes(b"not a graph")
    damaged = _EmbeddedStore(folder, exact_up_to=100)
    assert places(damaged, late)[0][0] == 600
    damaged.close()


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 20), st.sampled_from(PRECISIONS))
def test_a_scan_finds_the_best_of_all_rows(seed: int, count: int, k: int, precision: _Precision) -> None:
    vectors = clustered(count, seed=seed)
    codes = vectors if precision == "float" else _encode_codes(vectors, precision)
    query = clustered(1, seed=seed + 1)[0]
    asked = query if precision == "float" else _encode_codes(query[None], precision)[0]
    if precision == "binary":
        truth = -((vectors > 0) != (query > 0)).sum(axis=1).astype(float)
    else:
        wide, one = codes.astype(np.float64), asked.astype(np.float64)
        truth = wide @ one / (np.linalg.norm(wide, axis=1) * np.linalg.norm(one))
    rows = _scan(asked, codes, precision, k)
    assert len(set(rows.tolist())) == min(k, count)
    np.testing.assert_allclose(truth[rows], np.sort(truth)[::-1][: len(rows)], atol=1e-5)


def test_an_interrupted_build_resumes(tmp_path: Path, texts: list[str]) -> None:
    asked: list[str] = []
    vectors = dict(zip(texts, clustered(len(texts)), strict=True))

    def encode(some: object) -> np.ndarray:
        asked.extend(some)  # type: ignore[arg-type]
        return np.stack([vectors[text] for text in some])  # type: ignore[attr-defined]

    where = str(tmp_path / "index")
    with create_store(where, wanted()) as store:
        build_index(store, texts[:100], encode, at_once=64)
    with create_store(where, wanted(None)) as store:
        built = build_index(store, [*texts[:300], *texts[:50]], encode, at_once=64)
    assert (built.total, built.added) == (300, 200)
    assert asked == texts[:300]
    with pytest.raises(BadInput, match="pass --force"), create_store(where, wanted(model="another")):
        pass
    with pytest.raises(BadInput, match="pass --force"), create_store(where, wanted("binary")):
        pass
    with create_store(where, wanted("binary"), force=True) as store:
        build_index(store, texts[:20], encode)
        with closing(open_store(where)) as old:
            assert old.count() == 300  # it is there until the new one is whole
    with closing(open_store(where)) as new:
        assert new.count() == 20


KILLED = """
import sys
import numpy as np
from pathlib import Path
sys.path.insert(0, {tests!r})
from clusters import clustered, wanted
from trundle.index.embedded import _create_embedded, _EmbeddedStore
folder = Path({folder!r})
_create_embedded(folder, wanted("int8"))
store = _EmbeddedStore(folder)
vectors = clustered(100_000)
print("ready", flush=True)
for start in range(store.count(), 100_000, 50):
    store.add([f"text number {{number}}" for number in range(start, start + 50)], vectors[start : start + 50])
    print(start, flush=True)
"""


def test_kill_9_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    script = KILLED.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    truth = clustered(100_000)
    before = 0
    for turn in range(3):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert process.stdout is not None
        stored = 3 + 2 * turn
        for _ in range(1 + stored):
            process.stdout.readline()
        time.sleep(0.003 * turn)  # into the midst of another one
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        store = _EmbeddedStore(folder)
        count = store.count()
        assert count >= before + 50 * stored
        assert count % 50 == 0
        with closing(_FolderReader(folder)) as reader:
            rows = list(reader.rows())
        assert [text for batch in rows for text in batch.texts] == [
            f"text number {number}" for number in range(count)
        ]
        np.testing.assert_array_equal(np.concatenate([batch.vectors for batch in rows]), truth[:count])
        assert places(store, truth[count - 1 : count], 1) == [[count - 1]]
        store.close()
        before = count


def test_a_full_disk_keeps_the_old_content(tmp_path: Path, texts: list[str]) -> None:
    """Files may not grow beyond a limit, which fails writes as a full disk does."""
    folder = tmp_path / "index"
    store = filled(folder, texts)
    more = [f"more {'long ' * 400}{number}" for number in range(300)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (600 * WIDTH * 4 + 1000, 300_000):  # the vectors do not fit; the texts do not fit
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(WriteFailed, match="what was stored is kept"):
                store.add(more, clustered(300, seed=5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert store.count() == 600
    assert store.missing(more) == more
    store.add(more, clustered(300, seed=5))
    store.close()
    again = _EmbeddedStore(folder)
    assert again.count() == 900
    assert again.search(clustered(300, seed=5)[7:8], 1)[0][0].text == more[7]
    again.close()


def test_a_model_that_changed_in_its_place(tmp_path: Path) -> None:
    where = str(tmp_path / "index")
    for identity in ("first", "first", ""):
        with create_store(where, replace(wanted(), identity=identity)) as store:
            assert store.facts.identity == "first"
    with (
        pytest.raises(BadInput, match="teacher has changed since"),
        create_store(where, replace(wanted(), identity="second")),
    ):
        pass


def test_texts_of_which_nothing_is_left(tmp_path: Path, texts: list[str]) -> None:
    def encode(some: Sequence[str]) -> np.ndarray:
        empty = [place for place, text in enumerate(some) if not text.strip("\u200b")]
        if empty:
            raise EmptyTexts(empty[:1], some[empty[0]])
        return clustered(len(some))

    progress = RecordedProgress()
    given = ["\u200b", *texts[:5], "\u200b\u200b", *texts[5:10]]
    with create_store(str(tmp_path / "index"), wanted()) as store:
        built = build_index(store, given, encode, at_once=8, progress=progress)
    assert (built.total, built.added, built.empty) == (10, 10, 2)
    assert any("2 texts" in line and "left out" in line for line in progress.lines)


def read_on_a_read_only_disk(folder: Path) -> subprocess.CompletedProcess[str]:
    script = "\n".join(
        [
            "from trundle.index.readers import open_reader",
            "from trundle.index.readers import open_store",
            f"store = open_store({str(folder)!r})",
            f"row = next(open_reader({str(folder)!r}).rows(1)).vectors",
            "hits = store.search(row, 3)[0]",
            "print(store.count(), len(hits), store.missing(['unknown', 'text number 3']))",
        ]
    )
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    command = ["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} -c {shlex.quote(script)}"]
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], check=False).returncode:
        pytest.skip("this user can't mount")
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_disk_that_is_read_only(tmp_path: Path, texts: list[str]) -> None:
    folder = tmp_path / "index"
    store = filled(folder, texts)
    for state in ("being written", "closed"):
        if state == "closed":
            store.close()
        done = read_on_a_read_only_disk(folder)
        assert done.stdout == "600 3 ['unknown']\n", f"{state}: {done.stderr}"


def test_texts_in_the_log_of_a_read_only_disk_are_not_ignored(tmp_path: Path, texts: list[str]) -> None:
    """SQLite can't read the log without a file beside it, which it can't write there."""
    folder, copy = tmp_path / "index", tmp_path / "copy"
    filled(folder, texts).close()
    with closing(_EmbeddedStore(folder)) as store:
        store.add(["another"], clustered(1))
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*-shm"))
    assert (copy / "texts.sqlite-wal").stat().st_size
    done = read_on_a_read_only_disk(copy)
    assert done.stdout == ""
    assert "can't be read" in done.stderr
    assert "copy it to another disk" in done.stderr


def test_two_builds_share_their_work(tmp_path: Path, texts: list[str]) -> None:
    """Both find the same texts missing; whoever comes second adds what is still missing."""
    one = filled(tmp_path / "index", texts[:300])
    other = _EmbeddedStore(tmp_path / "index")
    vectors = clustered(len(texts))
    one.add(texts[300:500], vectors[300:500])
    other.add(texts[400:], vectors[400:])
    one.add(texts[450:550], vectors[450:550])
    assert (one.count(), other.count()) == (600, 600)
    one.close()
    other.finish()
    assert places(other, vectors[[420, 550]], 1) == [[420], [550]]
    other.close()


def test_two_writers_do_not_mix(tmp_path: Path, texts: list[str]) -> None:
    store = filled(tmp_path / "index", texts)
    other = sqlite3.connect(tmp_path / "index" / "texts.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._texts.execute("PRAGMA busy_timeout=50")
    with pytest.raises(BadInput, match="is being added to"):
        store.add(["another"], clustered(1))
    other.execute("ROLLBACK")
    other.close()
    store.add(["another"], clustered(1))
    assert store.count() == 601
    store.close()


def test_damage_is_named(tmp_path: Path, texts: list[str]) -> None:
    folder = tmp_path / "index"
    filled(folder, texts).close()
    os.truncate(folder / "vectors.f32", 100)
    with pytest.raises(BadInput, match="truncated; build the index again"):
        _EmbeddedStore(folder)
    for damaged in ("{", "[" * 100_000):
        (folder / "index.json").write_text(damaged)
        with pytest.raises(BadInput, match="damaged"):
            _EmbeddedStore(folder)
    (folder / "index.json").unlink()
    with pytest.raises(BadInput, match="is not an index"):
        _EmbeddedStore(folder)
    with pytest.raises(BadInput, match="there is no index"):
        open_store(str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="already exists"), create_store(str(folder), wanted()):
        pass


def test_an_empty_store_finds_nothing(tmp_path: Path) -> None:
    _create_embedded(tmp_path / "index", wanted("binary"))
    store = _EmbeddedStore(tmp_path / "index")
    assert store.search(clustered(2), 5) == [[], []]
    with pytest.raises(BadInput, match="is empty"):
        _FolderReader(tmp_path / "index")
    store.close()


def test_usearch_is_not_imported_before_a_graph_is_needed() -> None:
    """On ARM, torch does not finish loading after it, and a model may need torch."""
    script = "import sys, trundle.index.readers\nassert 'usearch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
