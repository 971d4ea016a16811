"""What stands before every route: API keys, counting, and an answer of ours for whatever fails.

A failure is logged by its kind and place alone: messages may hold somebody's text.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from traceback import extract_tb

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trundle.serve.metrics import Metrics
from trundle.serve.wire import Refused

LOG = logging.getLogger("trundle.serve")
OPEN = frozenset(("/", "/health"))
"""Routes that need no key: the bare page, and the question whether anybody is there."""
SERVER_FAILED = 500


class Guard:
    """Middleware around the whole app."""

    def __init__(
        self, app: ASGIApp, *, keys: Sequence[str], metrics: Metrics, routes: frozenset[str]
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
            if self._keys and path not in OPEN and not self._has_key(scope):
                unknown = "give a valid API key as a bearer token in the Authorization header"
                refusal = Refused(
                    401, unknown, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await refusal.answer()(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except Exception as error:
            place = extract_tb(error.__traceback__)[-1]
            LOG.error("%s in %s, line %s", type(error).__name__, place.filename, place.lineno)
            if not status:
                failed = Refused(SERVER_FAILED, "the server failed on this request; its log says where")
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


class ShortWay:
    """Middleware that takes the one busy route past the framework's own work, which costs as much as a short text."""

    def __init__(self, app: ASGIApp, *, path: str, handler: ASGIApp) -> None:
        self._app = app
        self._path = path
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the busy route here, and pass everything else on."""
        busy = scope["type"] == "http" and scope["path"] == self._path and scope["method"] == "POST"
        await (self._handler if busy else self._app)(scope, receive, send)
