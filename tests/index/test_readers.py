"""Every database is filled by its own client and read back: all rows, samples, counts and errors."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clusters import WIDTH, clustered
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, MissingExtra, OtherTexts, TrundleError
from trundle.index import flat_files, rows
from trundle.index.connection import _PostgresReader
from trundle.index.flat_files import write_table
from trundle.index.readers import open_reader
from trundle.index.rows import IndexReader, _RowBatch, _RowCounts, draw_sample

pytestmark = pytest.mark.filterwarnings("ignore")  # of the databases' clients
ROWS = 1500
VECTORS = clustered(ROWS)
TEXTS = [f"item {number}" for number in range(ROWS)]
FOLDERS = ("qdrant", "chroma", "lancedb", "milvus", "faiss", "sqlite-vec", "parquet")


@pytest.fixture(scope="module")
def databases() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "readers.py"
    spec = importlib.util.spec_from_file_location("benchmark_readers", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def filled(databases: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Fills a database once and returns its address."""
    places: dict[str, str] = {}

    def fill(name: str) -> str:
        if name not in places:
            if not databases.installed(name):
                pytest.skip(f"needs the extra {name}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                folder = tmp_path_factory.mktemp(name)
                batches = iter([(0, TEXTS[:900], VECTORS[:900]), (900, TEXTS[900:], VECTORS[900:])])
                places[name] = databases.DATABASES[name].fill(folder, batches, WIDTH)
        return places[name]

    return fill


def together(batches: Iterator[_RowBatch]) -> tuple[list[str], list[int], np.ndarray]:
    found = list(batches)
    ids = [one for batch in found for one in batch.ids]
    numbers = [int(text.split()[1]) for batch in found for text in batch.texts]
    return ids, numbers, np.concatenate([batch.vectors for batch in found])


def same_rows(reader: IndexReader, numbers: list[int], vectors: np.ndarray) -> None:
    expected = VECTORS[numbers]
    if np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-4):  # a database may store them normalised
        expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(vectors, expected, rtol=1e-5, atol=1e-6, err_msg=reader.where)


@pytest.mark.parametrize("name", FOLDERS)
def test_rows_and_samples(filled: Any, name: str) -> None:
    metrics = {"qdrant": "cosine", "sqlite-vec": "cosine", "parquet": "cosine", "lancedb": "l2"}
    with closing(open_reader(filled(name))) as reader:
        assert (reader.count, reader.width) == (ROWS, WIDTH)
        assert reader.metric == metrics.get(name, "inner product")
        ids, numbers, vectors = together(reader.rows())
        assert sorted(numbers) == list(range(ROWS))
        assert len(set(ids)) == ROWS
        same_rows(reader, numbers, vectors)
        samples = [together(reader.rows(sample, seed)) for sample, seed in ((200, 1), (200, 1), (200, 2))]
        assert [len(set(numbers)) for _, numbers, _ in samples] == [200, 200, 200]
        assert samples[0][1] == samples[1][1] != samples[2][1]
        assert max(samples[0][1]) > 1200  # not the first rows
        assert dict(zip(*samples[0][:2], strict=True)).items() <= dict(zip(ids, numbers, strict=True)).items()
        same_rows(reader, samples[0][1], samples[0][2])
        assert reader.counts.says() == ""
        goes_on_after_700_rows(reader)


def test_a_scan_of_sqlite_vec_reads_no_chunk_twice(databases: ModuleType, tmp_path: Path) -> None:
    """A chunk of 1,024 wide vectors is larger than SQLite's own cache."""
    apsw = pytest.importorskip("apsw")
    pytest.importorskip("sqlite_vec")
    where = databases.DATABASES["sqlite-vec"].fill(tmp_path, databases.made_up(1024, 768), 768)
    reader: Any = open_reader(where)
    with closing(reader):
        assert sum(len(batch.texts) for batch in reader.rows()) == 1024
        pages = next(iter(reader._client.execute("PRAGMA page_count")))[0]
        assert reader._client.status(apsw.SQLITE_DBSTATUS_CACHE_MISS)[0] <= pages


def goes_on_after_700_rows(reader: IndexReader) -> None:
    ids, numbers, vectors = together(reader.rows())
    last = rows._mark(rows._RawRows(ids, [TEXTS[number] for number in numbers], vectors), vectors, 699)
    rest, numbers, vectors = together(reader.rows(after=_RowCounts(read=700, last=last)))
    assert rest == ids[700:]
    same_rows(reader, numbers, vectors)
    assert reader.counts.read == len(ids)
    with pytest.raises(OtherTexts, match="has changed"):
        next(reader.rows(after=_RowCounts(read=700, last="another")))


