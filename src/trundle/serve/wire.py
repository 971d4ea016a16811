"""What requests and answers look like: OpenAI's embeddings, with a role and fewer bits where they are asked for."""

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


class EmbeddingsRequest(BaseModel):
    """The body of a request for vectors. Fields that are not known are passed over."""

    model_config = ConfigDict(strict=True)

    input: Annotated[
        str | Annotated[list[str], Field(min_length=1)], Field(description="One text, or a list of texts.")
    ]
    model: Annotated[
        str | None, Field(description="A name from /v1/models; the student where it is left out.")
    ] = None
    dimensions: Annotated[
        StrictInt | None, Field(ge=1, description="Keep only the first so many numbers.")
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="A list of numbers, or their bytes in base64.")
    ] = "float"
    input_type: Annotated[
        Literal["query", "document"] | None,
        Field(description="What the texts are for: chooses the prompt and, in a pair, the model."),
    ] = None
    output_dtype: Annotated[
        Literal["float", "int8", "binary"],
        Field(description="Numbers of 32 bits, of 8 bits, or signs packed eight to a byte."),
    ] = "float"
    user: Annotated[str | None, Field(description="Taken and not used.")] = None


class Embedding(BaseModel):
    """One vector."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens the model read, its prompt included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(BaseModel):
    """One vector per text, in the order given."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class ErrorBody(BaseModel):
    """What went wrong, in one sentence."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorBody


class Refused(Exception):
    """A request that gets an error for an answer."""

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
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def answer(self) -> Response:
        """As it goes over the wire."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        content = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return Response(
            to_json({"error": content}), status_code=self.status, media_type=_JSON, headers=self.headers
        )


def _parse_embeddings(body: bytes) -> EmbeddingsRequest:
    """The request in a body, or a refusal that names the field."""
    try:
        return EmbeddingsRequest.model_validate_json(body)
    except ValidationError as error:
        raise _refused(error) from error


def _refused(error: ValidationError) -> Refused:
    """The first thing that is wrong with a body."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = first["loc"]
    if not place:
        return Refused(
            400, f"the body can't be read as JSON ({first['msg']}); send an object", code="bad_json"
        )
    field = str(place[0])
    if field == "input":
        said = "input must be a text or a list of one or more texts, not token ids or anything else"
        return Refused(400, f"{said}; in LangChain set check_embedding_ctx_length=False", param=field)
    return Refused(
        400, f"{field} can't be used: {first['msg'].lower()}; mend it or leave it out", param=field
    )


def _write_embeddings(vectors: NDArray[Any], *, model: str, tokens: int, in_base64: bool) -> bytes:
    """The answer's body."""
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


_THROWN_AWAY = 64 << 20
_HUNG_UP = 499
"""What servers call a client that did not wait; nobody reads the answer."""


async def _read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
    """The whole body, or a refusal when it is too large or too slow.

    What is too large is read to its end and thrown away, within bounds: most clients look for an answer only
    when they have sent everything.
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
                if size > most_bytes + _THROWN_AWAY:
                    break
    except TimeoutError as error:
        if size <= most_bytes:
            slow = f"the body took longer than {seconds:g} s; send it faster"
            raise Refused(408, slow, code="slow_body", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise Refused(_HUNG_UP, "the client hung up") from error
    if size > most_bytes:
        large = f"the body holds more than {most_bytes:,} bytes; send fewer texts at once"
        raise Refused(413, large, code="body_too_large", headers={"Connection": "close"})
    return b"".join(parts)


async def _hung_up(request: Request) -> None:
    """Return when the client is gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
