"""Bodies read within limits: of size, of time, and only as long as somebody is at the other end."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from trundle.serve.wire import Refused

HUNG_UP = 499
"""What servers call a client that did not wait; nobody reads the answer."""


async def read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
    """The whole body, or a refusal as soon as it is too large or too slow."""
    too_large = Refused(
        413, f"the body holds more than {most_bytes:,} bytes; send fewer texts at once", code="body_too_large"
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > most_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        close = {"Connection": "close"}
        raise Refused(
            408, f"the body took longer than {seconds:g} s; send it faster", code="slow_body", headers=close
        ) from error
    except ClientDisconnect as error:
        raise Refused(HUNG_UP, "the client hung up") from error
    return b"".join(parts)


async def hung_up(request: Request) -> None:
    """Return when the client is gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