def test_a_table_of_lancedb_as_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Path, str]] = []

    def reader(place: str, wish: rows._Wish) -> None:
        opened.append((Path(place).resolve(), str(wish.table)))

    monkeypatch.setattr("trundle.index.lancedb._LanceReader", reader)
    table = tmp_path / "chunks.lance"
    (table / "_versions").mkdir(parents=True)
    monkeypatch.chdir(table)
    for name in (".", str(table)):
        open_reader(name)
    assert opened == [(tmp_path.resolve(), "chunks")] * 2


@pytest.mark.parametrize("name", FOLDERS)
def test_names_that_are_not_there(filled: Any, name: str) -> None:
    where = filled(name)
    there = {"faiss": "ends in", "parquet": ""}.get(name, "chunks")
    if there:
        with pytest.raises(BadInput, match=f"nothing.*{there}"):
            open_reader(where, table="nothing")
    with pytest.raises(BadInput, match=r"nowhere.*pass one of: "):
        open_reader(where, texts="nowhere")


def test_a_table_that_changes_while_it_is_read(filled: Any) -> None:
    with closing(open_reader(filled("qdrant"))) as reader:
        rows = reader.rows()
        next(rows)
        client: Any = reader._client  # type: ignore[attr-defined]
        client.delete("chunks", points_selector=[1499])
        with pytest.raises(BadInput, match="changed while it was read"):
            list(rows)
        client.upload_collection(
            "chunks", ids=[1499], vectors=VECTORS[1499:], payload=[{"page_content": TEXTS[1499]}]
        )


def test_rows_that_cant_be_used_are_counted(tmp_path: Path) -> None:
    vectors: list[Any] = [row.tolist() for row in VECTORS[:100]]
    vectors[3], vectors[4] = None, [0.0] * WIDTH
    vectors[5], vectors[6], vectors[7] = [1.0, 2.0], [float("nan")] * WIDTH, vectors[8]
    texts: list[Any] = list(TEXTS[:100])
    texts[0], texts[1] = None, "  "
    pq.write_table(pa.table({"content": texts, "embedding": vectors}), tmp_path / "t.parquet")
    reader = open_reader(str(tmp_path / "t.parquet"))
    for sample in (None, 94, 50):
        _, numbers, found = together(reader.rows(sample))
        assert len(set(numbers)) == min(sample or 94, 94)
        assert not set(numbers) & {0, 1, 3, 4, 5, 6}
        same_rows(reader, [8 if number == 7 else number for number in numbers], found)
    list(reader.rows())
    assert reader.counts.says() == (
        "Of 100 rows read, left out 2 with no text, 1 with no vector, 1 with a vector of zeros, "
        "1 with a vector with NaN or infinity, 1 with a vector of another width; "
        "1 have the same vector as another row."
    )
    vectors[10:40] = [[1.0, 2.0]] * 30
    pq.write_table(pa.table({"content": texts, "embedding": vectors}), tmp_path / "two.parquet")
    with pytest.raises(BadInput, match="several widths"):
        list(open_reader(str(tmp_path / "two.parquet")).rows())


def test_the_table_that_is_written_is_an_index_again(tmp_path: Path) -> None:
    np.savez(tmp_path / "v.npz", vectors=VECTORS.astype(np.float16), other=np.zeros(3))
    rows = "".join(json.dumps({"title": "a", "meta": {"body": text}}) + "\n" for text in TEXTS)
    (tmp_path / "v.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(BadInput, match=r"--text-column: title, meta\.body"):
        open_reader(str(tmp_path / "v.npz"))
    reader = open_reader(str(tmp_path / "v.npz"), texts="meta.body")
    reader.metric = "l2"
    assert write_table(reader, tmp_path / "out.parquet") == ROWS
    again = open_reader(str(tmp_path / "out.parquet"))
    assert (again.count, again.width, again.metric) == (ROWS, WIDTH, "l2")
    _, numbers, vectors = together(again.rows())
    np.testing.assert_array_equal(vectors, VECTORS.astype(np.float16)[numbers])
    (tmp_path / "v.jsonl").write_text(rows + rows[:40] + "}\n", encoding="utf-8")
    with pytest.raises(BadInput, match=r"1,500 vectors and .* 1,501 texts|can't be read"):
        list(open_reader(str(tmp_path / "v.npz"), texts="meta.body").rows())


def test_a_copy_that_was_stopped_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat_files, "_GROUP_ROWS", 300)
    monkeypatch.setattr(flat_files, "_BATCH_ROWS", 100)
    vectors = VECTORS.copy()
    vectors[[250, 700]] = 0
    vectors[900] = vectors[5]
    source, copy = tmp_path / "source.parquet", tmp_path / "copy.parquet"

    def stopped(_self: Any, raw: Any) -> Any:
        if int(raw.ids[0].as_py()) >= 1000:
            raise KeyboardInterrupt
        return kept(_self, raw)

    kept = rows.IndexReader._kept
    columns = {"id": list(map(str, range(ROWS))), "text": TEXTS, "vector": list(vectors)}
    pq.write_table(pa.table(columns), source)
    assert write_table(open_reader(str(source)), tmp_path / "at-once.parquet") == ROWS - 2
    with monkeypatch.context() as patch:
        patch.setattr(rows.IndexReader, "_kept", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_table(open_reader(str(source)), copy)
    assert not copy.exists()
    read: list[int] = []
    monkeypatch.setattr(
        rows.IndexReader, "_kept", lambda self, raw: read.append(len(raw.texts)) or kept(self, raw)
    )
    reader, progress = open_reader(str(source)), RecordedProgress()
    assert write_table(reader, copy, progress=progress) == ROWS - 2
    assert sum(read) == ROWS - 700  # two files were complete, of 399 and 300 usable rows
    assert any("700 rows of" in line for line in progress.lines)
    assert pq.read_table(copy).equals(pq.read_table(tmp_path / "at-once.parquet"))
    assert (reader.counts.zero, reader.counts.duplicates) == (2, 1)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "at-once.parquet",
        "copy.parquet",
        "source.parquet",
    ]


