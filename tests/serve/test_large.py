"""Large requests beside small ones: their work is done in short turns, by workers of low priority."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn

from live_server import Answer, LiveServer, eventually, raw, running
from trundle.runtime.encoder import Encoder
from trundle.serve import batching, routes
from trundle.serve.batching import _Batcher, _Pending
from trundle.serve.settings import ServerSettings, _Model, _Served
from trundle.serve.wire import EmbeddingsRequest

TEXTS = [f"text number {number}" for number in range(200)]


class Watched(Encoder):
    """The real encoder, which notes the threads that work on large requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=2)
        self.lock, self.gate = threading.Lock(), threading.Event()
        self.now = self.most = self.tokenised = self.computed = 0
        self.together = False
        self.low: set[bool] = set()
        self.priorities: dict[bool, set[int]] = {False: set(), True: set()}
        self.gate.set()

    @contextmanager
    def counted(self, large: bool) -> Iterator[None]:
        with self.lock:
            self.now += large
            self.most = max(self.most, self.now)
            if large:
                self.low.add(threading.current_thread().name.endswith("low"))
        time.sleep(0.002 * large)
        yield
        with self.lock:
            self.now -= large

    def read(self, texts: Any) -> Any:
        with self.counted(len(texts) > 1):
            self.tokenised = max(self.tokenised, len(texts))
            if sys.platform == "linux":  # else this is the priority of the process
                self.priorities[len(texts) > 1].add(os.getpriority(os.PRIO_PROCESS, 0))
            assert self.gate.wait(30)
            return super().read(texts)

    def vectors_of(self, rows: Any, *, together: bool = True) -> Any:
        with self.counted(len(rows) > 1):
            self.computed += len(rows)
            self.together |= together and len(rows) > 1
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


def test_memory_is_given_back_after_large_requests(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[float] = []
    release = _Batcher._release_now

    def record(batcher: _Batcher) -> None:
        if batcher._encoder is watched:  # servers of other tests may still have a release ahead
            releases.append(time.monotonic())
        release(batcher)

    monkeypatch.setattr(batching, "_RELEASE_SECONDS", 0.01)
    monkeypatch.setattr(_Batcher, "_release_now", record)
    with running(_Served(student=_Model(name="small", encoder=watched))) as live:
        assert live.embed(input="a small one").status == 200
        time.sleep(0.05)
        assert not releases
        assert live.embed(input=TEXTS).status == 200
        eventually(lambda: bool(releases))


def test_large_requests_get_one_worker_of_low_priority_while_small_ones_come(
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
    assert watched.low == {True}
    if sys.platform == "linux":
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert watched.priorities == {False: {own}, True: {own + batching._NICENESS}}
    assert watched.tokenised <= batching._SHARE
    for answer in answers:
        data = answer.json()["data"]
        assert [row["index"] for row in data] == list(range(len(TEXTS)))
        np.testing.assert_allclose([row["embedding"] for row in data], student.encode(TEXTS), atol=1e-5)


def answer_of(watched: Watched, *, small: bool, held: Callable[[_Batcher], object] = id) -> _Pending:
    """A large request, after a small one or not; `held` is called while its first part is tokenised."""

    async def answered() -> _Pending:
        batcher = _Batcher(watched, ServerSettings(), lambda *_: None)
        try:
            if small:
                await batcher.encode(["a small one"])
            watched.gate.clear()
            pending = batcher.submit(TEXTS)
            await asyncio.to_thread(eventually, lambda: watched.now == 1)
            held(batcher)
            await asyncio.sleep(0.1)
            watched.gate.set()
            return await asyncio.wait_for(batcher.finished(pending), 20)
        finally:
            watched.gate.set()
            await batcher.close()

    return asyncio.run(answered())


@pytest.mark.parametrize("small", [True, False])
def test_other_workers_continue_when_small_requests_start_or_end(
    small: bool, watched: Watched, student: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_or_end(batcher: _Batcher) -> None:
        if small:
            monkeypatch.setattr(batching, "_RECENT_SECONDS", -1.0)
        else:
            batcher.submit(["a small one"])

    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)
    found = answer_of(watched, small=small, held=start_or_end)
    assert watched.low == {True, False}
    np.testing.assert_allclose(found.vectors, student.encode(TEXTS), atol=1e-5)


def test_the_end_of_the_server_waits_for_a_request_of_low_priority(
    watched: Watched, student: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(batcher: _Batcher) -> None:
        closing.append(asyncio.ensure_future(batcher.close()))
        monkeypatch.setattr(batching, "_RECENT_SECONDS", -1.0)  # workers that have stopped would continue

    closing: list[Any] = []
    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)
    found = answer_of(watched, small=True, held=close)
    np.testing.assert_allclose(found.vectors, student.encode(TEXTS), atol=1e-5)


@pytest.mark.parametrize("small", [True, False])
def test_threads_without_low_priority_compute_nothing_beside_small_requests(
    small: bool, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)
    monkeypatch.setattr(batching, "_WORTH_ALL_THREADS", 1)
    monkeypatch.setattr(batching, "_BATCH_TOKENS", 10**6)  # one batch, so that it runs alone
    monkeypatch.setattr(batching, "_BATCH_TEXTS", 10**6)
    answer_of(watched, small=small)
    assert watched.low == {small}
    assert watched.together is not small


def test_a_system_with_one_priority_per_process(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)
    monkeypatch.setattr(batching, "sys", SimpleNamespace(platform="darwin"))
    answer_of(watched, small=True)
    assert watched.low == {True}
    assert watched.priorities[True] == watched.priorities[False]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("texts", [["a small one"], TEXTS])
def test_a_worker_that_stops_is_noticed(
    texts: list[str], watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stopped() -> None:
        batcher = _Batcher(watched, ServerSettings(), lambda *_: None)
        await batcher.encode(["a small one"])
        assert batcher.works
        monkeypatch.setattr(watched, "read", lambda _: sys.exit())
        pending = batcher.submit(texts)
        await asyncio.to_thread(eventually, lambda: not batcher.works)
        batcher.drop(pending)
        await batcher.close()

    monkeypatch.setattr(batching, "_RECENT_SECONDS", 600.0)
    asyncio.run(stopped())


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


def test_what_is_done_before_the_server_runs(alone: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector skips what is loaded, and no worker of low priority starts threads that others use."""
    frozen: list[int] = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    loaded: list[bool] = []
    monkeypatch.setattr(alone.student.encoder, "vectors_of", lambda _, together: loaded.append(together))
    interval = sys.getswitchinterval()
    try:
        with routes.open_socket("127.0.0.1", 0) as listening:
            routes.run_server(alone, ServerSettings(), listening)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    assert frozen[0] > 0
    assert loaded == [False]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
