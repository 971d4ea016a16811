"""The page at / that compares searches, and its routes.

It searches the documentation found in the environment and files that users drop. Both models embed the
passages in the background, a few at a time so that clients are not delayed. Everything stays in memory.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import count, islice
from typing import Annotated, Any

import numpy as np
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from pydantic_core import to_json

from trundle.data.environment import environment_pairs, installed_packages, standard_library
from trundle.data.sampling import sample
from trundle.embedder import Vectors, check_texts
from trundle.evaluate.retrieval import unit
from trundle.runtime.encoder import Encoder
from trundle.serve.batching import _Batcher, _Busy
from trundle.serve.settings import ServerSettings, _Served
from trundle.serve.wire import _JSON, _parse_body, _RequestError

_ENVIRONMENT = "environment"
_ENVIRONMENT_PASSAGES = 400
_PACKAGES, _PER_PACKAGE, _OF_PYTHON = 30, 25, 250
_EXAMPLES = 4
_LONGEST_EXAMPLE = 48
_LONGEST_QUERY = 2000
_MOST_PASSAGES = 2000
_MOST_DROPPED = 4
_AT_ONCE = 8
_SHOWN = 10
_LONGEST = 700
_SHORTEST = 12
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_PIECE = re.compile(" ?({0}\\Z|{0}(?<=[.!?…])(?= )|{0}(?= )|{0})".format(f".{{1,{_LONGEST}}}"))
"""The rest of a paragraph, or its beginning up to the last sentence or word that fits, or as much as fits."""
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class _SearchBody(BaseModel, strict=True):
    query: Annotated[str, Field(min_length=1, max_length=_LONGEST_QUERY)]
    corpus: str


class _DroppedFile(BaseModel, strict=True):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    text: str


@dataclass(kw_only=True, eq=False)
class _PassageSet:
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
        return {
            "key": self.key,
            "name": self.name,
            "passages": len(self.passages),
            "ready": self.ready,
            "left_out": self.cut,
            "reading": not self.passages,
            "examples": self.examples,
        }


class _Playground:
    def __init__(self, served: _Served, batchers: dict[str, _Batcher]) -> None:
        self._served, self._batchers = served, batchers
        self._numbers = count(1)
        documentation = _PassageSet(key=_ENVIRONMENT, name="Documentation found here")
        self._found: dict[str, _PassageSet] = {_ENVIRONMENT: documentation}

    def list(self) -> list[dict[str, Any]]:
        return [collection.as_json() for collection in self._found.values()]

    def get(self, key: str) -> _PassageSet:
        """Returns a collection; the documentation is read on first use."""
        collection = self._found.get(key)
        if collection is None:
            raise _RequestError(404, "that corpus no longer exists; drop the file again")
        if collection.work is None:
            collection.work = asyncio.create_task(self._read_environment(collection))
        return collection

    def add(self, name: str, passages: Sequence[str]) -> _PassageSet:
        """Adds a dropped file; the oldest one is removed if there are too many."""
        kept, cut = list(passages[:_MOST_PASSAGES]), max(0, len(passages) - _MOST_PASSAGES)
        collection = _PassageSet(key=f"file-{next(self._numbers)}", name=name, passages=kept, cut=cut)
        collection.work = asyncio.create_task(self._embed(collection))
        self._found[collection.key] = collection
        dropped = [key for key in self._found if key != _ENVIRONMENT]
        for key in dropped[:-_MOST_DROPPED]:
            removed = self._found.pop(key)
            if removed.work is not None:
                removed.work.cancel()
        return collection

    async def close(self) -> None:
        for collection in self._found.values():
            if collection.work is not None:
                collection.work.cancel()
                await asyncio.gather(collection.work, return_exceptions=True)

    async def search(self, collection: _PassageSet, query: str) -> dict[str, Any]:
        """Runs a query by the teacher, by the student on the teacher's vectors, and by the student alone."""
        student, teacher = self._served.student, self._served.teacher
        encoded: dict[str, tuple[Vectors, float]] = {}
        for model in self._served.models:
            started = time.perf_counter()
            found = await self._batchers[model.name].encode([model.encoder.prompt_for("query") + query])
            encoded[model.name] = found.vectors[0], 1000 * (time.perf_counter() - started)
        ways = [("student", student, student)]
        if teacher is not None:
            ways = [("teacher", teacher, teacher), ("asymmetric", student, teacher), *ways]
        ready, columns = collection.ready, []
        for way, queries, documents in ways:
            vector, milliseconds = encoded[queries.name]
            started = time.perf_counter()
            nearest = _nearest_passages(vector, collection.vectors.get(documents.name, []), ready)
            models = {"way": way, "queries": queries.name, "documents": documents.name}
            took = {"encode_ms": milliseconds, "search_ms": 1000 * (time.perf_counter() - started)}
            results = [
                {"place": place, "text": collection.passages[place], "score": score}
                for place, score in nearest
            ]
            columns.append({**models, **took, "results": results})
        return {"corpus": collection.as_json(), "searched": ready, "columns": _with_overlap(columns)}

    async def _read_environment(self, collection: _PassageSet) -> None:
        def documentation() -> Any:
            some = sample(installed_packages(), _PACKAGES, seed=0)  # all of them would take too long
            pairs = environment_pairs(packages=some, limit_per_package=_PER_PACKAGE)
            pairs += environment_pairs(packages=[standard_library()], limit_per_package=_OF_PYTHON)
            return sample(pairs, _ENVIRONMENT_PASSAGES, seed=0)

        pairs = await asyncio.to_thread(documentation)
        queries = (pair.query for pair in pairs if len(pair.query) <= _LONGEST_EXAMPLE)
        plain = (query.rstrip(".") for query in queries if query.isascii() and "*" not in query)
        collection.examples = list(islice(plain, _EXAMPLES))
        collection.passages = [pair.document for pair in pairs]
        await self._embed(collection)

    async def _embed(self, collection: _PassageSet) -> None:
        """Embeds the passages by every model, a few at a time; clients go first."""
        for start in range(0, len(collection.passages), _AT_ONCE):
            part = collection.passages[start : start + _AT_ONCE]
            for model in self._served.models:
                batcher, prompt = self._batchers[model.name], model.encoder.prompt_for("document")
                vectors = await _encode_when_free(batcher, model.encoder, [prompt + text for text in part])
                collection.vectors.setdefault(model.name, []).append(vectors)
            collection.ready = start + len(part)


