"""The page at /, and the few routes it asks."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from trundle.embedder import check_texts
from trundle.errors import UserError
from trundle.serve.batching import _Busy, _Closed
from trundle.serve.corpora import _Corpora, _Corpus, _split_passages
from trundle.serve.models import _Served
from trundle.serve.settings import Settings
from trundle.serve.wire import _JSON, Refused, _read_body, _refused

_T = TypeVar("_T", bound=BaseModel)

_LONGEST_QUERY = 2000
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class SearchRequest(BaseModel):
    """A query typed into the page."""

    model_config = ConfigDict(strict=True)

    query: Annotated[str, Field(min_length=1, max_length=_LONGEST_QUERY)]
    corpus: str


class DroppedFile(BaseModel):
    """A text file dropped onto the page."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    text: str


def _add_page(app: FastAPI, served: _Served, corpora: _Corpora, settings: Settings) -> None:
    """Put the page and its routes into the app. They are not part of the API that clients are promised."""
    content = files("trundle.serve").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(content, media_type="text/html", headers=_PAGE_HEADERS)

    @app.get("/compare", include_in_schema=False)
    async def about() -> Response:
        return _answer({"models": [model.card() for model in served.models], "corpora": corpora.list()})

    @app.get("/compare/corpora/{key}", include_in_schema=False)
    async def corpus(key: str) -> Response:
        return _answer(_known(corpora, key).as_json())

    @app.post("/compare/corpora", include_in_schema=False)
    async def drop(request: Request) -> Response:
        dropped = await _asked(request, DroppedFile, settings)
        _check_readable(dropped.text)
        passages = _split_passages(dropped.text)
        if not passages:
            raise Refused(400, f"{dropped.name} holds no text to search; drop another file")
        return _answer(corpora.add(dropped.name, passages).as_json())

    @app.post("/compare/search", include_in_schema=False)
    async def search(request: Request) -> Response:
        asked = await _asked(request, SearchRequest, settings)
        _check_readable(asked.query)
        try:
            return _answer(await corpora.search(_known(corpora, asked.corpus), asked.query))
        except _Busy as busy:
            raise Refused(429, str(busy), headers={"Retry-After": str(busy.seconds)}) from busy
        except _Closed as closed:
            raise Refused(503, "the server is going down; ask another one") from closed
        except UserError as error:
            raise Refused(400, str(error)) from error


async def _asked(request: Request, kind: type[_T], settings: Settings) -> _T:
    """The body as a record. Only JSON is taken: a page of another site can't send that without being asked."""
    if request.headers.get("content-type", "").split(";")[0].strip() != _JSON:
        raise Refused(415, f"send the body as {_JSON}")
    raw = await _read_body(request, most_bytes=settings.most_bytes, seconds=settings.body_timeout)
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        raise _refused(error) from error


def _check_readable(text: str) -> None:
    try:
        check_texts([text])
    except UserError as error:
        raise Refused(400, str(error)) from error


def _known(corpora: _Corpora, key: str) -> _Corpus:
    corpus = corpora.get(key)
    if corpus is None:
        raise Refused(404, "that corpus is gone; drop the file again")
    return corpus


def _answer(content: Any) -> Response:
    return Response(to_json(content), media_type=_JSON)
