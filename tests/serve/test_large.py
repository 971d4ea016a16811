"""Large requests beside small ones: their work is done in short turns, by one worker less than there are."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from live_server import Answer, LiveServer, eventually, raw, running
from trundle.runtime.encoder import Encoder
from trundle.serve import batching, routes
from trundle.serve.settings import ServerSettings, _Model, _Served
from trundle.serve.wire import EmbeddingsRequest

TEXTS = [f"text number {number}" for number in range(200)]


class Watched(Encoder):
    """The real encoder, which counts the threads that work on large requests at once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=2)
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.now = self.most = self.tokenised = self.computed = 0
        self.gate.set()

    @contextmanager
    def counted(self, large: bool) -> Iterator[None]:
        with self.lock:
            self.now += large
            self.most = max(self.most, self.now)
        time.sleep(0.002 * large)
        yield
        with self.lock:
            self.now -= large

    def read(self, texts: Any) -> Any:
        with self.counted(len(texts) > 1):
            self.tokenised = max(self.tokenised, len(texts))
            assert self.gate.wait(30)
            return super().read(texts)

    def vectors_of(self, rows: Any, *, together: bool = True) -> Any:
        with self.counted(len(rows) > 1):
            self.computed += len(rows)
            return super().vectors_of(rows, together=together)

    def finished(self, vectors: Any, **options: Any) -> Any:
        with self.counted(len(vectors) > 1):
            return super().finished(vectors, **options)


@pytest.fixture
def watched(student_folder: Path) -> Watched:
    return Watched(student_folder)


@pytest.fixture
def live(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)  # small requests are always expected
    with running(_Served(student=_Model(name="small", encoder=watched))) as found:
        assert found.embed(input="a small one").status == 200
        yield found


def test_large_requests_take_one_of_two_workers_while_small_ones_come(
    live: LiveServer, watched: Watched, student: Encoder
) -> None:
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda: answers.append(live.embed(input=TEXTS, encoding_format="float")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert live.embed(input="a small one").status == 200
    assert watched.most == 1
    assert watched.tokenised <= batching._SHARE
    for answer in answers:
        data = answer.json()["data"]
        assert [row["index"] for row in data] == list(range(len(TEXTS)))
        np.testing.assert_allclose([row["embedding"] for row in data], student.encode(TEXTS), atol=1e-5)


def test_a_client_that_leaves_while_its_texts_are_tokenised(live: LiveServer, watched: Watched) -> None:
    before = watched.computed
    watched.gate.clear()
    body = json.dumps({"input": TEXTS}).encode()
    head = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    connection = raw(live.port, head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    eventually(lambda: watched.now == 1)
    connection.close()
    eventually(lambda: b'status="499"' in live.get("/metrics").body)
    watched.gate.set()
    eventually(lambda: b'trundle_waiting_texts{model="small"} 0.0' in live.get("/metrics").body)
    assert live.embed(input="a small one").status == 200
    assert watched.computed == before + 1


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_an_answer_is_written_in_short_parts(student: Encoder, encoding: str) -> None:
    """A thread that writes holds the GIL, so nobody else is answered before its part is written."""
    asked = EmbeddingsRequest.model_validate({"input": "a", "encoding_format": encoding})
    vectors = np.random.default_rng(0).normal(size=(2048, student.dimensions)).astype(np.float32)
    encoded: Any = type("Encoded", (), {"vectors": vectors, "tokens": 7})
    parts = list(routes._written(_Model(name="small", encoder=student), asked, encoded))
    assert max(part.count(b'"index"') for part in parts) * student.dimensions <= routes._WRITTEN_VALUES
    answer = json.loads(b"".join(parts))
    assert [row["index"] for row in answer["data"]] == list(range(2048))
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert (answer["object"], answer["model"]) == ("list", "small")


def test_the_collector_skips_what_was_loaded_at_the_start(
    alone: _Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    interval = sys.getswitchinterval()
    try:
        with routes.open_socket("127.0.0.1", 0) as listening:
            routes.run_server(alone, ServerSettings(), listening)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    assert frozen[0] > 0