@pytest.mark.parametrize("factory", ["IDMap,Flat", "IVF8,SQ8", "PCA16,IVF8,Flat"])
def test_kinds_of_faiss(tmp_path: Path, factory: str) -> None:
    faiss = pytest.importorskip("faiss")
    index = faiss.index_factory(WIDTH, factory)
    index.train(VECTORS)
    index.add_with_ids(VECTORS, np.arange(ROWS)[::-1] + 5) if "IDMap" in factory else index.add(VECTORS)
    faiss.write_index(index, str(tmp_path / "kind.faiss"))
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "texts.parquet")
    for sample in (None, 100):
        _, numbers, found = together(open_reader(str(tmp_path / "kind.faiss")).rows(sample))
        cosines = np.einsum("ij,ij->i", found, VECTORS[numbers]) / np.linalg.norm(found, axis=1)
        least = 0.6 if "PCA" in factory else 0.99
        assert (cosines / np.linalg.norm(VECTORS[numbers], axis=1)).min() > least


def table(postgres: Any, name: str, columns: str, rows: list[tuple[Any, ...]]) -> str:
    import psycopg

    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        connection.execute(f"DROP TABLE IF EXISTS {name}")
        connection.execute(f"CREATE TABLE {name} ({columns})")
        with connection.cursor() as cursor:
            marks = ", ".join(["%s"] * len(rows[0])) if rows else ""
            cursor.executemany(f"INSERT INTO {name} VALUES ({marks})", rows)
    return f"{postgres.url}&table={name}"


