"""An endpoint gets no text twice: trundle's own server behind a gate that limits, refuses and breaks off."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from fake_teacher import Teacher
from live_server import LiveServer, running
from trundle.errors import UserError, WriteFailed
from trundle.export.exporting import export_model
from trundle.runtime.encoder import Encoder
from trundle.serve.settings import ServerSettings, open_served
from trundle.teacher import endpoint
from trundle.teacher.endpoint import _asked_once, open_endpoint

KEY = "sk-very-secret-0123456789"
TEXTS = [f"text number {number}" for number in range(300)]


class Gate(ThreadingHTTPServer):
    """Does to each request what the script says, and then lets all through."""

    daemon_threads = True

    def __init__(self, behind: LiveServer) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = behind
        self.script: list[str] = []
        self.delivered: Counter[str] = Counter()
        self.keys: list[str] = []
        """What tells a server that a request is sent again."""
        self.url = f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: Gate

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        what = self.server.script.pop(0) if self.server.script else ""
        self.server.keys.append(self.headers["Idempotency-Key"])
        if what == "limit":
            return self.answer(429, b"{}", {"Retry-After": "0"})
        key = {"Authorization": self.headers.get("Authorization", "")}
        found = self.server.behind.post("/v1/embeddings", body, key)
        if what == "break":  # half of the answer, then nothing
            self.answer(found.status, found.body[: len(found.body) // 2], length=len(found.body))
            self.close_connection = True
            return None
        if what == "die":
            return self.answer(500, b"{}")
        if found.status == 200:
            self.server.delivered.update(json.loads(body)["input"])
        return self.answer(found.status, found.body)

    def answer(
        self, status: int, content: bytes, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def served(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    folder = tmp_path_factory.mktemp("served") / "model"
    export_model(str(pico_folders("bert", 1)), to="onnx", output=folder)
    return folder


@pytest.fixture
def gate(served: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.001)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    settings = ServerSettings(keys=(KEY,))
    with running(open_served(str(served), name="pico"), settings) as behind, Gate(behind) as front:
        thread = Thread(target=front.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield front
        front.shutdown()
        thread.join()


def test_nothing_is_paid_for_twice(gate: Gate, served: Path, tmp_path: Path) -> None:
    teacher, _ = open_endpoint(gate.url, "pico")
    gate.script = ["", "limit", "break", "", *["die"] * 7]
    with pytest.raises(UserError, match="failed 7 times") as failed:
        teacher.text(TEXTS)
    assert sum(gate.delivered.values()) == 128
    assert [gate.keys.index(key) for key in gate.keys] == [0, 1, 1, 1, *[4] * 7]
    again, _ = open_endpoint(gate.url, "pico")
    vectors = again.query(TEXTS)
    assert set(gate.delivered.values()) == {1}
    assert len(gate.delivered) == len(TEXTS)
    assert gate.keys[11] == gate.keys[4], "also when the command is run again"
    np.testing.assert_allclose(vectors, Encoder(served).encode(TEXTS), atol=1e-5)
    again.document(TEXTS[::-1])
    assert set(gate.delivered.values()) == {1}
    kept = b"".join(file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file())
    assert KEY.encode() not in kept
    assert KEY not in str(failed.value)


def test_a_wrong_key_is_not_shown(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-wrong-0123")
    with pytest.raises(UserError, match="denies access") as denied:
        open_endpoint(gate.url, "pico")[0].text(["a"])
    assert "sk-wrong" not in str(denied.value)


def test_no_more_texts_are_sent_than_allowed() -> None:
    fake = Teacher()
    limited = _asked_once(fake.embedder, "most", most=3)
    limited.text(["a", "b", "a"])
    limited.query(["b", "a"])
    assert fake.asked == 2
    with pytest.raises(UserError, match="--teacher-calls"):
        limited.text(["c", "d"])
    assert fake.asked == 2
    limited.text(["c"])
    assert fake.asked == 3


def test_a_full_disk_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getattr__(self, _name: str) -> Any:
            raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(endpoint._Answers, "_open", lambda _: Full())
    with pytest.raises(WriteFailed, match="disk is full"):
        _asked_once(Teacher().embedder, "full").text(["a"])
