"""The answers of an endpoint, kept on disk: no text is sent, and paid for, twice.

One SQLite file for each endpoint, model and width, with the hash of each text and its vector. Every response
is committed before the next request, so a killed process loses at most the response that it waits for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from hashlib import blake2b
from pathlib import Path

import numpy as np

from trundle.cache import cache_entry
from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput, WriteFailed

_KEY_BYTES = 16
_KEYS_AT_ONCE = 500
_TEXTS_PER_REQUEST = 64
_WAIT_SECONDS = 30.0
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID"


def _asked_once(endpoint: Embedder, identity: str, *, most: int | None = None) -> Embedder:
    """Return an endpoint without prompts that sends no text twice, and at most `most` texts in all."""
    answers, sent = _Answers(identity), 0

    def encode(texts: Sequence[str]) -> Vectors:
        nonlocal sent
        known = answers.find(texts)
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if most is not None and sent + len(new) > most:
            what = f"{endpoint.name} would get {sent + len(new):,} texts, more than the {most:,} allowed"
            raise BadInput(f"{what}; allow more with --teacher-calls")
        for start in range(0, len(new), _TEXTS_PER_REQUEST):
            part = new[start : start + _TEXTS_PER_REQUEST]
            vectors = endpoint.text(part)
            answers.add(part, vectors)
            sent += len(part)
            known |= dict(zip(part, vectors, strict=True))
        if not texts:
            return endpoint.text([])
        return np.stack([known[text] for text in texts])

    return Embedder(name=endpoint.name, text=encode, query=encode, document=encode)


class _Answers:
    """Vectors by text; several processes may use one file."""

    def __init__(self, identity: str, *, root: Path | None = None) -> None:
        """Open the answers of the endpoint with this identity."""
        self._path = cache_entry("answers", identity, root=root).with_suffix(".sqlite")

    def find(self, texts: Sequence[str]) -> dict[str, Vectors]:
        """Return the vectors of those texts that were answered before."""
        if not self._path.is_file():
            return {}
        keys = {_key(text): text for text in texts}
        known = list(keys)
        found: dict[str, Vectors] = {}
        with closing(self._open()) as database:
            for start in range(0, len(known), _KEYS_AT_ONCE):
                part = known[start : start + _KEYS_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = database.execute(f"SELECT key, vector FROM answers WHERE key IN ({marks})", part)
                found |= {keys[key]: np.frombuffer(vector, dtype="<f4") for key, vector in rows}
        return found

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Keep the vectors of texts; they are on disk when this returns."""
        rows = [(_key(text), row.astype("<f4").tobytes()) for text, row in zip(texts, vectors, strict=True)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)
        except (OSError, sqlite3.Error) as error:
            raise WriteFailed(
                f"{self._path} can't be written ({error}); free some space, run again"
            ) from error

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_WAIT_SECONDS)
        database.execute(_TABLE)
        return database


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
