"""The routes: vectors, models, health, figures, and the page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from trundle.embedder import check_texts
from trundle.errors import UserError
from trundle.records import versions
from trundle.serve.batching import _Batcher, _Busy, _Closed, _Encoded
from trundle.serve.corpora import _Corpora
from trundle.serve.guard import _CONTENT_TYPE, _Guard, _Metrics, _ShortWay
from trundle.serve.models import _Model, _Served
from trundle.serve.playground import _add_page
from trundle.serve.settings import Settings
from trundle.serve.wire import (
    _HUNG_UP,
    _JSON,
    _OUTPUTS,
    EmbeddingsAnswer,
    EmbeddingsRequest,
    ErrorAnswer,
    Refused,
    _hung_up,
    _parse_embeddings,
    _read_body,
    _write_embeddings,
)

_LARGE = 1 << 16
"""Bodies and answers of more bytes than this are parsed and written in a thread."""
_WATCHED_AFTER = 0.2
"""Seconds from which on it is asked whether a waiting client is still there."""
_EMBEDDINGS = "/v1/embeddings"
_ROUTES = frozenset((_EMBEDDINGS, "/v1/models", "/health", "/metrics", "/"))
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The body can't be used."},
    401: {"model": ErrorAnswer, "description": "The API key is missing or wrong."},
    404: {"model": ErrorAnswer, "description": "There is no such model."},
    408: {"model": ErrorAnswer, "description": "The body came too slowly."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    429: {"model": ErrorAnswer, "description": "All places are taken; see Retry-After."},
    503: {"model": ErrorAnswer, "description": "The server is going down."},
    504: {"model": ErrorAnswer, "description": "The request took too long."},
}


@dataclass(frozen=True, kw_only=True)
class _Desk:
    """What the routes share: models, their batchers, limits and figures."""

    served: _Served
    settings: Settings
    metrics: _Metrics
    batchers: dict[str, _Batcher]

    def open(self) -> None:
        """Start a batcher per model, inside the running event loop."""
        for model in self.served.models:
            batcher = _Batcher(
                model.encoder,
                waiting=self.settings.waiting,
                most_tokens=self.settings.most_tokens,
                watch=self.metrics.watch_batches(model.name),
            )
            self.batchers[model.name] = batcher
            self.metrics.watch_waiting(model.name, batcher)

    async def close(self) -> None:
        """Answer what was taken."""
        for batcher in self.batchers.values():
            await batcher.close()


def _make_app(served: _Served, settings: Settings | None = None) -> FastAPI:
    """The whole server as an ASGI app."""
    settings = settings or Settings()
    desk = _Desk(served=served, settings=settings, metrics=_Metrics(), batchers={})
    corpora = _Corpora(served, desk.batchers)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        desk.open()
        yield
        await corpora.close()
        await desk.close()

    app = FastAPI(
        title="trundle",
        version=versions(("trundle",)).get("trundle", "0"),
        description="Text embeddings by a small model in a large one's vector space.",
        docs_url=None,  # those pages come from a CDN
        redoc_url=None,
        lifespan=lifespan,
    )
    _add_embeddings(app, desk)
    app.add_exception_handler(Refused, _refusal)
    app.add_exception_handler(HTTPException, _http_refusal)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(_Guard, keys=settings.keys, metrics=desk.metrics, routes=_ROUTES)
    _add_looks(app, desk)
    if settings.page:
        _add_page(app, served, corpora, settings)
    return app


def _add_embeddings(app: FastAPI, desk: _Desk) -> None:
    body = {"content": {_JSON: {"schema": EmbeddingsRequest.model_json_schema()}}, "required": True}

    @app.post(
        _EMBEDDINGS,
        responses={200: {"model": EmbeddingsAnswer}, **_REFUSALS},
        openapi_extra={"requestBody": body},
        summary="Vectors of one or more texts",
    )
    async def embeddings(request: Request) -> Response:
        return await _answer_embeddings(desk, request)

    async def short_way(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await _answer_embeddings(desk, Request(scope, receive))
        except Refused as refusal:
            response = refusal.answer()
        await response(scope, receive, send)

    app.add_middleware(_ShortWay, path=_EMBEDDINGS, handler=short_way)


async def _answer_embeddings(desk: _Desk, request: Request) -> Response:
    """One request for vectors, from its body to its answer."""
    settings = desk.settings
    raw = await _read_body(request, most_bytes=settings.most_bytes, seconds=settings.body_timeout)
    asked = await asyncio.to_thread(_parse_embeddings, raw) if len(raw) > _LARGE else _parse_embeddings(raw)
    model = _answering(desk.served, asked)
    texts = [asked.input] if isinstance(asked.input, str) else asked.input
    if len(texts) > settings.most_texts:
        few = f"{len(texts)} texts are too many for one request; send {settings.most_texts} or fewer"
        raise Refused(400, few, param="input")
    _check(model, asked, texts)
    prompt = model.encoder.prompt_for(asked.input_type)
    prompted = [prompt + text for text in texts] if prompt else texts
    encoded = await _encoded(request, desk.batchers[model.name], prompted, settings.timeout)
    desk.metrics.texts.labels(model.name, asked.input_type or "text").inc(len(texts))
    desk.metrics.tokens.labels(model.name).inc(encoded.tokens)
    if len(texts) * model.encoder.dimensions * 8 > _LARGE:
        return Response(await asyncio.to_thread(_written, model, asked, encoded), media_type=_JSON)
    return Response(_written(model, asked, encoded), media_type=_JSON)


def _answering(served: _Served, asked: EmbeddingsRequest) -> _Model:
    model = served.answering(asked.model, asked.input_type)
    if model is None:
        known = ", ".join(each.name for each in served.models)
        raise Refused(
            404,
            f"there is no such model here; ask for one of: {known}",
            code="model_not_found",
            param="model",
        )
    return model


def _check(model: _Model, asked: EmbeddingsRequest, texts: list[str]) -> None:
    """Refuse what the model can't do before it takes a place in the queue."""
    width = model.encoder.dimensions
    if asked.dimensions is not None and asked.dimensions > width:
        many = f"{asked.dimensions} dimensions can't be had of {width}; give 1 to {width}"
        raise Refused(400, many, param="dimensions")
    try:
        check_texts(texts)
    except UserError as error:
        raise Refused(400, str(error), param="input") from error


