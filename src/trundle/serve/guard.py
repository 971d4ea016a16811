"""What every request passes: limits on connections, then host names, API keys, memory, metrics and errors.

The limits on connections apply to bytes that reach no route, or that no route waits for; the routes limit
bodies. A failure is logged only by its kind and place, because messages may contain a client's text.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from traceback import extract_tb
from typing import ClassVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from trundle.serve.batching import _Batcher, _Busy
from trundle.serve.settings import ServerSettings
from trundle.serve.wire import _LARGE, _RequestError

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
_LOG = logging.getLogger("trundle.serve")
_OPEN = ("/", "/health")
"""Routes that need no key: the page without its data, and the health check."""
KEEP_ALIVE_SECONDS = 30
_MOST_HEADER_BYTES = 1 << 16


class _Metrics:
    def __init__(self) -> None:
        self._all = CollectorRegistry()
        counter, histogram = partial(Counter, registry=self._all), partial(Histogram, registry=self._all)
        self.requests = counter("trundle_requests", "Answers by route and status.", ("route", "status"))
        about = "From the first byte of the request to the last byte of the answer."
        self.seconds = histogram("trundle_request_seconds", about, ("route",), buckets=_SECONDS)
        self.texts = counter("trundle_texts", "Texts embedded, by model and role.", ("model", "role"))
        self.tokens = counter("trundle_tokens", "Tokens encoded, by model.", ("model",))
        self._batch_texts = histogram("trundle_batch_texts", "Texts per batch.", ("model",), buckets=_TEXTS)
        about = "Time to tokenise and run a batch."
        self._batch_seconds = histogram("trundle_batch_seconds", about, ("model",), buckets=_SECONDS)
        about = "Texts waiting for a worker."
        self._waiting = Gauge("trundle_waiting_texts", about, ("model",), registry=self._all)

    def watch_batches(self, model: str) -> Callable[[int, float], None]:
        """Returns the function that a model's batcher calls after each batch."""
        texts, seconds = self._batch_texts.labels(model), self._batch_seconds.labels(model)

        def watch(count: int, took: float) -> None:
            texts.observe(count)
            seconds.observe(took)

        return watch

    def watch_waiting(self, model: str, batcher: _Batcher) -> None:
        self._waiting.labels(model).set_function(lambda: batcher.waiting)

    def text(self) -> bytes:
        return generate_latest(self._all)


class _Guard:
    """Middleware around the app: checks the host name and the API key, counts, and answers failures."""

    def __init__(
        self, app: ASGIApp, *, settings: ServerSettings, metrics: _Metrics, routes: dict[str, ASGIApp | None]
    ) -> None:
        """A handler in `routes` answers POST without FastAPI, which costs as much time as a short text."""
        self._app, self._metrics, self._routes, self._settings = app, metrics, routes, settings
        self._held = 0  # bytes of large bodies and answers
        self._keys = [key.encode() for key in settings.keys]
        self._hosts = {host.lower() for host in settings.hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, started, status = scope["path"], time.perf_counter(), 0
        route = path if path in self._routes else "other"
        received = held = 0

        def hold(size: int) -> None:
            nonlocal held
            if size > _LARGE:  # small requests are never refused; the limit on connections bounds them
                self._held += size - held
                held = size

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received = min(received + len(message.get("body", b"")), self._settings.most_bytes)
            hold(received)
            if held and self._held > self._settings.waiting_bytes:
                raise _Busy(1)
            return message

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            body = message.get("body", b"")
            hold(received + len(body))
            # In parts: each one waits until the client has taken those before.
            for start in range(0, max(1, len(body)), _LARGE):
                part = {"body": body[start : start + _LARGE], "more_body": start + _LARGE < len(body)}
                await send({**message, **part} if len(body) > _LARGE else message)

        try:
            fast = self._routes.get(path) if scope["method"] == "POST" else None
            refusal = self._refusal(scope)
            await (refusal.answer() if refusal else fast or self._app)(scope, limited, counted)
        except Exception as failure:
            place = extract_tb(failure.__traceback__)[-1]
            _LOG.error("%s in %s, line %s", type(failure).__name__, place.filename, place.lineno)
            if not status:
                failed = _RequestError(500, "the server failed on this request; its log says where")
                await failed.answer()(scope, receive, counted)
        finally:
            self._held -= held
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> _RequestError | None:
        if self._keys:
            if scope["path"] in _OPEN or self._has_key(scope):
                return None
            unknown = "pass a valid API key as a bearer token in the Authorization header"
            return _RequestError(401, unknown, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        # A web page can point its own name at this address, and may then call the server like its own.
        given = (value.decode("latin-1") for name, value in scope["headers"] if name == b"host")
        if all(_is_private_name(host) or host in self._hosts for host in map(_without_port, given)):
            return None
        wrong = "this server does not answer to that host name; pass it as --allow-host, or use API keys"
        return _RequestError(421, wrong, code="wrong_host")

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request has a valid key; every key is compared, each in constant time."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        same = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(same)


def _without_port(host: str) -> str:
    name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    return name.strip("[]").rstrip(".").lower()


def _is_private_name(host: str) -> bool:
    """Whether nobody can register the name: an address, a name without a dot, or below localhost."""
    try:
        ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(".localhost")
    return True


def _limited_protocol(settings: ServerSettings) -> type[HttpToolsProtocol]:
    return type("_Connection", (_LimitedConnection,), {"settings": settings, "idle": {}})


class _LimitedConnection(HttpToolsProtocol):
    settings: ClassVar[ServerSettings]
    idle: ClassVar[dict[_LimitedConnection, None]]
    """The connections without a request, the one that has waited longest first."""
    _headers = 0
    """Bytes of the URL and headers of this request."""
    _unparsed = 0
    """Bytes since the parser last found a complete part of a request."""
    _running: RequestResponseCycle | None = None
    """The request being answered; `cycle` is the last one received, which may wait for this one."""
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
        if self._running is not None:  # uvicorn tells only the last request that its client has left
            self._running.disconnected = True
            self._running.message_event.set()
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
        if not self.pipeline:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._running is None and not self.transport.is_closing():
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
            raise OverflowError  # the parser stops and reports an invalid request

    def _reject_headers(self) -> None:
        large = f"the headers have more than {_MOST_HEADER_BYTES:,} bytes; send fewer"
        answer = _RequestError(431, large, headers={"Connection": "close"}).answer()
        head = b"".join(name + b": " + value + b"\r\n" for name, value in answer.raw_headers)
        self.transport.write(STATUS_LINE[431] + head + b"\r\n" + answer.body)
        self.transport.close()

    def _expect_request(self, seconds: float) -> None:
        self._stop_expecting()
        self.idle[self] = None
        self._expecting = self.loop.call_later(seconds, self.transport.abort)

    def _stop_expecting(self) -> None:
        self.idle.pop(self, None)
        if self._expecting is not None:
            self._expecting.cancel()

    def _stop_writing(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
