"""The server: the routes for vectors, models, health and metrics, and the process around them."""

from __future__ import annotations

import asyncio
import base64
import gc
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from trundle.embedder import check_texts
from trundle.errors import BadInput, UserError
from trundle.records import versions
from trundle.runtime.encoder import Output
from trundle.serve import wire
from trundle.serve.batching import _Batcher, _Pending
from trundle.serve.guard import _CONTENT_TYPE, KEEP_ALIVE_SECONDS, _Guard, _limited_protocol, _Metrics
from trundle.serve.playground import _add_page, _Playground
from trundle.serve.settings import ServerSettings, _Model, _Served, uvicorn
from trundle.serve.wire import _JSON, EmbeddingsRequest, _RequestError

_WATCHED_AFTER = 0.2
"""Seconds until the check for a disconnect, which costs as much as the rest of a short request."""
_SWITCH_SECONDS = 0.001
"""Seconds after which a busy worker yields to the event loop."""
_SHUTDOWN_SECONDS = 5.0
"""Time for open answers at shutdown, in addition to a request's own timeout."""
_WRITTEN_VALUES = 4096
"""Numbers of an answer that are written at once."""
_OUTPUTS: dict[str, Output] = {"float": "float32", "int8": "int8", "binary": "binary"}
_EMBEDDINGS = "/v1/embeddings"
_ROUTES = dict.fromkeys((_EMBEDDINGS, "/v1/models", "/health", "/metrics", "/"))
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": wire.ErrorAnswer, "description": description}
    for status, description in (
        (400, "The body is invalid."),
        (401, "The API key is missing or wrong."),
        (404, "There is no such model."),
        (408, "The body came too slowly."),
        (413, "The body is too large."),
        (415, "The body is not sent as application/json."),
        (421, "Without API keys, the server does not answer to this host name."),
        (429, "The queue is full; see Retry-After."),
        (503, "The server is shutting down."),
        (504, "The request took too long."),
    )
}


def open_socket(host: str, port: int) -> socket.socket:
    """Binds the address to listen on; call it before the models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or error
        problem = f"can't listen on {host}:{port} ({reason})"
        raise BadInput(f"{problem}; choose another --port or --host") from error
    return listening


def run_server(served: _Served, settings: ServerSettings, listening: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM, then answers the open requests."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A thread inherits the priority of the one that starts it. So workers tokenise without further threads,
    # and those in which OpenVINO computes are started here, not by a worker of low priority.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    for model in served.models:
        model.encoder.vectors_of([], together=False)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    server = uvicorn.Server(_server_config(served, settings))
    gc.collect()
    gc.freeze()  # the collector stops all threads; without what was loaded so far it stops them briefly
    server.run(sockets=[listening])


def _server_config(served: _Served, settings: ServerSettings) -> uvicorn.Config:
    return uvicorn.Config(
        _make_app(served, settings),
        http=_limited_protocol(settings),
        ws="none",
        access_log=False,
        log_level="error",  # a warning per invalid request would let strangers fill the log
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(settings.timeout + _SHUTDOWN_SECONDS),
    )


@dataclass(frozen=True, kw_only=True)
class _ServerState:
    """What the routes share: models, their batchers, limits and metrics."""

    served: _Served
    settings: ServerSettings
    metrics: _Metrics = field(default_factory=_Metrics)
    batchers: dict[str, _Batcher] = field(default_factory=dict)


def _make_app(served: _Served, settings: ServerSettings) -> FastAPI:
    state = _ServerState(served=served, settings=settings)
    playground = _Playground(served, state.batchers)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        for model in served.models:
            batcher = _Batcher(model.encoder, settings, state.metrics.watch_batches(model.name))
            state.batchers[model.name] = batcher
            state.metrics.watch_waiting(model.name, batcher)
        yield
        await playground.close()
        for batcher in state.batchers.values():
            await batcher.close()

    app = FastAPI(
        title="trundle",
        version=versions(("trundle",)).get("trundle", "0"),
        description="Text embeddings by a small model in a large one's vector space.",
        docs_url=None,  # those pages load their code from a CDN
        redoc_url=None,
        lifespan=lifespan,
    )
    fast = _add_embeddings(app, state)
    for kind in (_RequestError, UserError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    routes = {**_ROUTES, _EMBEDDINGS: fast}
    app.add_middleware(_Guard, settings=settings, metrics=state.metrics, routes=routes)
    if settings.cors:  # outermost: browsers send a preflight without the key
        cors, star, shown = settings.cors, ["*"], ["Retry-After"]
        app.add_middleware(
            CORSMiddleware, allow_origins=cors, allow_methods=star, allow_headers=star, expose_headers=shown
        )
    _add_status_routes(app, state)
    if settings.page:
        _add_page(app, served, playground, settings)
    return app


async def _answer_error(_request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        reasons = {404: "there is nothing at this address", 405: "this address takes another method"}
        message = f"{reasons.get(error.status_code, error.detail)}; see /openapi.json"
        return _RequestError(error.status_code, message, headers=error.headers).answer()
    return (error if isinstance(error, _RequestError) else _RequestError(400, str(error))).answer()


def _add_embeddings(app: FastAPI, state: _ServerState) -> ASGIApp:
    body = {"content": {_JSON: {"schema": EmbeddingsRequest.model_json_schema()}}, "required": True}

    @app.post(
        _EMBEDDINGS,
        responses={200: {"model": wire.EmbeddingsAnswer}, **_ERRORS},
        openapi_extra={"requestBody": body},
        summary="Vectors of one or more texts",
    )
    async def embeddings(request: Request) -> Response:
        return await _answer_embeddings(state, request)

    async def fast(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await _answer_embeddings(state, Request(scope, receive))
        except _RequestError as error:
            response = error.answer()
        await response(scope, receive, send)

    return fast


async def _answer_embeddings(state: _ServerState, request: Request) -> Response:
    settings = state.settings
    asked = await wire._parse_body(request, EmbeddingsRequest, settings)
    model = state.served.answering(asked.model, asked.input_type)
    if model is None:
        known = ", ".join(each.name for each in state.served.models)
        missing = f"there is no such model here; use one of: {known}"
        raise _RequestError(404, missing, code="model_not_found", param="model")
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    if len(texts) > settings.most_texts:
        few = f"{len(texts)} texts are too many for one request; send {settings.most_texts} or fewer"
        raise _RequestError(400, few, param="input")
    if any(len(text) > settings.most_characters for text in texts):
        long = f"a text has more than {settings.most_characters:,} characters; shorten it, or split it"
        raise _RequestError(400, long, param="input")
    width = model.encoder.dimensions
    if asked.dimensions is not None and asked.dimensions > width:
        many = f"the model has {width} dimensions, not {asked.dimensions}; pass 1 to {width}"
        raise _RequestError(400, many, param="dimensions")
    prompt = model.encoder.prompt_for(asked.input_type)
    try:
        check_texts(texts)
        prompted = [prompt + text for text in texts] if prompt else texts
        batcher, write = state.batchers[model.name], partial(_written, model, asked)
        encoded = await _encoded(request, batcher, batcher.submit(prompted, write), settings.timeout)
    except UserError as error:
        raise _RequestError(400, str(error), param="input") from error
    state.metrics.texts.labels(model.name, asked.input_type or "text").inc(len(texts))
    state.metrics.tokens.labels(model.name).inc(encoded.tokens)
    return Response(b"".join(encoded.body or write(encoded)), media_type=_JSON)


async def _encoded(request: Request, batcher: _Batcher, pending: _Pending, timeout: float) -> _Pending:
    """Waits for the vectors, the client's disconnect, or the timeout, whichever comes first."""
    loop = asyncio.get_running_loop()
    watches: list[asyncio.Task[None]] = []

    def give_up(error: _RequestError) -> None:
        if not pending.answer.done():
            batcher.drop(pending)
            pending.answer.set_exception(error)

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        give_up(_RequestError(wire._DISCONNECTED, "the client disconnected"))

    late = f"the vectors were not ready after {timeout:g} s; send fewer texts, or try again later"
    timers = (
        loop.call_later(timeout, lambda: give_up(_RequestError(504, late, code="timeout"))),
        loop.call_later(_WATCHED_AFTER, lambda: watches.append(loop.create_task(watch()))),
    )
    try:
        return await batcher.finished(pending)
    finally:
        for timer in timers:
            timer.cancel()
        for task in watches:
            task.cancel()


