"""Many, slow, disconnected and unauthorised clients, and the shutdown of the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import Response

from live_server import Answer, Gated, LiveServer, eventually, raw, running
from trundle.errors import BadInput
from trundle.runtime.encoder import Encoder
from trundle.serve.guard import _Guard, _Metrics
from trundle.serve.routes import open_socket
from trundle.serve.settings import ServerSettings, _Model, _Served, read_keys
from trundle.serve.wire import _LARGE

HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def figure(live: LiveServer, name: str) -> float:
    lines = live.get("/metrics").body.decode().splitlines()
    return float(next(line for line in lines if line.startswith(name + "{")).split()[-1])


def waiting(live: LiveServer) -> float:
    return figure(live, "trundle_waiting_texts")


def in_background(live: LiveServer, answers: list[Answer], **content: Any) -> threading.Thread:
    thread = threading.Thread(target=lambda: answers.append(live.embed(**content)))
    thread.start()
    return thread


def test_a_full_queue_says_when_to_retry(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served, ServerSettings(waiting=4, most_texts=4)) as live:
        answers: list[Answer] = []
        threads = []
        for number in range(2):  # each of the two workers takes one request
            threads.append(in_background(live, answers, input=[f"held {number}"]))
            eventually(lambda: gated.held == len(threads))
        threads.append(in_background(live, answers, input=["a", "b", "c", "d"]))
        eventually(lambda: waiting(live) == 4)
        refused = live.embed(input="one too many")
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert "try again" in refused.json()["error"]["message"]
        gated.gate.set()
        for thread in threads:
            thread.join()
        assert [answer.status for answer in answers] == [200, 200, 200]
        assert live.embed(input="one too many").status == 200


def hold_both_workers(live: LiveServer, gated: Gated, answers: list[Answer]) -> list[threading.Thread]:
    """Each of the two workers takes one request, and holds it until the gate opens."""
    threads: list[threading.Thread] = []
    for _ in range(2):
        threads.append(in_background(live, answers, input="a"))
        eventually(lambda: gated.held == len(threads))
    return threads


def test_requests_of_many_clients_are_run_together(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served) as live:
        answers: list[Answer] = []
        threads = hold_both_workers(live, gated, answers)
        threads += [in_background(live, answers, input=f"text {number}") for number in range(20)]
        eventually(lambda: waiting(live) == 20)
        gated.gate.set()
        for thread in threads:
            thread.join()
    assert sum(gated.ran) == 22
    assert max(gated.ran) >= 10  # all twenty, or half where both workers are free at once
    assert len(gated.ran) <= 4
    assert all(answer.status == 200 for answer in answers)


def test_long_texts_run_apart_from_short_ones(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served) as live:
        answers: list[Answer] = []
        threads = hold_both_workers(live, gated, answers)
        for _ in range(4):
            threads.append(in_background(live, answers, input=["word " * 2000, "word " * 500]))
            threads.append(in_background(live, answers, input="a"))
        # The worker for large requests may have taken one of their texts, or not yet.
        eventually(lambda: waiting(live) + gated.held == 14)
        gated.gate.set()
        for thread in threads:
            thread.join()
    assert [answer.status for answer in answers] == [200] * 10
    assert all(len(lengths) == 1 for lengths in gated.lengths)


def test_too_many_tokens_or_characters_are_not_computed(gated: Gated) -> None:
    gated.gate.set()
    settings = ServerSettings(most_tokens=500, most_characters=1000)
    with running(_Served(student=_Model(name="small", encoder=gated)), settings) as live:
        for texts, said in ((["one two three"] * 200, "500 tokens"), (["a", "a" * 1001], "1,000 characters")):
            answer = live.embed(input=texts)
            assert answer.status == 400
            assert said in answer.json()["error"]["message"]
        assert not gated.ran
        assert waiting(live) == 0
        assert live.embed(input=["one two"] * 40).status == 200


def test_a_request_that_takes_too_long(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served, ServerSettings(timeout=0.3)) as live:
        late = live.embed(input="late")
        assert late.status == 504
        assert "not ready after 0.3 s" in late.json()["error"]["message"]
        gated.gate.set()
        eventually(lambda: live.embed(input="in time").status == 200)


@pytest.mark.parametrize("sent", [1, 3], ids=["one request", "pipelined"])
def test_a_disconnected_clients_texts_are_not_computed(gated: Gated, sent: int) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served) as live:
        answers: list[Answer] = []
        held = []
        for number in range(2):
            held.append(in_background(live, answers, input=[f"held {number}"]))
            eventually(lambda: gated.held == len(held))
        body = json.dumps({"input": ["gone"] * 7}).encode()
        connection = raw(live.port, sent * (HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
        eventually(lambda: waiting(live) == 7)
        connection.close()
        eventually(lambda: waiting(live) == 0)
        gated.gate.set()
        for thread in held:
            thread.join()
        assert [answer.status for answer in answers] == [200, 200]
    assert sum(gated.ran) == 2


def test_slow_and_broken_clients(alone: _Served) -> None:
    with running(alone, ServerSettings(body_timeout=1.5)) as live:
        slow = raw(live.port, HEAD + b"Content-Length: 1000\r\n\r\n{")
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert b"send it faster" in answer
        slow.close()
        half = raw(live.port, HEAD + b"Content-Length: 1000\r\n\r\n{")
        half.close()
        silent = raw(live.port, b"POST /v1/emb")
        assert live.embed(input="others are served").status == 200
        silent.close()
        broken = raw(live.port, b"\x16\x03\x01 no HTTP at all\r\n\r\n")
        assert b" 400 " in broken.recv(4096)
        broken.close()
        assert live.embed(input="still").status == 200


def all_of(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    with connection:
        try:
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "content",
    [b"GET /health HTTP/1.1\r\nHost: x\r\nLong: ", b"GET /", CHUNKED + b"0\r\nTrailer: ", CHUNKED + b"1;"],
    ids=["a header", "a path", "a trailer", "a chunk extension"],
)
def test_headers_without_end(keyed: LiveServer, content: bytes) -> None:
    with raw(keyed.port, content) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"a" * (32 << 20))


@pytest.mark.parametrize(
    "body", [b"", b"Transfer-Encoding: chunked\r\n\r\n0\r\n"], ids=["headers", "trailers"]
)
def test_many_headers(keyed: LiveServer, body: bytes) -> None:
    many = b"".join(b"Name-%d: value\r\n" % number for number in range(6000))
    answer = all_of(raw(keyed.port, HEAD + body + many + b"\r\n"))
    assert b" 431 " in answer
    assert b"send fewer" in answer


@pytest.fixture(scope="module")
def keyed(alone: _Served) -> Iterator[LiveServer]:
    with running(alone, ServerSettings(keys=("a-key-123",))) as live:
        yield live


HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    "content", [b"", b"POST /v1/emb", HEALTH, HEALTH + b"Content-Length: 9\r\n\r\n"], ids=range(4)
)
def test_silent_connections_are_closed(
    alone: _Served, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trundle.serve.guard.KEEP_ALIVE_SECONDS", 0.1)
    with running(alone, ServerSettings(body_timeout=0.3)) as live:
        assert all_of(raw(live.port, content)).count(b"HTTP/1.1") == content.count(b"\r\n\r\n")


def test_a_connection_that_is_silent_after_an_answer_is_closed(
    alone: _Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first byte of another request ends uvicorn's own time for connections without one."""
    monkeypatch.setattr("trundle.serve.guard.KEEP_ALIVE_SECONDS", 0.1)
    with running(alone, ServerSettings(body_timeout=0.3)) as live:
        connection, answer = raw(live.port, HEALTH + b"\r\n"), b""
        while b'"ok"' not in answer:
            answer += connection.recv(4096)
        connection.sendall(b"POST /v1/emb")
        assert b"HTTP/1.1" not in all_of(connection)