async def _encode_when_free(batcher: _Batcher, encoder: Encoder, texts: Sequence[str]) -> Vectors:
    """The vectors of texts; those of which the tokenizer leaves nothing get zeros, and are found last."""
    vectors = np.zeros((len(texts), encoder.dimensions), dtype=np.float32)
    readable = [place for place, row in enumerate(encoder.read(texts)) if row]
    while readable:
        try:
            vectors[readable] = (await batcher.encode([texts[place] for place in readable])).vectors
            break
        except _Busy as busy:
            await asyncio.sleep(busy.seconds)
    return vectors


def _nearest_passages(query: Vectors, blocks: Sequence[Vectors], ready: int) -> list[tuple[int, float]]:
    if not ready:
        return []
    scores = unit(np.vstack(blocks)[:ready]) @ unit(query[None])[0]
    best = np.argsort(-scores, kind="stable")[:_SHOWN]
    return [(int(place), float(scores[place])) for place in best]


def _with_overlap(columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds to each other column its overlap with the first, and the rank of each result there."""
    truth = [result["place"] for result in columns[0]["results"]]
    for column in columns[1:]:
        places = [result["place"] for result in column["results"]]
        column["overlap"] = len(set(places) & set(truth)) / len(truth) if truth else 0.0
        for result in column["results"]:
            result["teacher_rank"] = truth.index(result["place"]) + 1 if result["place"] in truth else None
    return columns


def _split_passages(text: str) -> list[str]:
    """Splits a file into paragraphs, or lines if it has none; divides long ones, leaves short ones out."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = _PARAGRAPH.split(text.strip())
    if len(parts) < 3:
        parts = text.splitlines()
    pieces = (piece for part in parts for piece in _PIECE.findall(" ".join(part.split())))
    return [piece for piece in dict.fromkeys(pieces) if len(piece) >= _SHORTEST]


def _add_page(app: FastAPI, served: _Served, playground: _Playground, settings: ServerSettings) -> None:
    """Adds the page and its routes. They are not part of the documented API."""
    content = files("trundle.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/compare", include_in_schema=False)
    async def about() -> Response:
        return _answer({"models": [model.card() for model in served.models], "corpora": playground.list()})

    @app.get("/compare/corpora/{key}", include_in_schema=False)
    async def collection(key: str) -> Response:
        return _answer(playground.get(key).as_json())

    @app.post("/compare/corpora", include_in_schema=False)
    async def drop(request: Request) -> Response:
        dropped = await _parse_body(request, _DroppedFile, settings)
        check_texts([dropped.text])
        passages = await asyncio.to_thread(_split_passages, dropped.text)
        if not passages:
            raise _RequestError(400, f"{dropped.name} has no text to search; drop another file")
        return _answer(playground.add(dropped.name, passages).as_json())

    @app.post("/compare/search", include_in_schema=False)
    async def search(request: Request) -> Response:
        body = await _parse_body(request, _SearchBody, settings)
        check_texts([body.query])
        return _answer(await playground.search(playground.get(body.corpus), body.query))


def _answer(content: Any) -> Response:
    return Response(to_json(content), media_type=_JSON)
