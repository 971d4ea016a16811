"""Requests and answers: OpenAI's embeddings, extended by a role and by int8 and binary vectors."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import Request, Response
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from trundle.runtime.encoder import Output

_JSON = "application/json"
_OUTPUTS: Mapping[str, Output] = {"float": "float32", "int8": "int8", "binary": "binary"}
_MOST_IGNORED = 64 << 20
_DISCONNECTED = 499
"""The usual status for a client that disconnected; no client receives it."""


class EmbeddingsRequest(BaseModel):
    """The body of a request for vectors. Unknown fields are ignored."""

    model_config = ConfigDict(strict=True)

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


class ErrorBody(BaseModel):
    """The error in one sentence."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorBody


class _RequestError(Exception):
    """An error that is the answer to a request."""

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


def _parse_embeddings(body: bytes) -> EmbeddingsRequest:
    try:
        return EmbeddingsRequest.model_validate_json(body)
    except ValidationError as error:
        raise _invalid_body(error) from error


def _invalid_body(error: ValidationError) -> _RequestError:
    """Returns an answer that names the first invalid field."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if not first["loc"]:
        return _RequestError(
            400, f"the body is not a JSON object ({first['msg']}); send one", code="bad_json"
        )
    field = str(first["loc"][0])
    if field == "input":
        said = "input must be a text or a list of one or more texts, not token ids or anything else"
        return _RequestError(400, f"{said}; in LangChain set check_embedding_ctx_length=False", param=field)
    return _RequestError(
        400, f"{field} is invalid: {first['msg'].lower()}; correct it or leave it out", param=field
    )


def _write_embeddings(vectors: NDArray[Any], *, model: str, tokens: int, in_base64: bool) -> bytes:
    """Returns the body of an answer."""
    rows = (base64.b64encode(row.tobytes()).decode() for row in vectors) if in_base64 else vectors.tolist()
    return to_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": place, "embedding": row} for place, row in enumerate(rows)
            ],
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def _read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
    """Returns the body, or rejects one that is too large or too slow.

    A body that is too large is read to its end and ignored, up to a limit: most clients read an answer only
    after they have sent everything.
    """
    parts: list[bytes] = []
    size = 0
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


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client has disconnected; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
