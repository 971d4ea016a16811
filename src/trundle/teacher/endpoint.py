"""A teacher behind an OpenAI-style embeddings endpoint, seen as texts → array.

Paid by the token and limited by the minute: each text is sent once, in batches, and what comes back is
distrusted until it has been looked at. How requests are made and repeated is in `posting`.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from http.client import HTTPException, HTTPMessage, HTTPResponse
from random import Random
from threading import Event
from typing import IO, Any, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

import numpy as np

from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel
from trundle.teacher.shards import DIGEST_BYTES

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 60.0
_LONGEST_ASKED_WAIT = 300.0
_READ_BYTES = 1 << 16
_QUOTED_BYTES = 4096
_QUOTED_CHARACTERS = 200


class _Pace:
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
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class _Poster:
    """Where to post to, and how patiently."""

    url: str
    key_variable: str | None
    retries: int
    timeout: float
    pace: _Pace
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
                if again.wait > _LONGEST_ASKED_WAIT:
                    raise BadModel(
                        f"{self.url} asks to wait {again.wait:.0f} seconds ({again}); run again after that"
                    ) from again
                longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (tries - 1))
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
            raw = error.read(_QUOTED_BYTES)
        except (OSError, HTTPException):
            raw = b""
        said = _message(raw.decode("utf-8", "replace"))
        if self._key():
            said = said.replace(self._key(), "[key]")
        return (
            f"{error.code}: {' '.join(said.split())[:_QUOTED_CHARACTERS]}"
            if said.strip()
            else str(error.code)
        )


def _read(response: HTTPResponse, end: float, limit: int, url: str) -> bytes:
    """The whole answer; a server that sends a few bytes now and then does not hold us forever."""
    parts: list[bytes] = []
    size = 0
    while part := response.read1(_READ_BYTES):
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


_ANSWER_BYTES_PER_TEXT = 1 << 20
_ROLES = ("text", "query", "document")


def endpoint_teacher(
    url: str,
    model: str,
    *,
    key_variable: str | None = "OPENAI_API_KEY",
    batch_size: int = 64,
    requests_per_minute: float | None = None,
    retries: int = 6,
    timeout: float = 60.0,
    dimensions: int | None = None,
    prompts: Mapping[str, str] | None = None,
) -> Embedder:
    """The model that answers at `url`/embeddings.

    `prompts` are put before each text by role (text, query, document). `key_variable` names the environment
    variable that holds the key, if the server wants one. `timeout` is for one whole answer, in seconds.
    """
    address = _checked_url(url)
    prompted = dict(prompts or {})
    if unknown := sorted(set(prompted) - set(_ROLES)):
        raise BadInput(f"there is no role {unknown[0]!r} to prompt for; write one of {', '.join(_ROLES)}")
    for name, value, least in (
        ("batch size", batch_size, 1),
        ("number of retries", retries, 0),
        ("number of dimensions", 1 if dimensions is None else dimensions, 1),
    ):
        if value < least:
            raise BadInput(f"a {name} of {value} can't be; give {least} or more")
    if timeout <= 0 or (requests_per_minute is not None and requests_per_minute <= 0):
        raise BadInput(
            "the timeout and the requests per minute must be above 0; leave them out for the defaults"
        )
    poster = _Poster(
        url=f"{address}/embeddings",
        key_variable=key_variable,
        retries=retries,
        timeout=timeout,
        pace=_Pace(requests_per_minute),
    )
    client = _Client(poster, model, batch_size, dimensions)

    def role(name: str) -> Encode:
        prompt = prompted.get(name, "")

        def encode(texts: Sequence[str]) -> Vectors:
            return client.encode([prompt + text for text in texts])

        return encode

    text, query, document = map(role, _ROLES)
    return Embedder(name=f"{model} at {address}", text=text, query=query, document=document)


def _endpoint_id(
    url: str, model: str, *, dimensions: int | None = None, prompts: Mapping[str, str] | None = None
) -> str:
    """An endpoint's identity: its address and what it is asked for; the model behind it can't be seen."""
    asked = json.dumps([dimensions, dict(prompts or {})], sort_keys=True).encode()
    return f"endpoint {_checked_url(url)} {model} {blake2b(asked, digest_size=DIGEST_BYTES).hexdigest()}"


class _Client:
    """Sends batches, and remembers the width of the first answer to hold all later ones to it."""

    def __init__(self, poster: _Poster, model: str, batch_size: int, dimensions: int | None) -> None:
        self._poster = poster
        self._batch_size = batch_size
        self._settings: dict[str, Any] = {"model": model, "encoding_format": "float"}
        if dimensions is not None:
            self._settings["dimensions"] = dimensions
        self._width = dimensions

    def encode(self, texts: Sequence[str]) -> Vectors:
        parts = [
            self._batch(texts[start : start + self._batch_size])
            for start in range(0, len(texts), self._batch_size)
        ]
        return np.concatenate(parts) if parts else np.zeros((0, self._width or 0), dtype=np.float32)

    def _batch(self, texts: Sequence[str]) -> Vectors:
        body = json.dumps({**self._settings, "input": list(texts)}).encode()
        answer = self._poster.post(body, limit=len(texts) * _ANSWER_BYTES_PER_TEXT)
        vectors = _read_answer(answer, texts, self._poster.url)
        width = vectors.shape[1]
        if self._width is None:
            self._width = width
        if width != self._width:
            raise BadModel(
                f"{self._poster.url} gave vectors of {width} numbers, not {self._width}; check its model"
            )
        return vectors


def _read_answer(raw: bytes, texts: Sequence[str], url: str) -> Vectors:
    """The vectors in an answer, in the order of the texts; an answer of any other form is refused."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        start = raw[:60].decode("utf-8", "replace")
        raise BadModel(f"{url} answered something that is not JSON ({start!r}); check the address") from error
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise BadModel(
            f"{url} answered without a list of embeddings under 'data'; is it an embeddings endpoint?"
        )
    if len(data) != len(texts):
        raise BadModel(f"{url} gave {len(data)} vectors for {len(texts)} texts; check the server")
    by_index = {row.get("index"): row.get("embedding") for row in data if type(row.get("index")) is int}
    if by_index.keys() != set(range(len(texts))):
        raise BadModel(f"{url} did not number its vectors from 0 to {len(texts) - 1}; check the server")
    rows = [_vector(by_index[number], text, url) for number, text in enumerate(texts)]
    for row, text in zip(rows, texts, strict=True):
        if len(row) != len(rows[0]):
            widths = f"{len(rows[0])} and {len(row)} numbers"
            raise BadModel(
                f"{url} mixed vectors of {widths} in one answer (at {text[:60]!r}); check the server"
            )
    return np.stack(rows)