async def _encoded(request: Request, batcher: _Batcher, texts: list[str], timeout: float) -> _Encoded:
    """Wait for the vectors, for the client to hang up, or for the time to be over, whatever is first.

    Whether the client is still there is asked only when it has waited for a while: the question costs as much as
    the rest of a request's way.
    """
    try:
        job = batcher.submit(texts)
    except _Busy as busy:
        headers = {"Retry-After": str(busy.seconds)}
        raise Refused(429, str(busy), code="too_many_requests", headers=headers) from busy
    except _Closed as closed:
        raise Refused(503, "the server is going down; ask another one", code="closing") from closed
    loop = asyncio.get_running_loop()
    watches: list[asyncio.Task[None]] = []

    def give_up(refusal: Refused) -> None:
        if not job.answer.done():
            batcher.drop(job)
            job.answer.set_exception(refusal)

    async def watch() -> None:
        await _hung_up(request)
        give_up(Refused(_HUNG_UP, "the client hung up"))

    late = f"the vectors were not ready after {timeout:g} s; send fewer texts, or try again later"
    timers = (
        loop.call_later(timeout, lambda: give_up(Refused(504, late, code="timeout"))),
        loop.call_later(_WATCHED_AFTER, lambda: watches.append(loop.create_task(watch()))),
    )
    try:
        return await job.answer
    except UserError as error:
        raise Refused(400, str(error), param="input") from error
    except asyncio.CancelledError:
        batcher.drop(job)
        raise
    finally:
        for timer in timers:
            timer.cancel()
        for task in watches:
            task.cancel()


def _written(model: _Model, asked: EmbeddingsRequest, encoded: _Encoded) -> bytes:
    vectors = model.encoder.finished(
        encoded.vectors, dimensions=asked.dimensions, output=_OUTPUTS[asked.output_dtype]
    )
    in_base64 = asked.encoding_format == "base64"
    return _write_embeddings(vectors, model=model.name, tokens=encoded.tokens, in_base64=in_base64)


def _add_looks(app: FastAPI, desk: _Desk) -> None:
    @app.get("/v1/models", summary="The models that are served", responses={401: _REFUSALS[401]})
    async def models() -> dict[str, Any]:
        found = [
            {"id": model.name, "object": "model", "created": 0, "owned_by": "trundle"}
            for model in desk.served.models
        ]
        return {"object": "list", "data": found}

    @app.get("/health", summary="Whether the server is up, and who answers", responses={503: _REFUSALS[503]})
    async def health() -> dict[str, Any]:
        if not all(batcher.works for batcher in desk.batchers.values()):
            raise Refused(503, "a worker has stopped; start the server again", code="stopped")
        return {"status": "ok", "models": [model.name for model in desk.served.models]}

    plain: dict[int | str, dict[str, Any]] = {
        200: {"content": {_CONTENT_TYPE: {"schema": {"type": "string"}}}}
    }

    @app.get(
        "/metrics",
        summary="Figures for Prometheus",
        response_class=Response,
        responses={**plain, 401: _REFUSALS[401]},
    )
    async def metrics() -> Response:
        return Response(desk.metrics.text(), media_type=_CONTENT_TYPE)


async def _refusal(_request: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refused)
    return refusal.answer()


async def _http_refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = {404: "there is nothing at this address", 405: "this address takes another method"}
    message = f"{said.get(error.status_code, error.detail)}; see /openapi.json"
    return Refused(error.status_code, message, headers=error.headers).answer()
