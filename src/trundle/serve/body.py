"""Bodies read within limits: of size, of time, and only as long as somebody is at the other end."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from trundle.serve.wire import Refused

THROWN_AWAY = 64 << 20
HUNG_UP = 499
"""What servers call a client that did not wait; nobody reads the answer."""


async def read_body(request: Request, *, most_bytes: int, seconds: float) -> bytes:
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
                if size > most_bytes + THROWN_AWAY:
                    break
    except TimeoutError as error:
        if size <= most_bytes:
            slow = f"the body took longer than {seconds:g} s; send it faster"
            raise Refused(408, slow, code="slow_body", headers={"Connection": "close"}) from error
    except ClientDisconnect as error:
        raise Refused(HUNG_UP, "the client hung up") from error
    if size > most_bytes:
        large = f"the body holds more than {most_bytes:,} bytes; send fewer texts at once"
        raise Refused(413, large, code="body_too_large", headers={"Connection": "close"})
    return b"".join(parts)


async def hung_up(request: Request) -> None:
    """Return when the client is gone; the body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