def test_postgres_samples_every_row_alike(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages hold three long or a hundred short rows; a third of the rows were deleted."""
    import psycopg

    rows = [(number, f"item {number} " + "long " * 500 * (number < 600)) for number in range(3000)]
    where = table(postgres, "uneven", "id int PRIMARY KEY, text text STORAGE PLAIN, v vector", [])
    with psycopg.connect(postgres.url) as connection, connection.cursor() as cursor:
        insert = "INSERT INTO uneven VALUES (%s, %s, '[1,2,3]')"
        cursor.executemany(insert, rows)
        connection.execute("DELETE FROM uneven WHERE id % 3 = 0")
    drawn: list[int] = []
    monkeypatch.setattr(_PostgresReader, "_take", lambda *_: pytest.fail("it reads every row's place"))
    with closing(open_reader(where)) as reader:
        assert reader.count == 2000
        for seed in range(40):
            _, numbers, _ = together(reader.rows(90, seed))
            assert len(set(numbers)) == 90
            drawn += numbers
        assert together(reader.rows(90, 5))[1] == together(reader.rows(90, 5))[1]
    assert not any(number % 3 == 0 for number in drawn)
    share = np.mean([number < 600 for number in drawn])
    assert abs(share - 0.2) < 4 * (0.2 * 0.8 / len(drawn)) ** 0.5


def test_postgres_halves_and_partitions(postgres: Any) -> None:
    import psycopg

    vectors = [str(row.tolist()) for row in VECTORS[:300]]
    columns = f"id int, part int, content text, small halfvec({WIDTH})) PARTITION BY LIST (part"
    where = table(postgres, "parts", columns, [])
    with psycopg.connect(postgres.url) as connection, connection.cursor() as cursor:
        for part in (0, 1):
            connection.execute(f'CREATE TABLE "part {part}" PARTITION OF parts FOR VALUES IN ({part})')
        rows = [(number, number % 2, f"item {number}", vectors[number]) for number in range(300)]
        cursor.executemany("INSERT INTO parts VALUES (%s, %s, %s, %s)", rows)
    with closing(open_reader(where)) as reader:
        assert (reader.count, reader.width, reader.metric) == (300, WIDTH, "cosine")
        for sample in (None, 100, 10):
            _, numbers, found = together(reader.rows(sample))
            assert len(set(numbers)) == (sample or 300)
            np.testing.assert_array_equal(found, VECTORS[numbers].astype(np.float16))


def test_postgres_rows_that_cant_be_used(postgres: Any) -> None:
    rows: list[tuple[Any, ...]] = [(f"item {number}", str(VECTORS[number].tolist())) for number in range(50)]
    rows += [("no vector", None), (None, rows[0][1]), ("other", "[1,2]")]
    with closing(open_reader(table(postgres, "mixed", "body text, v vector", rows))) as reader:
        assert len(draw_sample(reader, 100, 0).texts) == 50
        counts = reader.counts
        assert (counts.no_vector, counts.no_text, counts.other_width) == (1, 1, 1)
    with pytest.raises(BadInput, match="is empty"):
        open_reader(table(postgres, "empty", "body text, v vector", []))
    with pytest.raises(BadInput, match="no column of texts"):
        open_reader(table(postgres, "wordless", "id int, v vector", [(1, "[1]")]))


def test_postgres_that_goes_away_or_refuses(postgres: Any) -> None:
    import psycopg

    rows = [(text, str(vector.tolist())) for text, vector in zip(TEXTS, VECTORS, strict=True)]
    where = table(postgres, "leaves", f"text text, v vector({WIDTH})", rows)
    with psycopg.connect(postgres.url) as connection:
        connection.execute("CREATE INDEX ON leaves USING hnsw (v vector_ip_ops)")
    with closing(open_reader(where)) as reader:
        assert reader.metric == "inner product"
        read = reader.rows()
        next(read)
        with psycopg.connect(postgres.url) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'trundle'"
            )
        with pytest.raises(BadInput, match="went away while it was read"):
            list(read)
        assert len(together(reader.rows())[1]) == ROWS  # connected again
        goes_on_after_700_rows(reader)


def test_postgres_that_wants_another_password(postgres: Any) -> None:
    import psycopg

    access = postgres.folder / "pg_hba.conf"
    before = access.read_text(encoding="utf-8")
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        access.write_text(f"local all guarded scram-sha-256\n{before}", encoding="utf-8")
        connection.execute("SELECT pg_reload_conf()")
        host = postgres.url.partition("?")[2]
        for user in ("guarded", "nobody"):
            with pytest.raises(BadInput, match="check user, password and database") as refused:
                open_reader(f"postgresql://{user}:Geheim@/postgres?{host}")
            assert "Geheim" not in str(refused.value)
        access.write_text(before, encoding="utf-8")
        connection.execute("SELECT pg_reload_conf()")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("mysql://me:Geheim@host/db", r"mysql:// is not an index .* .Postgres, .*; see trundle index read"),
        ("lancedb://{folder}/chunks", r"lancedb:// is no address .* pass /.* itself"),
        ("http://localhost:6333", r"http:// is not an index that trundle reads"),
        ("postgresql://me:Geheim@host/db?wrong=1", "address is not valid"),
        ("postgresql://me:Geheim/7@host/db", "write / . and # in a password as %2F"),
        ("qdrant://me:Geheim@host:port/db", "address is not valid"),
        ("qdrant://Geheim@localhost:1/docs", "can't be read"),
        ("chroma://Geheim@localhost:1/docs", "can't be read"),
        ("{folder}", "is not an index that trundle reads"),
        ("{folder}/notes.txt", "is not an index that trundle reads"),
        ("{folder}/broken.parquet", "can't be read"),
        ("{folder}/broken.faiss", "can't be read"),
        ("{folder}/plain.sqlite", "has no table of sqlite-vec"),
        ("{folder}/missing", "there is no index"),
    ],
)
def test_places_that_cant_be_read(where: str, message: str, tmp_path: Path) -> None:
    import sqlite3

    (tmp_path / "notes.txt").write_text("nothing of use", encoding="utf-8")
    if where.endswith(("parquet", "faiss")):
        Path(where.format(folder=tmp_path)).write_text("nothing of use", encoding="utf-8")
    with closing(sqlite3.connect(tmp_path / "plain.sqlite")) as database:
        database.execute("CREATE TABLE t (text TEXT)")
    with pytest.raises(TrundleError) as raised:
        open_reader(where.format(folder=tmp_path))
    assert "Geheim" not in str(raised.value)
    if isinstance(raised.value, MissingExtra):
        pytest.skip(str(raised.value))
    assert re.search(message, str(raised.value))
    assert raised.value.__cause__ is None or "Geheim" not in str(raised.value.__cause__)
