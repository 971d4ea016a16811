"""The index in a real Postgres with pgvector, also one that restarts."""

from __future__ import annotations

import threading
import time
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
from trundle.index.stores import build_index, create_store, open_index_reader, open_store


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
    drawn = store.sample(50, 3)
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
        with pytest.raises(WriteFailed, match="can't be reached") as refused:
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
    table = open_index_reader(postgres.url, table="shop.items")
    assert table.dimensions == WIDTH
    drawn = table.sample(1000, 0)
    assert drawn.total == len(drawn.texts) == 80
    order = [int(text.split()[1]) for text in drawn.texts]
    np.testing.assert_allclose(drawn.vectors, vectors[order], rtol=1e-5)
    with pytest.raises(BadInput, match="name one with --table"):
        open_index_reader(postgres.url)
    with pytest.raises(BadInput, match="there is no table 'nothing'"):
        open_index_reader(postgres.url, table="nothing")
    with pytest.raises(BadInput, match="no column of texts 'title'"):
        open_index_reader(postgres.url, table="items", text_column="title")
    table.close()
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE TABLE plain (text text)")
    with pytest.raises(BadInput, match="was not made by trundle"):
        open_store(postgres.url, table="plain")
    with pytest.raises(BadInput, match="there is no table missing yet"):
        open_store(postgres.url, table="missing")
