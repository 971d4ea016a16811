"""One JSON request at a time to a server that may be busy, slow or broken.

Busy (429), failing (5xx), silent and hanging-up servers are tried again, each time after a longer wait, and so is one that
has answered before and now refuses to be called; whatever another try can't mend is an error at once. The key is read from the environment for each request and
goes nowhere but into its header: not into a message, a record or a redirect.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage, HTTPResponse
from random import Random
from threading import Event
from typing import IO, cast
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from trundle.errors import BadInput, BadModel

FIRST_WAIT = 0.5
LONGEST_WAIT = 60.0
LONGEST_ASKED_WAIT = 300.0
READ_BYTES = 1 << 16
QUOTED_BYTES = 4096
QUOTED_CHARACTERS = 200


class Pace:
    """Keeps requests apart, so that no more than `per_minute` start in a minute."""

    def __init__(
        self,
        per_minute: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._apart = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    def wait(self) -> None:
        """Return when the next request may start."""
        now = self._clock()
        if now < self._next:
            self._sleep(self._next - now)
        self._next = max(now, self._next) + self._apart


class _Again(Exception):
    """Not this time, but another try may help; less so where nobody listens at all."""

    def __init__(self, reason: str, wait: float = 0.0, *, nobody: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.nobody = nobody


class _NoRedirect(HTTPRedirectHandler):
    """Following a redirect would hand the key to whoever is at the other end."""

    def redirect_request(
        self,
        req: Request,  # noqa: ARG002
        fp: IO[bytes],  # noqa: ARG002
        code: int,  # noqa: ARG002
        msg: str,  # noqa: ARG002
        headers: HTTPMessage,  # noqa: ARG002
        newurl: str,  # noqa: ARG002
    ) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class Poster:
    """Where to post to, and how patiently."""

    url: str
    key_variable: str | None
    retries: int
    timeout: float
    pace: Pace
    sleep: Callable[[float], None] = time.sleep
    _random: Random = field(default_factory=Random, repr=False)
    _answered: Event = field(default_factory=Event, repr=False)
    """Whether the server has ever answered: one that has and then refuses may only be starting anew."""
    _opener: OpenerDirector = field(default_factory=lambda: build_opener(_NoRedirect), repr=False)

    def post(self, body: bytes, *, limit: int) -> bytes:
        """The answer to a JSON body, of at most `limit` bytes."""
        tries = 0
        while True:
            self.pace.wait()
            try:
                return self._once(body, limit)
            except _Again as again:
                tries += 1
                if again.nobody and not self._answered.is_set():
                    raise BadModel(
                        f"nobody answers at {self.url} ({again}); start the server, or check the address"
                    ) from again
                if tries > self.retries:
                    raise BadModel(
                        f"{self.url} gave no answer in {tries} tries (the last time: {again}); "
                        "see whether the server is well, then run again"
                    ) from again
                if again.wait > LONGEST_ASKED_WAIT:
                    raise BadModel(
                        f"{self.url} asks to wait {again.wait:.0f} seconds ({again}); run again after that"
                    ) from again
                longest = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (tries - 1))
                self.sleep(max(again.wait, longest * self._random.uniform(0.5, 1.0)))

    def _once(self, body: bytes, limit: int) -> bytes:
        end = time.monotonic() + self.timeout
        try:
            with self._opener.open(self._request(body), timeout=self.timeout) as response:
                self._answered.set()
                return _read(cast("HTTPResponse", response), end, limit, self.url)
        except HTTPError as error:
            self._answered.set()
            raise self._refusal(error) from None
        except URLError as error:
            raise self._unreached(error.reason) from None
        except (OSError, HTTPException) as error:
            raise self._unreached(error) from None

    def _request(self, body: bytes) -> Request:
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trundle"}
        request = Request(self.url, data=body, headers=headers, method="POST")
        if self._key():
            request.add_unredirected_header("Authorization", f"Bearer {self._key()}")
        return request

    def _key(self) -> str:
        """The key; never kept, so that no record or traceback can show it."""
        if self.key_variable is None:
            return ""
        if not re.fullmatch(r"[\x21-\x7e]*", os.environ.get(self.key_variable, "").strip()):
            raise BadInput(
                f"{self.key_variable} holds spaces or odd characters; set it to the key and nothing else"
            )
        return os.environ.get(self.key_variable, "").strip()

    def _unreached(self, reason: object) -> Exception:
        """What a failed connection means."""
        if isinstance(reason, ssl.SSLCertVerificationError):
            return BadInput(f"{self.url} has a certificate that can't be trusted; check the address")
        if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
            return BadInput(f"{self.url} names a server that does not exist; check the address")
        if isinstance(reason, TimeoutError):
            return _Again(f"nothing came for {self.timeout:g} seconds")
        nobody = isinstance(reason, ConnectionRefusedError)
        return _Again(f"{type(reason).__name__}: {reason}", nobody=nobody)

    def _refusal(self, error: HTTPError) -> Exception:
        """What an answer other than 200 means."""
        with error:
            said = self._quoted(error)
        if error.code in {408, 425, 429} or error.code >= 500:
            return _Again(said, _asked_wait(error.headers.get("Retry-After")))
        if error.code in {401, 403}:
            return BadInput(f"{self.url} refuses access ({error.code}); {self._key_advice()}")
        if error.code == 404:
            return BadModel(f"{self.url} has no such model or address ({said}); check both names")
        if 300 <= error.code < 400:
            return BadInput(f"{self.url} points to another address ({error.code}); give the final one")
        return BadInput(
            f"{self.url} refuses the request ({said}); mend what it names, or try a smaller batch size"
        )

    def _key_advice(self) -> str:
        if self.key_variable is None:
            return "name the environment variable that holds its key"
        state = "a valid key" if self._key() else "its key, which is not set"
        return f"set the environment variable {self.key_variable} to {state}"

    def _quoted(self, error: HTTPError) -> str:
        """The status, and the start of what the server said about it, without the key."""
        try:
            raw = error.read(QUOTED_BYTES)
        except (OSError, HTTPException):
            raw = b""
        said = _message(raw.decode("utf-8", "replace"))
        if self._key():
            said = said.replace(self._key(), "[key]")
        return (
            f"{error.code}: {' '.join(said.split())[:QUOTED_CHARACTERS]}" if said.strip() else str(error.code)
        )


def _read(response: HTTPResponse, end: float, limit: int, url: str) -> bytes:
    """The whole answer; a server that sends a few bytes now and then does not hold us forever."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BadModel(
                f"{url} sent more than {limit} bytes for one request; is it an embeddings endpoint?"
            )
        if time.monotonic() > end:
            raise TimeoutError
    if response.length:
        raise _Again("the answer was cut short")
    return b"".join(parts)


def _message(said: str) -> str:
    """The human part of an OpenAI-style error, or all of it."""
    try:
        answer = json.loads(said)
        message = answer["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return said
    return message if isinstance(message, str) else said


def _asked_wait(header: str | None) -> float:
    """The seconds a Retry-After header asks for, written as a number or as a date; 0 if it can't be read."""
    if header is None:
        return 0.0
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", header):
        return float(header)
    try:
        until = parsedate_to_datetime(header)
    except ValueError:
        return 0.0
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())