def test_a_client_that_does_not_read_is_disconnected(alone: _Served) -> None:
    with running(alone, ServerSettings(body_timeout=0.3)) as live, not_reading(live) as connection:
        eventually(lambda: is_closed(connection))


def test_a_client_that_leaves_a_large_answer_is_no_error(
    alone: _Served, caplog: pytest.LogCaptureFixture
) -> None:
    with running(alone) as live:
        with not_reading(live) as connection:
            connection.recv(1)  # the first answer has begun
        eventually(lambda: b'requests_total{route="/v1/embeddings"' in live.get("/metrics").body)
    assert not caplog.records


def test_answers_that_are_not_read_count_as_memory(alone: _Served) -> None:
    with running(alone, ServerSettings(body_timeout=60, most_bytes=300_000, waiting_bytes=300_000)) as live:
        large = {"input": "a " * 40_000}
        with not_reading(live):
            eventually(lambda: live.embed(**large).status == 429)
        eventually(lambda: live.embed(**large).status == 200)


@contextmanager
def not_reading(live: LiveServer) -> Iterator[socket.socket]:
    """A client that sends requests and takes none of their large answers."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", live.port))
        body = json.dumps({"input": ["a"] * 2000}).encode()
        connection.sendall(6 * (HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
        yield connection


def test_a_large_answer_is_sent_in_parts() -> None:
    """So that a client has the time for slow reading for each part, not for the whole."""
    body, sent = b"0123456789" * 30_000, list[Any]()

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    guard = _Guard(Response(body), settings=ServerSettings(), metrics=_Metrics(), routes={})
    asyncio.run(guard({"type": "http", "method": "GET", "path": "/", "headers": []}, receive, send))
    parts = [message for message in sent if message["type"] == "http.response.body"]
    assert b"".join(part["body"] for part in parts) == body
    assert max(len(part["body"]) for part in parts) <= _LARGE
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]


def is_closed(connection: socket.socket) -> bool:
    try:
        connection.send(b"\r\n")  # allowed between requests; other bytes would be an invalid one
    except ConnectionError:
        return True
    return False


def test_a_new_connection_replaces_the_one_that_waits_longest(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    # They would be closed after the time for headers as well; the test does not wait that long.
    with running(served, ServerSettings(most_connections=3, body_timeout=60)) as live:
        answers: list[Answer] = []
        busy = in_background(live, answers, input="held")
        eventually(lambda: gated.held == 1)
        idle = [raw(live.port, b"") for _ in range(4)]
        assert all_of(idle[0]) == all_of(idle[1]) == b""
        assert live.get("/health").status == 200
        gated.gate.set()
        busy.join()
        assert [answer.status for answer in answers] == [200]
        for connection in idle:
            connection.close()


def test_large_bodies_wait_for_memory(gated: Gated) -> None:
    served = _Served(student=_Model(name="small", encoder=gated))
    with running(served, ServerSettings(most_bytes=300_000, waiting_bytes=300_000)) as live:
        answers: list[Answer] = []
        large = {"input": "a " * 80_000}
        first = in_background(live, answers, **large)
        eventually(lambda: gated.held == 1)
        refused = live.embed(**large)
        assert refused.status == 429
        assert refused.headers["retry-after"] == "1"
        small = in_background(live, answers, input="a small one")
        gated.gate.set()
        first.join()
        small.join()
        assert live.embed(**large).status == 200
        assert [answer.status for answer in answers] == [200, 200]


def test_a_body_of_unknown_length_is_cut_off(alone: _Served) -> None:
    with running(alone, ServerSettings(most_bytes=10_000, body_timeout=1.5)) as live:
        connection = raw(live.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%s\r\n" % (4096, b"a" * 4096)
        for _ in range(6):
            connection.sendall(chunk)
        answer = connection.recv(4096)
        assert b" 413 " in answer.split(b"\r\n")[0]
        connection.close()


def test_keys(alone: _Served) -> None:
    keys = ("first-key-123", "second-key-456")
    with running(alone, ServerSettings(keys=keys)) as live:
        body = {"input": "a"}
        for key, status in (*((key, 200) for key in keys), ("first-key-12", 401), ("", 401), ("wröng", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert live.post("/v1/embeddings", body, headers).status == status
        assert live.post("/v1/embeddings", body, {"Authorization": "Basic first-key-123"}).status == 401
        refused = live.post("/v1/embeddings", body)
        assert refused.status == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert (
            live.get("/metrics").status == live.get("/v1/models").status == live.get("/compare").status == 401
        )
        assert live.get("/health").status == live.get("/").status == 200


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key-123\n\nsecond-key-456\n")
    assert read_keys(file, "third-key-789, first-key-123") == (
        "first-key-123",
        "second-key-456",
        "third-key-789",
    )
    assert read_keys(None, None) == ()
    file.write_text("\n")
    for variable in (None, "third-key-789"):
        with pytest.raises(BadInput, match="one per line"):
            read_keys(file, variable)
    for empty in ("", " ", ",", "#"):
        with pytest.raises(BadInput, match="unset it to serve without keys"):
            read_keys(None, empty)
    with pytest.raises(BadInput, match="can't be read"):
        read_keys(tmp_path / "nothing", None)
    with pytest.raises(BadInput, match="8 or more ASCII characters"):
        ServerSettings(keys=("short",))
    with pytest.raises(BadInput, match="above 0"):
        ServerSettings(timeout=0)
    with pytest.raises(BadInput, match="let more texts wait"):
        ServerSettings(waiting=10, most_texts=20)


def test_other_origins_are_allowed_only_if_configured(alone: _Served, server: LiveServer) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in server.get("/health", origin).headers
    with running(alone, ServerSettings(cors=("https://example.org",))) as live:
        assert live.get("/health", origin).headers["access-control-allow-origin"] == "https://example.org"
        other = live.get("/health", {"Origin": "https://example.com"})
        assert "access-control-allow-origin" not in other.headers
    for wrong in ("example.org", "https://example.org/", "https://example.org/page", "null", ""):
        with pytest.raises(BadInput, match="https://"):
            ServerSettings(cors=(wrong,))


def test_browsers_can_use_keys(alone: _Served) -> None:
    key, origin = "a-key-of-a-page", "https://example.org"
    with running(alone, ServerSettings(keys=(key,), cors=(origin,))) as live:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        preflight = raw(live.port, b"OPTIONS /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\n")
        for name, value in {"Origin": origin, **asked}.items():
            preflight.sendall(f"{name}: {value}\r\n".encode())
        preflight.sendall(b"\r\n")
        head = b"".join(iter(lambda: preflight.recv(4096), b"")).lower()
        preflight.close()
        assert b" 200 " in head.split(b"\r\n")[0]
        assert f"access-control-allow-origin: {origin}".encode() in head
        assert b"access-control-allow-headers" in head
        for given, status in (({"Authorization": f"Bearer {key}"}, 200), ({}, 401)):
            answer = live.post("/v1/embeddings", {"input": "a"}, {"Origin": origin, **given})
            assert answer.status == status
            assert answer.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost", "127.0.0.1:80", "[::1]:8080", "10.0.0.7", "me.localhost:1")),
        *((host, 200) for host in ("compose-service:8080", "inner.example.org", "INNER.example.org:443")),
        *((host, 421) for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "a.b.c.d")),
    ],
)
def test_names_that_a_stranger_can_register_are_not_answered(
    named: LiveServer, host: str, status: int
) -> None:
    answer = named.get("/v1/models", {"Host": host})
    assert answer.status == status
    if status == 421:
        assert "--allow-host" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def named(alone: _Served) -> Iterator[LiveServer]:
    with running(alone, ServerSettings(hosts=("inner.example.org",))) as live:
        yield live


def test_any_name_is_answered_with_keys(alone: _Served) -> None:
    with running(alone, ServerSettings(keys=("a-key-123",))) as live:
        assert live.get("/health", {"Host": "public.example.org"}).status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"]
)
def test_bodies_that_pages_send_without_preflight(server: LiveServer, kind: str) -> None:
    answer = server.post("/v1/embeddings", {"input": "a"}, {"Content-Type": kind})
    assert answer.status == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert (
        server.post("/v1/embeddings", {"input": "a"}, {"Content-Type": "Application/JSON; a=b"}).status == 200
    )


def test_a_failing_model_is_reported_without_the_text(
    gated: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(rows: Any, *, together: bool) -> Any:
        raise RuntimeError("my secret text")

    monkeypatch.setattr(gated, "vectors_of", fail)
    with running(_Served(student=_Model(name="small", encoder=gated))) as live:
        answer = live.embed(input="my secret text")
        assert answer.status == 500
        assert "secret" not in answer.body.decode()
        assert live.get("/health").status == 200
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text


def start(folder: Path, *words: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "trundle", "serve", str(folder), "--port", "0", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split("/v1")[0].rsplit(":", 1)[1])


def test_shutdown_answers_open_requests_and_logs_no_text(student_folder: Path, student: Encoder) -> None:
    process, port = start(student_folder)
    live = LiveServer(port=port)
    eventually(lambda: _is_up(port))
    texts = [f"a secret text number {number} that takes its time" for number in range(2000)]
    answers: list[Answer] = []
    thread = in_background(live, answers, input=texts, encoding_format="base64")
    eventually(lambda: figure(live, "trundle_batch_texts_count") > 0)
    live.post("/v1/embeddings", b'{"input": ["secret')
    process.send_signal(signal.SIGTERM)
    thread.join()
    out, err = process.communicate(timeout=30)
    assert process.returncode in (0, -signal.SIGTERM)
    assert [answer.status for answer in answers] == [200]
    assert len(answers[0].json()["data"]) == len(texts)
    assert "secret" not in out + err
    assert "Traceback" not in err


def _is_up(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def test_serving_an_exported_folder_needs_no_torch(student_folder: Path) -> None:
    script = (
        "import sys\nfrom trundle.serve.settings import open_served\n"
        "from trundle.serve.routes import ServerSettings, _make_app\n"
        f"_make_app(open_served({str(student_folder)!r}), ServerSettings())\n"
        "assert not {'torch', 'transformers', 'sklearn'} & set(sys.modules), 'heavy imports'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_occupied_port(server: LiveServer) -> None:
    with pytest.raises(BadInput, match="choose another --port"):
        open_socket("127.0.0.1", server.port)


def test_vectors_under_load_are_those_of_the_runtime(server: LiveServer, student: Encoder) -> None:
    texts = [f"text {number} " + "word " * (number % 40) for number in range(120)]
    truth = student.encode(texts)
    found: dict[int, Any] = {}

    def ask(start: int) -> None:
        for place in range(start, len(texts), 8):
            found[place] = server.embed(input=texts[place]).json()["data"][0]["embedding"]

    threads = [threading.Thread(target=ask, args=(start,)) for start in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_allclose([found[place] for place in range(len(texts))], truth, atol=1e-5)
