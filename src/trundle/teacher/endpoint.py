"""A teacher behind an OpenAI-style embeddings endpoint.

Each text is sent once, in batches; failed requests are retried with growing delays and the same
`Idempotency-Key`, and every response is validated. The API key is read from the environment for each request
and never stored, so no record, log or traceback can show it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from random import Random
from threading import Event
from typing import Any

import httpx2
import numpy as np

from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel
from trundle.teacher.answers import _asked_once
from trundle.teacher.shards import _DIGEST_BYTES

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 60.0
_LONGEST_REQUESTED_WAIT = 300.0
_QUOTED_BYTES = 4096
_QUOTED_CHARACTERS = 200
_RESPONSE_BYTES_PER_TEXT = 1 << 20
_ROLES = ("text", "query", "document")
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trundle"}


class _Retry(Exception):
    """A failure that may pass; `refused` means that nothing listens at the address."""

    def __init__(self, reason: str, wait: float = 0.0, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.wait = wait
        self.refused = refused


def _make_client() -> httpx2.Client:
    # Redirects stay off: following one would send the key to another server. Connections are not reused,
    # because nothing closes an idle one at the end.
    return httpx2.Client(headers=_HEADERS, limits=httpx2.Limits(max_keepalive_connections=0))


@dataclass(frozen=True, kw_only=True)
class _Poster:
    """Posts JSON to one URL, with retries."""

    url: str
    key_variable: str | None
    retries: int
    timeout: float
    sleep: Callable[[float], None] = time.sleep
    _random: Random = field(default_factory=Random, repr=False)
    _answered: Event = field(default_factory=Event, repr=False)
    """Set once the server has responded: if it refuses a connection later, it may be restarting."""
    _client: httpx2.Client = field(default_factory=_make_client, repr=False)

    def post(self, body: bytes, *, limit: int) -> bytes:
        """Return the response to a JSON body, at most `limit` bytes."""
        tries = 0
        while True:
            tries += 1
            try:
                return self._once(body, limit)
            except _Retry as failed:
                problem = None
                if failed.refused and not self._answered.is_set():
                    problem = f"no server responds at {self.url} ({failed}); start the server"
                elif tries > self.retries:
                    problem = f"{self.url} failed {tries} times (last: {failed}); run again later"
                elif failed.wait > _LONGEST_REQUESTED_WAIT:
                    problem = f"{self.url} asks to wait {failed.wait:.0f} seconds ({failed}); run again then"
                if problem:
                    raise BadModel(problem) from failed
                longest = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (tries - 1))
                self.sleep(max(failed.wait, longest * self._random.uniform(0.5, 1.0)))

    def _once(self, body: bytes, limit: int) -> bytes:
        # The client's timeout covers one read; the deadline stops a server that keeps sending a few bytes.
        deadline = time.monotonic() + self.timeout
        content = bytearray()
        headers = {"Idempotency-Key": blake2b(body, digest_size=_DIGEST_BYTES).hexdigest()}
        try:
            with self._client.stream(
                "POST", self.url, content=body, headers=headers, auth=self._authorise, timeout=self.timeout
            ) as response:
                self._answered.set()
                if not response.is_success:
                    raise self._rejection(response)
                for part in response.iter_bytes():
                    content += part
                    if len(content) > limit:
                        raise BadModel(f"{self.url} sent more than {limit} bytes; check the address")
                    if time.monotonic() > deadline:
                        raise httpx2.ReadTimeout("deadline")
        except httpx2.RequestError as error:
            raise self._connection_error(error) from None
        return bytes(content)

    def _authorise(self, request: httpx2.Request) -> httpx2.Request:
        if self._key():
            request.headers["Authorization"] = f"Bearer {self._key()}"
        return request

    def _key(self) -> str:
        if self.key_variable is None:
            return ""
        if not re.fullmatch(r"[\x21-\x7e]*", os.environ.get(self.key_variable, "").strip()):
            raise BadInput(f"{self.key_variable} holds spaces or odd characters; set it to the key only")
        return os.environ.get(self.key_variable, "").strip()

    def _connection_error(self, error: httpx2.RequestError) -> Exception:
        if isinstance(error, httpx2.TimeoutException):
            return _Retry(f"no data for {self.timeout:g} seconds")
        reason: BaseException | None = error
        while reason is not None and not isinstance(reason, OSError):
            reason = reason.__cause__ or reason.__context__
        if isinstance(reason, ssl.SSLCertVerificationError):
            return BadInput(f"{self.url} has an untrusted certificate; check the address")
        if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
            return BadInput(f"{self.url} names a server that does not exist; check the address")
        return _Retry(f"{type(error).__name__}: {error}", refused=isinstance(reason, ConnectionRefusedError))

    def _rejection(self, response: httpx2.Response) -> Exception:
        status, quoted = response.status_code, self._quoted(response)
        if status in {408, 425, 429} or status >= 500:
            return _Retry(quoted, _requested_wait(response.headers.get("Retry-After", "")))
        if status in {401, 403}:
            advice = "name the environment variable that holds its key"
            if self.key_variable is not None:
                state = "a valid key" if self._key() else "its key, which is not set"
                advice = f"set the environment variable {self.key_variable} to {state}"
            return BadInput(f"{self.url} denies access ({status}); {advice}")
        if status == 404:
            return BadModel(f"{self.url} has no such model or address ({quoted}); check both names")
        if 300 <= status < 400:
            return BadInput(f"{self.url} redirects to another address ({status}); pass the final one")
        return BadInput(f"{self.url} rejects the request ({quoted}); fix what it names")

    def _quoted(self, response: httpx2.Response) -> str:
        """Return the status and the start of the server's message, without the key."""
        message = ""
        with suppress(httpx2.RequestError):
            message = next(response.iter_bytes(_QUOTED_BYTES), b"").decode("utf-8", "replace")
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            quoted = json.loads(message)["error"]["message"]
            message = quoted if isinstance(quoted, str) else message
        if self._key():
            message = message.replace(self._key(), "[key]")
        message = " ".join(message.split())[:_QUOTED_CHARACTERS]
        return f"{response.status_code}: {message}" if message else str(response.status_code)