def _vector(value: object, text: str, url: str) -> Vectors:
    """One embedding, if it is a list of finite numbers that are not all zero."""
    try:
        numbers = np.asarray(value if isinstance(value, list) else None)
    except ValueError:
        numbers = np.asarray(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or not numbers.size:
        raise BadModel(f"{url} gave no list of numbers for {text[:60]!r}; check that it can answer in floats")
    with np.errstate(over="ignore"):
        vector = numbers.astype(np.float32)
    if not np.isfinite(vector).all():
        raise BadModel(f"{url} gave a vector with NaN or infinity for {text[:60]!r}; leave that text out")
    if not vector.any():
        raise BadModel(f"{url} gave a vector of zeros for {text[:60]!r}; leave that text out")
    return vector


def _checked_url(url: str) -> str:
    """The address without its last slash and without /embeddings, which is added to it; as it gets written down, it must not carry a secret."""
    try:
        parts = urlsplit(url)
        plain = (
            re.fullmatch(r"[\x21-\x7e]+", url)
            and parts.scheme in {"http", "https"}
            and parts.hostname
            and (parts.port is None or parts.port)
        )
    except ValueError:
        plain = None
    if not plain:
        raise BadInput("the endpoint's address is not one; write it as https://server/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise BadInput(
            "the endpoint's address must hold no key or query; write https://server/v1 and keep the key in the environment"
        )
    return url.rstrip("/").removesuffix("/embeddings")
