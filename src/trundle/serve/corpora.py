"""Texts to search on the page: the documentation found in the environment, and files people drop in.

Passages are embedded by both models in the background, a few at a time so that clients are not held up; what is ready
can be searched at once. Everything is in memory and small by design; `trundle index` is for the rest.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import numpy as np

from trundle.data.environment import Documented, environment_pairs, installed_packages, standard_library
from trundle.data.sampling import sample
from trundle.embedder import Vectors
from trundle.evaluate.retrieval import unit
from trundle.serve.batching import _Batcher, _Busy
from trundle.serve.models import _Served

_ENVIRONMENT = "environment"
_ENVIRONMENT_PASSAGES = 400
_PACKAGES, _PER_PACKAGE, _OF_PYTHON = 30, 25, 250
_EXAMPLES = 4
_LONGEST_EXAMPLE = 48
_MOST_PASSAGES = 2000
_MOST_DROPPED = 4
_AT_ONCE = 8
_SHOWN = 10


@dataclass(kw_only=True, eq=False)
class _Corpus:
    """Passages, and as many vectors of them by each model as are ready."""

    key: str
    name: str
    passages: list[str] = field(default_factory=list)
    examples: list[str] = field(default_factory=list)
    vectors: dict[str, list[Vectors]] = field(default_factory=dict)
    ready: int = 0
    cut: int = 0
    """Passages that were left out because there were too many."""
    work: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        """As the page sees it."""
        return {
            "key": self.key,
            "name": self.name,
            "passages": len(self.passages),
            "ready": self.ready,
            "left_out": self.cut,
            "reading": not self.passages,
            "examples": self.examples,
        }


class _Corpora:
    """All that can be searched on one server's page."""

    def __init__(self, served: _Served, batchers: dict[str, _Batcher]) -> None:
        self._served = served
        self._batchers = batchers
        self._numbers = count(1)
        self._found: dict[str, _Corpus] = {
            _ENVIRONMENT: _Corpus(key=_ENVIRONMENT, name="Documentation found here")
        }

    def list(self) -> list[dict[str, Any]]:
        """What there is."""
        return [corpus.as_json() for corpus in self._found.values()]

    def get(self, key: str) -> _Corpus | None:
        """A corpus; the documentation is read when it is first asked for."""
        corpus = self._found.get(key)
        if corpus is not None and corpus.work is None:
            corpus.work = asyncio.create_task(self._read_environment(corpus))
        return corpus

    def add(self, name: str, passages: Sequence[str]) -> _Corpus:
        """Take a dropped file; the oldest of them goes when there are too many."""
        corpus = _Corpus(key=f"file-{next(self._numbers)}", name=name)
        corpus.passages = list(passages[:_MOST_PASSAGES])
        corpus.cut = max(0, len(passages) - _MOST_PASSAGES)
        corpus.work = asyncio.create_task(self._embed(corpus))
        self._found[corpus.key] = corpus
        dropped = [key for key in self._found if key != _ENVIRONMENT]
        for key in dropped[:-_MOST_DROPPED]:
            gone = self._found.pop(key)
            if gone.work is not None:
                gone.work.cancel()
        return corpus

    async def close(self) -> None:
        """Stop what goes on in the background."""
        for corpus in self._found.values():
            if corpus.work is not None:
                corpus.work.cancel()
                await asyncio.gather(corpus.work, return_exceptions=True)

    async def search(self, corpus: _Corpus, query: str) -> dict[str, Any]:
        """The same query three ways: by the teacher, by the student on the teacher's vectors, by the student alone."""
        student, teacher = self._served.student, self._served.teacher
        asked: dict[str, tuple[Vectors, float]] = {}
        for model in self._served.models:
            started = time.perf_counter()
            prompted = model.encoder.prompt_for("query") + query
            encoded = await self._batchers[model.name].encode([prompted])
            asked[model.name] = encoded.vectors[0], 1000 * (time.perf_counter() - started)
        ways = [("student", student, student)]
        if teacher is not None:
            ways = [("teacher", teacher, teacher), ("asymmetric", student, teacher), *ways]
        ready = corpus.ready
        columns = []
        for way, queries, documents in ways:
            vector, milliseconds = asked[queries.name]
            started = time.perf_counter()
            found = _nearest_passages(vector, corpus.vectors.get(documents.name, []), ready)
            searched = 1000 * (time.perf_counter() - started)
            columns.append(
                {
                    "way": way,
                    "queries": queries.name,
                    "documents": documents.name,
                    "encode_ms": milliseconds,
                    "search_ms": searched,
                    "results": [
                        {"place": place, "text": corpus.passages[place], "score": score}
                        for place, score in found
                    ],
                }
            )
        return {"corpus": corpus.as_json(), "searched": ready, "columns": _with_overlap(columns)}

    async def _read_environment(self, corpus: _Corpus) -> None:
        chosen = await asyncio.to_thread(_documentation)
        short = (
            pair.query for pair in chosen if len(pair.query) <= _LONGEST_EXAMPLE and pair.query.isascii()
        )
        corpus.examples = list(islice((query.rstrip(".") for query in short if "*" not in query), _EXAMPLES))
        corpus.passages = [pair.document for pair in chosen]
        await self._embed(corpus)

    async def _embed(self, corpus: _Corpus) -> None:
        """Embed the passages by every model, a few at a time."""
        for start in range(0, len(corpus.passages), _AT_ONCE):
            part = corpus.passages[start : start + _AT_ONCE]
            for model in self._served.models:
                prompt = model.encoder.prompt_for("document")
                vectors = await _patiently(self._batchers[model.name], [prompt + text for text in part])
                corpus.vectors.setdefault(model.name, []).append(vectors)
            corpus.ready = start + len(part)


