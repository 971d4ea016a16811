"""Limits on connections: their number, the size of headers, and the time to send them or to take an answer.

The routes limit bodies. These limits apply to bytes that reach no route, or that no route waits for.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from trundle.serve.settings import ServerSettings
from trundle.serve.wire import _RequestError

KEEP_ALIVE_SECONDS = 30
_MOST_HEADER_BYTES = 1 << 16


class _HeadersTooLargeError(Exception):
    """The URL and headers of a request have too many bytes."""


def limited_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    """Returns the class that uvicorn makes for each connection of one server."""
    return type("_Connection", (_LimitedConnection,), {"settings": settings, "idle": {}})


class _LimitedConnection(HttpToolsProtocol):
    settings: ClassVar[ServerSettings]
    idle: ClassVar[dict[_LimitedConnection, None]]
    """The connections without a request, the one that has waited longest first."""
    _headers = 0
    """Bytes of the URL and headers of this request."""
    _unparsed = 0
    """Bytes since the parser last found a complete part of a request."""
    _expecting: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.settings.most_connections:
            oldest = next(iter(self.idle), self)
            self.idle.pop(oldest, None)
            oldest.transport.abort()
        if not transport.is_closing():
            self._expect_request(self.settings.body_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_expecting()
        self._stop_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > _MOST_HEADER_BYTES and not self.transport.is_closing():
            self._reject_headers()

    def on_message_begin(self) -> None:
        self._headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:  # also for trailers, which come after the body
        self._count_header(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_expecting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._expect_request(KEEP_ALIVE_SECONDS + self.settings.body_timeout)

    def send_400_response(self, msg: str) -> None:
        if self._headers > _MOST_HEADER_BYTES:
            self._reject_headers()
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Closing waits until the client takes what is left; a client that does not read never would.
        self._writing = self.loop.call_later(self.settings.body_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_writing()
        super().resume_writing()

    def _count_header(self, size: int) -> None:
        self._unparsed = 0
        self._headers += size
        if self._headers > _MOST_HEADER_BYTES:
            raise _HeadersTooLargeError  # the parser stops and reports an invalid request

    def _reject_headers(self) -> None:
        large = f"the headers have more than {_MOST_HEADER_BYTES:,} bytes; send fewer"
        answer = _RequestError(431, large, headers={"Connection": "close"}).answer()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(STATUS_LINE[431] + head + b"\r\n" + answer.body)
        self.transport.close()

    def _expect_request(self, seconds: float) -> None:
        self._stop_expecting()
        self.idle[self] = None
        self._expecting = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:  # otherwise a pipelined request is running
            self.transport.abort()

    def _stop_expecting(self) -> None:
        self.idle.pop(self, None)
        if self._expecting is not None:
            self._expecting.cancel()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
