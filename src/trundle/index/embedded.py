"""An index in a folder: texts in SQLite, vectors in flat files, and for many texts a graph.

    index.json      the settings it was created with
    texts.sqlite    the texts; a row's number is its position in the other files
    vectors.f32     full vectors, read from disk to rescore candidates
    codes.int8, codes.binary   quantised vectors that are scanned first
    graph.usearch   for more than 50,000 texts; built from the other files

A killed build loses at most the batch being added: vectors are on disk before SQLite commits their texts, and
rows after the last committed text are overwritten.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.errors import BadInput, MissingExtra, WriteFailed
from trundle.folders import check_free, locked_folder, scratch_folder, sync, write_atomic
from trundle.index.base import _EXACT_UP_TO, _OVERSAMPLE, Wanted, _agreed, _Facts, _Hit, _key_of, _Precision
from trundle.index.rows import _BATCH_ROWS, IndexReader, _Places, _RawRows
from trundle.progress import SILENT, Progress

_Rows = NDArray[np.int64]
_Codes = NDArray[Any]
_Candidates = Callable[[_Codes, int], _Rows]

_WORD = 8
_BLOCK = 8192
_TINY = 1e-12
_GRAPH_KINDS: dict[_Precision, tuple[str, str]] = {
    "float": ("cos", "f32"),
    "int8": ("cos", "i8"),
    "binary": ("hamming", "b1"),
}
_GRAPH_BATCH = 4096
_LEAST_EXPANSION = 128
_MARK = "index.json"
_FORMAT = 1
_TEXTS, _VECTORS, _GRAPH = "texts.sqlite", "vectors.f32", "graph.usearch"
_LOOKUP_BATCH = 500
_COLUMNS = "id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, text TEXT NOT NULL"


def _code_width(dimensions: int, precision: _Precision) -> int:
    """Return the bytes per vector in the file that is scanned first."""
    if precision == "binary":
        return -(-dimensions // (8 * _WORD)) * _WORD  # full words, for fast counting
    return dimensions if precision == "int8" else 4 * dimensions


def _encode_codes(vectors: Vectors, precision: _Precision) -> _Codes:
    """Quantise vectors: int8 scales each so that its largest value becomes 127, binary keeps the signs."""
    if precision == "int8":
        largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), _TINY)
        return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
    bits = np.packbits(vectors > 0, axis=1)
    codes = np.zeros((len(vectors), _code_width(vectors.shape[1], "binary")), dtype=np.uint8)
    codes[:, : bits.shape[1]] = bits
    return codes


def _scores(query: _Codes, codes: _Codes, precision: _Precision) -> NDArray[np.float32]:
    """Return the cosine of one query with every row, or for binary minus the number of differing signs."""
    if precision == "binary":
        differing = np.bitwise_count(codes.view(np.uint64) ^ query.view(np.uint64)[None]).sum(axis=1)
        return np.asarray(-differing.astype(np.float32))
    vectors, one = codes.astype(np.float32, copy=False), query.astype(np.float32, copy=False)
    lengths = np.maximum(np.sqrt(np.einsum("ij,ij->i", vectors, vectors)) * np.linalg.norm(one), _TINY)
    return np.asarray((vectors @ one) / lengths)


def _scan(query: _Codes, codes: _Codes, precision: _Precision, count: int, first: int = 0) -> _Rows:
    """Return the `count` best rows of `codes` from `first` on, best first; blocks keep the memory small."""
    rows = np.empty(0, dtype=np.int64)
    best = np.empty(0, dtype=np.float32)
    for start in range(first, len(codes), _BLOCK):
        scores = _scores(query, np.ascontiguousarray(codes[start : start + _BLOCK]), precision)
        best = np.concatenate([best, scores])
        rows = np.concatenate([rows, np.arange(start, start + len(scores))])
        if len(best) > count:
            keep = np.argpartition(-best, count - 1)[:count]
            best, rows = best[keep], rows[keep]
    return rows[np.lexsort((rows, -best))]


def _usearch() -> Any:
    # Imported late: on ARM, torch hangs when it is imported after usearch.
    try:
        from usearch.index import Index
    except ImportError as error:
        raise MissingExtra("an index of many texts", "index") from error
    return Index


def _write_graph(
    path: Path, codes: _Codes, precision: _Precision, dimensions: int, progress: Progress = SILENT
) -> None:
    metric, dtype = _GRAPH_KINDS[precision]
    index = _usearch()(ndim=_graph_width(codes, precision, dimensions), metric=metric, dtype=dtype)
    with progress.task("building the graph", len(codes)) as advance:
        for start in range(0, len(codes), _GRAPH_BATCH):
            part = np.ascontiguousarray(codes[start : start + _GRAPH_BATCH])
            index.add(np.arange(start, start + len(part)), part)
            advance(len(part))
    with scratch_folder(path.parent, path.name) as scratch:
        made = scratch / path.name
        index.save(str(made))
        sync(made)
        made.replace(path)
        sync(path.parent)


def _open_graph(
    path: Path, precision: _Precision, codes: _Codes, dimensions: int
) -> tuple[int, _Candidates] | None:
    """Return the number of rows the graph covers and a search in it, or None without a usable graph."""
    if not path.is_file():
        return None
    library = _usearch()
    try:
        index: Any = library.restore(str(path), view=True)
    except Exception:  # RuntimeError and others; without the graph the search is only slower
        return None
    if index is None or index.ndim != _graph_width(codes, precision, dimensions) or len(index) > len(codes):
        return None

    def candidates(query: _Codes, count: int) -> _Rows:
        index.expansion_search = max(_LEAST_EXPANSION, 2 * count)
        return np.asarray(index.search(query, count).keys, dtype=np.int64)

    return len(index), candidates


def _graph_width(codes: _Codes, precision: _Precision, dimensions: int) -> int:
    """Return what usearch calls dimensions; for binary vectors, all bits of their words."""
    return 8 * codes.shape[1] if precision == "binary" else dimensions


def _create_embedded(folder: Path, wanted: Wanted) -> None:
    """Create an empty index; an existing one must have the same settings."""
    with locked_folder(folder, lambda: None):
        if (folder / _MARK).is_file():
            _agreed(_read_facts(folder), wanted, str(folder))
            return
        # Hidden files are the lock, and what a killed process left.
        if not folder.is_dir() or any(not entry.name.startswith(".") for entry in folder.iterdir()):
            check_free(folder)
        write_atomic(folder / _MARK, json.dumps(asdict(wanted.facts) | {"format": _FORMAT}, indent=2) + "\n")


def _read_facts(folder: Path) -> _Facts:
    path = folder / _MARK
    if not path.is_file():
        raise BadInput(f"{folder} is not an index; build one with trundle index build")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise BadInput(f"{path} was written by another version of trundle; build the index again")
        return _Facts(**content)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error}); build the index again") from error


class _EmbeddedStore:
    """An open index; one process may add to it while others search what was stored when they opened it."""

    def __init__(
        self,
        folder: Path,
        *,
        exact_up_to: int = _EXACT_UP_TO,
        read_only: bool = False,
        progress: Progress = SILENT,
    ) -> None:
        self._folder = folder
        self._read_only = read_only
        self.facts = _read_facts(folder)
        self.dimensions = self.facts.dimensions
        self._exact_up_to = exact_up_to
        self._progress = progress
        self.name = str(folder)
        with self._explained():
            self._texts = self._connected()
        self._load()

    def _connected(self) -> sqlite3.Connection:
        path = self._folder / _TEXTS
        try:
            return _connected_to(path, writable=True)
        except sqlite3.OperationalError as error:
            if not self._read_only or "locked" in str(error):
                raise
            if not path.is_file():
                fix = "finish it with trundle index build"
                raise BadInput(f"{self._folder} is an index without texts; {fix}") from error
        try:
            return _connected_to(path, "?mode=ro")
        except sqlite3.OperationalError:
            # A log of texts that are not in the main file yet would be ignored.
            if path.with_name(f"{path.name}-wal").exists():
                raise
            return _connected_to(path, "?immutable=1")

    def count(self) -> int:
        with self._explained():
            return int(self._texts.execute("SELECT coalesce(max(id) + 1, 0) FROM texts").fetchone()[0])

    def missing(self, texts: Sequence[str]) -> list[str]:
        keys = {_key_of(text): text for text in texts}
        for (key,) in self._lookup("key", "key", list(keys)):
            del keys[key]
        return list(keys.values())

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        precision = self.facts.precision
        with self._explained():
            self._texts.execute("BEGIN IMMEDIATE")
            try:
                new = set(self.missing(texts))  # another process may have added some meanwhile
                if len(new) < len(texts):
                    chosen = [place for place, text in enumerate(texts) if text in new]
                    texts, vectors = [texts[place] for place in chosen], vectors[chosen]
                if not new:
                    self._texts.execute("ROLLBACK")
                    return
                first = self.count()
                _write_at(self._folder / _VECTORS, first, vectors.astype("<f4", copy=False))
                if precision != "float":
                    _write_at(self._codes_path, first, _encode_codes(vectors, precision))
                rows = ((first + place, _key_of(text), text) for place, text in enumerate(texts))
                self._texts.executemany("INSERT INTO texts VALUES (?, ?, ?)", rows)
                self._texts.execute("COMMIT")
            except BaseException:
                if self._texts.in_transaction:
                    self._texts.execute("ROLLBACK")
                raise

    def finish(self) -> None:
        self._load()
        total = len(self._codes)
        if total > self._exact_up_to and (self._graph is None or self._graph[0] < total):
            path, precision = self._folder / _GRAPH, self.facts.precision
            with self._explained():
                _write_graph(path, self._codes, precision, self.dimensions, self._progress)
            self._load()

    def search(self, queries: Vectors, k: int) -> list[list[_Hit]]:
        results = []
        for query in queries:
            rows = np.sort(self._candidates(query, k))  # in the order of the file
            scores = _scores(query, np.asarray(self._vectors[rows]), "float")
            best = np.argsort(-scores, kind="stable")[:k]
            texts = dict(self._lookup("id, text", "id", rows[best].tolist()))
            found = zip(rows[best].tolist(), scores[best].tolist(), strict=True)
            results.append([_Hit(text=texts[row], score=score) for row, score in found])
        return results

    def close(self) -> None:
        self._texts.close()

    @property
    def _codes_path(self) -> Path:
        return self._folder / f"codes.{self.facts.precision}"

    def _load(self) -> None:
        total, width = self.count(), self.facts.dimensions
        self._vectors: Vectors = _mapped(self._folder / _VECTORS, np.dtype("<f4"), total, width)
        self._codes: _Codes = self._vectors
        if self.facts.precision != "float":
            kind = np.dtype(np.int8 if self.facts.precision == "int8" else np.uint8)
            self._codes = _mapped(self._codes_path, kind, total, _code_width(width, self.facts.precision))
        self.__dict__.pop("_graph", None)

    @cached_property
    def _graph(self) -> tuple[int, _Candidates] | None:
        if len(self._codes) <= self._exact_up_to:
            return None
        return _open_graph(self._folder / _GRAPH, self.facts.precision, self._codes, self.dimensions)

    def _candidates(self, query: Vectors, k: int) -> _Rows:
        precision = self.facts.precision
        code = query if precision == "float" else _encode_codes(query[None], precision)[0]
        count = k if precision == "float" else _OVERSAMPLE * k
        if self._graph is None:
            return _scan(code, self._codes, precision, count)
        covered, nearest = self._graph  # rows that the graph does not cover yet are scanned
        return np.concatenate([nearest(code, count), _scan(code, self._codes, precision, count, covered)])

    def _lookup(self, columns: str, key: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield `columns` of the texts whose `key` is one of the values."""
        for start in range(0, len(values), _LOOKUP_BATCH):
            part = values[start : start + _LOOKUP_BATCH]
            query = f"SELECT {columns} FROM texts WHERE {key} IN ({','.join('?' * len(part))})"
            with self._explained():
                yield from self._texts.execute(query, part).fetchall()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.OperationalError, OSError) as error:
            if "locked" in str(error):
                raise BadInput(f"{self._folder} is being added to by another process; try later") from error
            reason = getattr(error, "strerror", None) or error
            if self._read_only:
                raise BadInput(f"{self._folder} can't be read ({reason}); copy it to another disk") from error
            problem = f"can't be written ({reason}); free some space and run again"
            raise WriteFailed(f"{self._folder} {problem}: what was stored is kept") from error
        except sqlite3.DatabaseError as error:
            raise BadInput(f"{self._folder / _TEXTS} is damaged ({error}); build the index again") from error