def _written(model: _Model, asked: EmbeddingsRequest, encoded: _Pending) -> Iterator[bytes]:
    """Yields the body of an answer in short parts: other threads can't run while one is written."""
    output, step = _OUTPUTS[asked.output_dtype], max(1, _WRITTEN_VALUES // model.encoder.dimensions)
    before = b'{"object":"list","data":['
    for start in range(0, len(encoded.vectors), step):
        own = encoded.vectors[start : start + step]
        vectors = model.encoder.finished(own, dimensions=asked.dimensions, output=output)
        in_base64 = asked.encoding_format == "base64"
        rows = [base64.b64encode(row).decode() for row in vectors] if in_base64 else vectors.tolist()
        places = enumerate(rows, start)
        data = [{"object": "embedding", "index": place, "embedding": row} for place, row in places]
        yield before + to_json(data)[1:-1]
        before = b","
    usage = {"prompt_tokens": encoded.tokens, "total_tokens": encoded.tokens}
    yield b"]," + to_json({"model": model.name, "usage": usage})[1:]


def _add_status_routes(app: FastAPI, state: _ServerState) -> None:
    names = [model.name for model in state.served.models]

    @app.get("/v1/models", summary="The models that are served", responses={401: _ERRORS[401]})
    async def models() -> dict[str, Any]:
        found = [{"id": name, "object": "model", "created": 0, "owned_by": "trundle"} for name in names]
        return {"object": "list", "data": found}

    @app.get("/health", summary="Whether the server is up, and its models", responses={503: _ERRORS[503]})
    async def health() -> dict[str, Any]:
        if not all(batcher.works for batcher in state.batchers.values()):
            raise _RequestError(503, "a worker has stopped; restart the server", code="stopped")
        return {"status": "ok", "models": names}

    text = {"content": {_CONTENT_TYPE: {"schema": {"type": "string"}}}}
    found: dict[int | str, dict[str, Any]] = {200: text, 401: _ERRORS[401]}

    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response, responses=found)
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=_CONTENT_TYPE)