def _requested_wait(header: str) -> float:
    """Return the seconds a Retry-After header asks for, as a number or a date; 0 if it is invalid."""
    with suppress(ValueError):
        return max(0.0, float(header))
    with suppress(ValueError):
        until = parsedate_to_datetime(header)
        return max(0.0, (until.replace(tzinfo=until.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return 0.0


def open_endpoint(url: str, model: str | None, *, most: int | None = None) -> tuple[Embedder, str]:
    """Return an endpoint that sends no text twice and at most `most` texts in all, and its identity."""
    opened = endpoint_teacher(url, model)
    identity = _endpoint_id(url, str(model))
    return _asked_once(opened, identity, most=most), identity


def endpoint_teacher(
    url: str,
    model: str | None,
    *,
    key_variable: str | None = "OPENAI_API_KEY",
    batch_size: int = 64,
    retries: int = 6,
    timeout: float = 60.0,
    dimensions: int | None = None,
    prompts: Mapping[str, str] | None = None,
) -> Embedder:
    """Return an embedder that posts texts to `url`/embeddings.

    `prompts` are put before each text by role (text, query, document). `key_variable` names the environment
    variable that holds the key, if the server needs one. `timeout` is for one complete response, in seconds.
    """
    if model is None:
        raise BadInput("an endpoint serves several models; name the teacher with --teacher-model")
    address = _checked_url(url)
    prompted = dict(prompts or {})
    if unknown := sorted(set(prompted) - set(_ROLES)):
        raise BadInput(f"there is no role {unknown[0]!r} to prompt for; write one of {', '.join(_ROLES)}")
    if batch_size < 1 or retries < 0 or timeout <= 0 or (dimensions is not None and dimensions < 1):
        raise BadInput("pass a batch size, timeout and dimensions above 0, and 0 retries or more")
    url = f"{address}/embeddings"
    poster = _Poster(url=url, key_variable=key_variable, retries=retries, timeout=timeout)
    client = _EmbeddingsClient(poster, model, batch_size, dimensions)

    def role(name: str) -> Encode:
        prompt = prompted.get(name, "")
        return lambda texts: client.encode([prompt + text for text in texts])

    text, query, document = map(role, _ROLES)
    return Embedder(name=f"{model} at {address}", text=text, query=query, document=document)


def _endpoint_id(
    url: str, model: str, *, dimensions: int | None = None, prompts: Mapping[str, str] | None = None
) -> str:
    """Return the identity of an endpoint: its address and the request; the model behind it is not visible."""
    request = json.dumps([dimensions, dict(prompts or {})], sort_keys=True).encode()
    return f"endpoint {_checked_url(url)} {model} {blake2b(request, digest_size=_DIGEST_BYTES).hexdigest()}"


class _EmbeddingsClient:
    """Sends batches; all responses must have the width of the first one."""

    def __init__(self, poster: _Poster, model: str, batch_size: int, dimensions: int | None) -> None:
        self._poster = poster
        self._batch_size = batch_size
        self._settings: dict[str, Any] = {"model": model, "encoding_format": "float"}
        if dimensions is not None:
            self._settings["dimensions"] = dimensions
        self._width = dimensions

    def encode(self, texts: Sequence[str]) -> Vectors:
        size = self._batch_size
        parts = [self._batch(texts[start : start + size]) for start in range(0, len(texts), size)]
        return np.concatenate(parts) if parts else np.zeros((0, self._width or 0), dtype=np.float32)

    def _batch(self, texts: Sequence[str]) -> Vectors:
        body = json.dumps({**self._settings, "input": list(texts)}).encode()
        answer = self._poster.post(body, limit=len(texts) * _RESPONSE_BYTES_PER_TEXT)
        vectors = _read_answer(answer, texts, self._poster.url)
        width = vectors.shape[1]
        self._width = self._width or width
        if width != self._width:
            raise BadModel(f"{self._poster.url} returned width {width}, not {self._width}; check its model")
        return vectors


def _read_answer(raw: bytes, texts: Sequence[str], url: str) -> Vectors:
    """Return the vectors of a response in the order of the texts; any other response is an error."""
    try:
        answer = json.loads(raw)
    except (ValueError, RecursionError) as error:
        start = raw[:60].decode("utf-8", "replace")
        raise BadModel(f"{url} returned something that is not JSON ({start!r}); check the address") from error
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise BadModel(f"{url} returned no list of embeddings under 'data'; is it an embeddings endpoint?")
    if len(data) != len(texts):
        raise BadModel(f"{url} returned {len(data)} vectors for {len(texts)} texts; check the server")
    by_index = {row.get("index"): row.get("embedding") for row in data if type(row.get("index")) is int}
    if by_index.keys() != set(range(len(texts))):
        raise BadModel(f"{url} did not number its vectors from 0 to {len(texts) - 1}; check the server")
    rows = [_vector(by_index[number], text, url) for number, text in enumerate(texts)]
    if len({len(row) for row in rows}) > 1:
        raise BadModel(f"{url} returned vectors of several widths in one response; check the server")
    return np.stack(rows)


def _vector(value: object, text: str, url: str) -> Vectors:
    """Return one embedding, which must be a list of finite numbers that are not all zero."""
    try:
        numbers = np.asarray(value if isinstance(value, list) else None)
    except ValueError:
        numbers = np.asarray(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf" or not numbers.size:
        raise BadModel(f"{url} returned no list of numbers for {text[:60]!r}; check the server")
    with np.errstate(over="ignore"):
        vector = numbers.astype(np.float32)
    if not np.isfinite(vector).all():
        raise BadModel(f"{url} returned a vector with NaN or infinity for {text[:60]!r}; leave that text out")
    if not vector.any():
        raise BadModel(f"{url} returned a vector of zeros for {text[:60]!r}; leave that text out")
    return vector


def _checked_url(url: str) -> str:
    """Return the address without /embeddings; it gets recorded, so it must hold no secret."""
    try:
        parts = httpx2.URL(url)
    except httpx2.InvalidURL:
        parts = httpx2.URL("")
    if not re.fullmatch(r"[\x21-\x7e]+", url) or parts.scheme not in {"http", "https"} or not parts.host:
        raise BadInput("the endpoint's address is not a valid URL; write it as https://server/v1")
    if parts.userinfo or parts.query or parts.fragment:
        raise BadInput("the endpoint's address must hold no key or query; put the key into the environment")
    return url.rstrip("/").removesuffix("/embeddings")
