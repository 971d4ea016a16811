"""A store in a folder: texts in sqlite, vectors in flat files, and for large sets a graph.

    index.json      what the store was told when it was made
    texts.sqlite    the texts; a row's number is its place in the other files
    vectors.f32     full vectors, read from disk where candidates are looked at again
    codes.int8, codes.binary   what is scanned first, where that is not the full vectors
    graph.usearch   for more than 50,000 texts; made from the rest, so it may be lost

A kill at any moment loses at most the part that was being added: vectors are on the disk before sqlite commits their
texts, and what lies beyond the last committed text is written over.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from trundle.embedder import Vectors
from trundle.errors import BadInput, WriteFailed
from trundle.folders import check_free, write_whole
from trundle.index.codes import (
    _code_width,
    _Codes,
    _encode_codes,
    _open_graph,
    _rescored,
    _Rows,
    _scan,
    _write_graph,
)
from trundle.index.contract import (
    _EXACT_UP_TO,
    _OVERSAMPLE,
    Wanted,
    _agreed,
    _Facts,
    _Found,
    _key_of,
    _Sample,
)
from trundle.progress import SILENT, Progress

_MARK = "index.json"
_FORMAT = 1
_TEXTS, _VECTORS, _GRAPH = "texts.sqlite", "vectors.f32", "graph.usearch"
_LOOKED_UP_AT_ONCE = 500
_TABLE = (
    "CREATE TABLE IF NOT EXISTS texts (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, text TEXT NOT NULL)"
)


def _create_embedded(folder: Path, wanted: Wanted) -> None:
    """An empty store; one that is there already must be of the same kind."""
    if (folder / _MARK).is_file():
        _agreed(_read_facts(folder), wanted, str(folder))
        return
    check_free(folder)
    write_whole(folder / _MARK, json.dumps(asdict(wanted.facts) | {"format": _FORMAT}, indent=2) + "\n")


def _read_facts(folder: Path) -> _Facts:
    """What the store was told when it was made."""
    path = folder / _MARK
    if not path.is_file():
        raise BadInput(f"{folder} is no index; build one with trundle index build")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("format") != _FORMAT:
            raise BadInput(f"{path} was written by another version of trundle; build the index again")
        return _Facts(**content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path} is damaged ({error}); build the index again") from error


class _EmbeddedStore:
    """An open store. One process may add to it while others search what was there when they opened it."""

    def __init__(self, folder: Path, *, exact_up_to: int = _EXACT_UP_TO, progress: Progress = SILENT) -> None:
        self._folder = folder
        self._facts = _read_facts(folder)
        self._exact_up_to = exact_up_to
        self._progress = progress
        with self._explained():
            self._texts = sqlite3.connect(folder / _TEXTS, isolation_level=None, timeout=5)
            self._texts.execute("PRAGMA journal_mode=WAL")
            self._texts.execute("PRAGMA synchronous=FULL")
            self._texts.execute(_TABLE)
        self._load()

    @property
    def name(self) -> str:
        """Where it is."""
        return str(self._folder)

    @property
    def facts(self) -> _Facts:
        """What it was told when it was made."""
        return self._facts

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self._facts.dimensions

    def count(self) -> int:
        """How many texts there are."""
        with self._explained():
            return int(self._texts.execute("SELECT coalesce(max(id) + 1, 0) FROM texts").fetchone()[0])

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those that are not stored yet, each once."""
        keys = {_key_of(text): text for text in texts}
        wanted = list(keys)
        for start in range(0, len(wanted), _LOOKED_UP_AT_ONCE):
            part = wanted[start : start + _LOOKED_UP_AT_ONCE]
            marks = ",".join("?" * len(part))
            with self._explained():
                there = self._texts.execute(f"SELECT key FROM texts WHERE key IN ({marks})", part).fetchall()
            for (key,) in there:
                del keys[key]
        return list(keys.values())

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Store texts with their vectors: all of them or none."""
        precision = self._facts.precision
        with self._explained():
            self._texts.execute("BEGIN IMMEDIATE")
            try:
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
        """Build the graph if the set is large and the graph does not cover it."""
        self._load()
        total = len(self._codes)
        if total > self._exact_up_to and (self._found is None or self._found[0] < total):
            with self._explained():
                _write_graph(
                    self._folder / _GRAPH, self._codes, self._facts.precision, self.dimensions, self._progress
                )
            self._load()

    def search(self, queries: Vectors, k: int) -> list[list[_Found]]:
        """The k nearest texts of each query by cosine, best first."""
        found = [_rescored(query, self._vectors, self._candidates(query, k), k) for query in queries]
        return [
            [_Found(text=text, score=score) for text, (_, score) in zip(self._read(row), row, strict=True)]
            for row in found
        ]

    def sample(self, count: int, seed: int) -> _Sample:
        """Up to `count` texts drawn evenly, in their order."""
        total = len(self._vectors)
        rows = np.sort(np.random.default_rng(seed).permutation(total)[:count])
        texts = self._read([(int(row), 0.0) for row in rows])
        return _Sample(texts=tuple(texts), vectors=np.array(self._vectors[rows]), total=total)

    def close(self) -> None:
        """Let go of the files."""
        self._texts.close()

    @property
    def _codes_path(self) -> Path:
        return self._folder / f"codes.{self._facts.precision}"

    def _load(self) -> None:
        """Look at the files as they are now."""
        total, width = self.count(), self._facts.dimensions
        self._vectors: Vectors = _mapped(self._folder / _VECTORS, np.dtype("<f4"), total, width)
        self._codes: _Codes = self._vectors
        if self._facts.precision != "float":
            kind = np.dtype(np.int8 if self._facts.precision == "int8" else np.uint8)
            self._codes = _mapped(self._codes_path, kind, total, _code_width(width, self._facts.precision))
        self._found = None
        if total > self._exact_up_to:
            self._found = _open_graph(self._folder / _GRAPH, self._facts.precision, self._codes, width)

    def _candidates(self, query: Vectors, k: int) -> _Rows:
        """Rows worth looking at with full vectors; what the graph does not cover yet is scanned."""
        precision = self._facts.precision
        asked = query if precision == "float" else _encode_codes(query[None], precision)[0]
        count = k if precision == "float" else _OVERSAMPLE * k
        if self._found is None:
            return _scan(asked, self._codes, precision, count)
        covered, nearest = self._found
        return np.concatenate([nearest(asked, count), _scan(asked, self._codes, precision, count, covered)])

    def _read(self, rows: Sequence[tuple[int, float]]) -> list[str]:
        found: dict[int, str] = {}
        wanted = [row for row, _ in rows]
        for start in range(0, len(wanted), _LOOKED_UP_AT_ONCE):
            part = wanted[start : start + _LOOKED_UP_AT_ONCE]
            marks = ",".join("?" * len(part))
            with self._explained():
                found |= dict(self._texts.execute(f"SELECT id, text FROM texts WHERE id IN ({marks})", part))
        return [found[row] for row in wanted]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in one sentence what a file did not want."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if "locked" in str(error):
                raise BadInput(f"{self._folder} is being added to; wait until that is done") from error
            if isinstance(error, sqlite3.OperationalError):
                raise WriteFailed(_not_written(self._folder, str(error))) from error
            raise BadInput(f"{self._folder / _TEXTS} is damaged ({error}); build the index again") from error
        except OSError as error:
            raise WriteFailed(_not_written(self._folder, error.strerror or str(error))) from error


def _not_written(folder: Path, reason: str) -> str:
    return (
        f"{folder} could not be written ({reason}); free some space and run the same command again: "
        "what was stored is kept"
    )


def _write_at(path: Path, first: int, rows: _Codes) -> None:
    """Put rows into a flat file from row `first` on, and onto the disk."""
    content = np.ascontiguousarray(rows)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        view = memoryview(content.view(np.uint8).data).cast("B")
        place = first * content.shape[1] * content.itemsize
        while view:
            written = os.pwrite(descriptor, view, place)
            view, place = view[written:], place + written
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mapped(path: Path, kind: np.dtype[Any], rows: int, width: int) -> Any:
    """The committed rows of a flat file, read from disk as they are needed."""
    if rows == 0:
        return np.empty((0, width), dtype=kind)
    if not path.is_file() or path.stat().st_size < rows * width * kind.itemsize:
        raise BadInput(f"{path} is missing or cut short; build the index again")
    return np.memmap(path, dtype=kind, mode="r", shape=(rows, width))
