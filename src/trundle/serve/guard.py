"""What stands before every route: API keys, counting, and an answer of ours for whatever fails.

A failure is logged by its kind and place alone: messages may hold somebody's text.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable, Sequence
from traceback import extract_tb

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trundle.serve.batching import _Batcher
from trundle.serve.wire import Refused

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TEXTS = (1, 2, 4, 8, 16, 32, 64, 128)
_CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class _Metrics:
    """What a server counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "trundle_requests", "Answers by route and status.", ("route", "status"), registry=self._registry
        )
        self.seconds = Histogram(
            "trundle_request_seconds",
            "From the request's head to the answer's end.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.texts = Counter(
            "trundle_texts", "Texts embedded, by model and role.", ("model", "role"), registry=self._registry
        )
        self.tokens = Counter("trundle_tokens", "Tokens read, by model.", ("model",), registry=self._registry)
        self._batch_texts = Histogram(
            "trundle_batch_texts", "Texts run together.", ("model",), buckets=_TEXTS, registry=self._registry
        )
        self._batch_seconds = Histogram(
            "trundle_batch_seconds",
            "Time to tokenise and run a batch.",
            ("model",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._waiting = Gauge(
            "trundle_waiting_texts", "Texts waiting for a worker.", ("model",), registry=self._registry
        )

    def watch_batches(self, model: str) -> Callable[[int, float], None]:
        """What a model's batcher tells of each batch."""
        texts, seconds = self._batch_texts.labels(model), self._batch_seconds.labels(model)

        def watch(count: int, took: float) -> None:
            texts.observe(count)
            seconds.observe(took)

        return watch

    def watch_waiting(self, model: str, batcher: _Batcher) -> None:
        """Look at how many texts wait whenever somebody asks."""
        self._waiting.labels(model).set_function(lambda: batcher.waiting)

    def text(self) -> bytes:
        """All of it as Prometheus reads it."""
        return generate_latest(self._registry)


_LOG = logging.getLogger("trundle.serve")
_OPEN = frozenset(("/", "/health"))
"""Routes that need no key: the bare page, and the question whether anybody is there."""
_SERVER_FAILED = 500


class _Guard:
    """Middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], metrics: _Metrics, routes: frozenset[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it may pass, and count what became of it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        route = path if path in self._routes else "other"
        started = time.perf_counter()
        status = 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if self._keys and path not in _OPEN and not self._has_key(scope):
                unknown = "give a valid API key as a bearer token in the Authorization header"
                refusal = Refused(
                    401, unknown, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await refusal.answer()(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            _LOG.error("%s in %s, line %s", type(error).__name__, place.filename, place.lineno)
            if not status:
                failed = Refused(_SERVER_FAILED, "the server failed on this request; its log says where")
                await failed.answer()(scope, receive, counted)
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _has_key(self, scope: Scope) -> bool:
        """Whether the request carries a key; every key is compared, each in constant time."""
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, key = given.partition(b" ")
        same = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return kind.lower() == b"bearer" and any(same)


class _ShortWay:
    """Middleware that takes the one busy route past the framework's own work, which costs as much as a short text."""

    def __init__(self, app: ASGIApp, *, path: str, handler: ASGIApp) -> None:
        self._app = app
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the busy route here, and pass everything else on."""
        busy = scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST"
        await (self._handler if busy else self._app)(scope, receive, send)
