"""Requests and answers: OpenAI's embeddings, extended by a role and by int8 and binary vectors."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, Field, StrictInt, ValidationError
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from trundle.serve.settings import ServerSettings

_Body = TypeVar("_Body", bound=BaseModel)
_JSON = "application/json"
_LARGE = 1 << 16
"""Bodies of more bytes than this are parsed in a thread, and answers are sent in parts of this size."""
_MOST_IGNORED = 64 << 20
_DISCONNECTED = 499
"""The usual status for a client that disconnected; no client receives it."""


class EmbeddingsRequest(BaseModel, strict=True):
    """The body of a request for vectors. Unknown fields are ignored."""

    input: Annotated[
        str | Annotated[list[str], Field(min_length=1)], Field(description="One text, or a list of texts.")
    ]
    model: Annotated[str | None, Field(description="A name from /v1/models; default: the student.")] = None
    dimensions: Annotated[StrictInt | None, Field(ge=1, description="Keep only the first dimensions.")] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="A list of numbers, or their bytes in base64.")
    ] = "float"
    input_type: Annotated[
        Literal["query", "document"] | None,
        Field(description="The role of the texts: chooses the prompt and, in a pair, the model."),
    ] = None
    output_dtype: Annotated[
        Literal["float", "int8", "binary"],
        Field(description="float32, int8, or signs packed eight per byte."),
    ] = "float"
    user: Annotated[str | None, Field(description="Accepted and ignored.")] = None


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens the model encoded, including the prompt."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """One vector per text, in the same order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    class Details(BaseModel):
        """The error in one sentence."""

        message: str
        type: str
        param: str | None
        code: str | None

    error: Details


class _RequestError(Exception):
    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self._status = status
        self._headers = dict(headers or {})
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._content = {"message": message, "type": kind, "param": param, "code": code}

    def answer(self) -> Response:
        body = to_json({"error": self._content})
        return Response(body, status_code=self._status, media_type=_JSON, headers=self._headers)


def _parse(kind: type[_Body], body: bytes) -> _Body:
    """Parses a JSON body; the error names the first invalid field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        if not first["loc"]:
            message = f"the body is not a JSON object ({first['msg']}); send one"
            raise _RequestError(400, message, code="bad_json") from error
        field = str(first["loc"][0])
        message = f"{field} is invalid: {first['msg'].lower()}; correct it or leave it out"
        if field == "input":
            message = "input must be a text or a list of one or more texts, not token ids or anything else"
            message += "; in LangChain set check_embedding_ctx_length=False"
        raise _RequestError(400, message, param=field) from error


async def _parse_body(request: Request, kind: type[_Body], settings: ServerSettings) -> _Body:
    """Reads and parses a JSON body. Other types are rejected: pages of other sites may send them freely."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != _JSON:
        other = f"send the body as {_JSON} and say so in the Content-Type header"
        raise _RequestError(415, other, code="wrong_content_type")
    raw = await _read_body(request, most_bytes=settings.most_bytes, seconds=settings.body_timeout)
    return await asyncio.to_thread(_parse, kind, raw) if len(raw) > _LARGE else _parse(kind, raw)


async def _read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
    """Returns the body, or rejects one that is too large or too slow."""
    # A body that is too large is read to its end: most clients read an answer only after sending everything.
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size <= most_bytes:
                    parts.append(part)
                elif parts:
                    parts.clear()
                if size > most_bytes + _MOST_IGNORED:
                    break
    except TimeoutError as error:
        if size <= most_bytes:
            slow = f"the body took longer than {seconds:g} s; send it faster"
            raise _RequestError(408, slow, code="slow_body", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise _RequestError(_DISCONNECTED, "the client disconnected") from error
    if size > most_bytes:
        large = f"the body has more than {most_bytes:,} bytes; send fewer texts at once"
        raise _RequestError(413, large, code="body_too_large", headers={"Connection": "close"})
    return b"".join(parts)
