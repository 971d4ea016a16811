"""A real server on a real socket, in a thread of this process, with pico models."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from trundle.runtime.encoder import Encoder
from trundle.serve.routes import _server_config, open_socket
from trundle.serve.settings import ServerSettings, _Served


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True, kw_only=True)
class LiveServer:
    """A running server."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        return self._send(urllib.request.Request(self.url + path, headers=dict(headers or {})))

    def post(self, path: str, content: Any, headers: Mapping[str, str] | None = None) -> Answer:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        given = {"Content-Type": "application/json"} | dict(headers or {})
        return self._send(urllib.request.Request(self.url + path, data=body, headers=given))

    def embed(self, **content: Any) -> Answer:
        return self.post("/v1/embeddings", content)

    @staticmethod
    def _send(request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=30) as found:
                return Answer(status=found.status, headers=dict(found.headers), body=found.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(status=error.code, headers=dict(error.headers), body=error.read())


@contextmanager
def running(served: _Served, settings: ServerSettings | None = None) -> Iterator[LiveServer]:
    """The server's own app under uvicorn until the block ends."""
    listening = open_socket("127.0.0.1", 0)
    server = uvicorn.Server(_server_config(served, settings or ServerSettings()))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield LiveServer(port=listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


class Gated(Encoder):
    """The real encoder, blocked until the test releases it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, threads=2)
        self.gate = threading.Event()
        self.held = 0
        self.ran: list[int] = []
        self.lengths: list[set[int]] = []

    def vectors_of(self, rows: Any, *, together: bool = True) -> Any:
        self.held += 1
        assert self.gate.wait(30)
        self.ran.append(len(rows))
        self.lengths.append({len(row) for row in rows})
        return super().vectors_of(rows, together=together)


def raw(port: int, content: bytes) -> socket.socket:
    """A client that speaks HTTP by hand."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(content)
    return connection


def eventually(true: Callable[[], bool]) -> None:
    """Wait for something that must come; fail if it does not."""
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