def _documentation() -> list[Documented]:
    """Python's own documentation and that of some packages: what can be read in seconds."""
    some = sample(installed_packages(), _PACKAGES, seed=0)
    pairs = environment_pairs(packages=some, limit_per_package=_PER_PACKAGE)
    pairs += environment_pairs(packages=[standard_library()], limit_per_package=_OF_PYTHON)
    return sample(pairs, _ENVIRONMENT_PASSAGES, seed=0)


async def _patiently(batcher: _Batcher, texts: Sequence[str]) -> Vectors:
    """Vectors of passages; clients go first."""
    while True:
        try:
            return (await batcher.encode(texts)).vectors
        except _Busy as busy:
            await asyncio.sleep(busy.seconds)


def _nearest_passages(query: Vectors, blocks: Sequence[Vectors], ready: int) -> list[tuple[int, float]]:
    """Place and cosine of the nearest of the passages that are ready."""
    if not ready:
        return []
    documents = np.vstack(blocks)[:ready]
    scores = unit(documents) @ unit(query[None])[0]
    best = np.argsort(-scores, kind="stable")[:_SHOWN]
    return [(int(place), float(scores[place])) for place in best]


def _with_overlap(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many of the first way's results each other way found too, and where each stood there."""
    truth = [result["place"] for result in columns[0]["results"]]
    for column in columns[1:]:
        places = [result["place"] for result in column["results"]]
        column["overlap"] = len(set(places) & set(truth)) / len(truth) if truth else 0.0
        for result in column["results"]:
            result["teacher_rank"] = truth.index(result["place"]) + 1 if result["place"] in truth else None
    return columns


_LONGEST = 700
_SHORTEST = 12
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_SENTENCE = re.compile(r"(?<=[.!?…])\s+")


def _split_passages(text: str) -> list[str]:
    """Paragraphs where the file has them, otherwise lines; long ones are cut between sentences.

    Pieces too short to mean anything, and repeated ones, are left out.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = _PARAGRAPH.split(text.strip())
    if len(parts) < 3:
        parts = text.splitlines()
    pieces = (piece for part in parts for piece in _cut(" ".join(part.split())))
    return [piece for piece in dict.fromkeys(pieces) if len(piece) >= _SHORTEST]


def _cut(paragraph: str) -> list[str]:
    """A paragraph in pieces of at most `LONGEST` characters, between sentences where it can be."""
    if len(paragraph) <= _LONGEST:
        return [paragraph]
    pieces, piece = [], ""
    for sentence in _SENTENCE.split(paragraph):
        if piece and len(piece) + 1 + len(sentence) > _LONGEST:
            pieces.append(piece)
            piece = ""
        piece = f"{piece} {sentence}".strip()
        while len(piece) > _LONGEST:
            end = piece.rfind(" ", 1, _LONGEST)
            end = _LONGEST if end < 0 else end
            pieces.append(piece[:end])
            piece = piece[end:].strip()
    return [*pieces, piece] if piece else pieces
