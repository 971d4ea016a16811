"""The index in a real Postgres with pgvector, also one that restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("psycopg", reason="needs the extra `index`")

import psycopg
from sklearn.neighbors import NearestNeighbors

from clusters import WIDTH, clustered, wanted
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, WriteFailed
from trundle.index.connection import _Database
from trundle.index.postgres import _PostgresStore
from trundle.index.readers import build_index, create_store, open_reader, open_store
from trundle.index.rows import draw_sample


def places(store: Any, queries: np.ndarray) -> list[list[int]]:
    return [[int(one.text.split()[-1]) for one in row] for row in store.search(queries, 10)]


def test_build_search_and_rebuild(postgres: Any, texts: list[str]) -> None:
    vectors = clustered(len(texts))
    stored = dict(zip(texts, vectors, strict=True))
    with create_store(postgres.url, wanted(), table="Texts of mine") as store:
        build_index(store, texts, lambda some: np.stack([stored[text] for text in some]))
        assert build_index(store, texts[:9], lambda _: pytest.fail("nothing is new")).added == 0
    store = open_store(postgres.url, table="Texts of mine")
    queries = clustered(20, seed=1)
    distances, truth = NearestNeighbors(metric="cosine").fit(vectors).kneighbors(queries, 10)
    assert places(store, queries) == truth.tolist()
    scores = [[one.score for one in row] for row in store.search(queries, 10)]
    np.testing.assert_allclose(scores, 1 - distances, atol=1e-5)
    reader = open_reader(postgres.url, table="Texts of mine")
    drawn = draw_sample(reader, 50, 3)
    reader.close()
    assert drawn.total == 600
    np.testing.assert_allclose(drawn.vectors, [stored[text] for text in drawn.texts], rtol=1e-5)
    with pytest.raises(BadInput, match="pass --force"):
        _PostgresStore.create(postgres.url, "Texts of mine", wanted("binary"))
    with create_store(postgres.url, wanted("binary"), table="Texts of mine", force=True) as new:
        new.add(["text number 1"], vectors[:1])
        assert store.count() == 600
        new.finish()
    assert store.count() == 1
    store.close()


def test_binary_with_rescoring_and_a_graph(postgres: Any, texts: list[str]) -> None:
    vectors, queries = clustered(len(texts)), clustered(20, seed=1)
    truth = NearestNeighbors(metric="cosine").fit(vectors).kneighbors(queries, 10, return_distance=False)
    for precision, exact_up_to in (("binary", 10**6), ("binary", 10), ("float", 10)):
        table = f"t_{precision}_{exact_up_to}"
        store = _PostgresStore.create(postgres.url, table, wanted(precision), exact_up_to=exact_up_to)  # type: ignore[arg-type]
        store.add(texts, vectors)
        store.finish()
        store.finish()
        found = places(store, queries)
        assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found, truth, strict=True)]) > 0.9
        store.close()
    with pytest.raises(BadInput, match="choose --precision float or binary"):
        _PostgresStore.create(postgres.url, "t", wanted("int8"))


def tables(postgres: Any) -> list[str]:
    with psycopg.connect(postgres.url) as connection:
        rows = connection.execute(
            "SELECT relname FROM pg_class WHERE relkind = 'r' AND relname ~ '^long|^t_'"
        )
        return sorted(name for (name,) in rows.fetchall() if "_binary_" not in name and "_float_" not in name)


def test_an_answer_that_is_lost_after_the_commit(
    postgres: Any, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _PostgresStore.create(postgres.url, "t_lost", wanted())
    store.add(texts[:10], clustered(10))
    store.close()
    lost = []
    transaction = psycopg.Connection.transaction

    @contextmanager
    def without_answer(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        with transaction(self, *args, **options) as inner:
            yield inner
        if not lost and not options:
            lost.append(True)
            raise psycopg.OperationalError("server closed the connection unexpectedly")

    for moment in ("create", "finish"):
        lost.clear()
        with monkeypatch.context() as patched:
            if moment == "create":
                patched.setattr(psycopg.Connection, "transaction", without_answer)
            new = _PostgresStore.create(postgres.url, "t_lost", wanted(), force=True)
            new.add(texts[:20], clustered(20))
            new.count()
            if moment == "finish":
                monkeypatch.setattr(new, "count", lambda: 20)
                patched.setattr(psycopg.Connection, "transaction", without_answer)
            new.finish()
        assert lost
        new.close()
        with closing(open_store(postgres.url, table="t_lost")) as found:
            assert found.count() == 20
    assert tables(postgres) == ["t_lost"]


def test_a_new_table_that_somebody_drops(postgres: Any, texts: list[str]) -> None:
    store = _PostgresStore.create(postgres.url, "t_lost", wanted())
    before = store.count()
    new = _PostgresStore.create(postgres.url, "t_lost", wanted(), force=True)
    new.add(texts[:10], clustered(10))
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f"DROP TABLE {new._label}")
        connection.execute(f"CREATE TABLE {new._label} (theirs text)")
    with pytest.raises(WriteFailed, match=r"was dropped while it was filled; run again$"):
        new._replace_table("t_lost")
    assert store.count() == before
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f"DROP TABLE {new._label}")
    for each in (store, new):
        each.close()


def test_names_as_long_as_postgres_allows(postgres: Any, texts: list[str]) -> None:
    name = "long" + "é" * 29 + "x"
    assert len(name.encode()) == 63
    for force, count in ((False, 30), (True, 40), (True, 50)):
        store = _PostgresStore.create(postgres.url, name, wanted(), force=force, exact_up_to=10)
        store.add(texts[:count], clustered(count))
        store.finish()
        store.close()
        with closing(open_store(postgres.url, table=name)) as found:
            assert found.count() == count
        with psycopg.connect(postgres.url) as connection:
            built = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = %s", [name])
            assert sum("hnsw" in definition for (definition,) in built.fetchall()) == 1
    assert tables(postgres) == [name, "t_lost"]
    with pytest.raises(BadInput, match="is too long"):
        _PostgresStore.create(postgres.url, f"{name}y", wanted())


def test_rebuilding_drops_only_what_killed_builds_left(postgres: Any, texts: list[str]) -> None:
    def rebuild() -> _PostgresStore:
        return _PostgresStore.create(postgres.url, "t_mine", wanted(), force=True)

    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE t_mine_new (theirs text)")
    killed, live, last = rebuild(), rebuild(), None
    killed.close()
    last = rebuild()
    assert len(tables(postgres)) == 5
    for count, store in ((10, live), (20, last)):
        store.add(texts[:count], clustered(count))
        store.finish()
        assert store.count() == count
        store.close()
    with closing(open_store(postgres.url, table="t_mine")) as found:
        assert found.count() == 20
    assert tables(postgres)[1:] == ["t_lost", "t_mine", "t_mine_new"]


def test_a_table_that_a_view_reads(postgres: Any, texts: list[str]) -> None:
    store = _PostgresStore.create(postgres.url, "t_viewed", wanted())
    store.add(texts[:10], clustered(10))
    late = _PostgresStore.create(postgres.url, "t_viewed", wanted(), force=True)
    late.add(texts[:20], clustered(20))
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE VIEW seen AS SELECT text FROM t_viewed")
    with pytest.raises(BadInput, match=r"can't be replaced \(.*seen"):
        _PostgresStore.create(postgres.url, "t_viewed", wanted(), force=True)
    with pytest.raises(BadInput, match="the new index is complete in table t_viewed_new_"):
        late.finish()
    assert (store.count(), late.count()) == (10, 20)
    store.close()
    late.close()


def test_a_server_that_restarts(postgres: Any, texts: list[str]) -> None:
    progress = RecordedProgress()
    store = _PostgresStore.create(postgres.url, "patient", wanted(), progress=progress)
    store.add(texts[:100], clustered(100))
    postgres.stop()
    started = threading.Timer(1.0, postgres.start)
    started.start()
    store.add(texts[100:200], clustered(100, seed=2))
    started.join()
    assert store.count() == 200
    assert any("does not respond" in line for line in progress.lines)
    assert store.search(clustered(100, seed=2)[5:6], 1)[0][0].text == texts[105]
    store.close()


def test_a_server_that_stays_down(postgres: Any, texts: list[str]) -> None:
    store = _PostgresStore.create(postgres.url, "away", wanted(), retry_seconds=0.5)
    store.add(texts[:10], clustered(10))
    postgres.stop()
    try:
        with pytest.raises(WriteFailed, match="what was stored is kept"):
            store.add(texts[10:20], clustered(10, seed=2))
        began = time.monotonic()
        with pytest.raises(BadInput, match="can't be reached") as refused:
            _PostgresStore.open("postgresql://somebody:secret@127.0.0.1:1/nothing", "t")
        assert time.monotonic() - began < 20
        assert "secret" not in str(refused.value)
    finally:
        postgres.start()
    assert store.count() == 10
    store.close()


def test_a_statement_that_takes_too_long_is_not_repeated(postgres: Any) -> None:
    lines = RecordedProgress()
    url = f"{postgres.url}{'&' if '?' in postgres.url else '?'}options=-c%20statement_timeout%3D50"
    database = _Database(url, read_only=True, retry_seconds=60, progress=lines)
    with pytest.raises(WriteFailed, match="stopped a statement"):
        database.do(lambda connection: connection.execute("SELECT pg_sleep(20)"))
    assert not lines.lines


def test_tables_filled_by_other_programs(postgres: Any) -> None:
    vectors = clustered(80)
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute("CREATE SCHEMA shop")
        connection.execute(
            f"CREATE TABLE shop.items (id uuid, collection varchar, document text, embedding vector({WIDTH}))"
        )
        for number, vector in enumerate(vectors):
            row = [f"item {number}", str(vector.tolist())]
            connection.execute("INSERT INTO shop.items (document, embedding) VALUES (%s, %s)", row)
        connection.execute("INSERT INTO shop.items (document) VALUES ('no vector')")
        connection.execute(f"CREATE TABLE shop.others (document text, embedding vector({WIDTH}))")
    table = open_reader(postgres.url, table="shop.items")
    assert table.width == WIDTH
    drawn = draw_sample(table, 1000, 0)
    assert (drawn.total, len(drawn.texts), table.counts.no_vector) == (81, 80, 1)
    order = [int(text.split()[1]) for text in drawn.texts]
    np.testing.assert_allclose(drawn.vectors, vectors[order], rtol=1e-5)
    with pytest.raises(BadInput, match="name one with --table"):
        open_reader(postgres.url)
    with pytest.raises(BadInput, match="there is no table 'nothing'"):
        open_reader(postgres.url, table="nothing")
    with pytest.raises(BadInput, match="no column of texts 'title'"):
        open_reader(postgres.url, table="items", texts="title")
    table.close()
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE plain (text text)")
    with pytest.raises(BadInput, match="was not made by trundle"):
        open_store(postgres.url, table="plain")
    with pytest.raises(BadInput, match="there is no table missing yet"):
        open_store(postgres.url, table="missing")