class _FolderReader(IndexReader):
    """Reads an index that trundle built in a folder."""

    def __init__(self, folder: Path, *, progress: Progress = SILENT) -> None:
        self._client = store = _EmbeddedStore(folder, read_only=True, progress=progress)
        with self._opening(str(folder)):
            super().__init__(str(folder), count=store.count(), width=store.dimensions, metric="cosine")

    def _scan(self, first: int) -> Iterator[_RawRows]:
        yield from self._take(np.arange(first, self.count))

    def _take(self, places: _Places) -> Iterator[_RawRows]:
        for start in range(0, len(places), _BATCH_ROWS):
            chosen = places[start : start + _BATCH_ROWS]
            texts = dict(self._client._lookup("id, text", "id", chosen.tolist()))
            ids = chosen.tolist()
            yield _RawRows(ids, [texts.get(row) for row in ids], np.array(self._client._vectors[chosen]))


def _connected_to(path: Path, how: str = "", *, writable: bool = False) -> sqlite3.Connection:
    where = f"{path.resolve().as_uri()}{how}"
    connection = sqlite3.connect(where, uri=True, isolation_level=None, timeout=5)
    try:
        if writable:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute(f"CREATE TABLE IF NOT EXISTS texts ({_COLUMNS})")
        connection.execute("SELECT 1 FROM texts LIMIT 1")
    except BaseException:
        connection.close()
        raise
    return connection


def _write_at(path: Path, first: int, rows: _Codes) -> None:
    """Write rows to a flat file from row `first` on, and sync it to disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
        file.seek(first * rows.shape[1] * rows.itemsize)
        file.write(np.ascontiguousarray(rows).data)
        file.flush()
        os.fsync(file.fileno())
    if not first:
        sync(path.parent)  # the name of a new file


def _mapped(path: Path, kind: np.dtype[Any], rows: int, width: int) -> Any:
    if rows == 0:
        return np.empty((0, width), dtype=kind)
    if not path.is_file() or path.stat().st_size < rows * width * kind.itemsize:
        raise BadInput(f"{path} is missing or truncated; build the index again")
    return np.memmap(path, dtype=kind, mode="r", shape=(rows, width))
