"""A teacher behind an OpenAI-style embeddings endpoint.

Texts are sent in batches; failed requests are retried with growing delays and the same `Idempotency-Key`, and
every response is validated. The API key is read from the environment for each request and never stored, so no
record, log or traceback can show it.

No text is sent, and paid for, twice: one SQLite file for each endpoint, model and width keeps the hash of
each text and its vector. Every response is committed before the next request, so a killed process loses at
most the response that it waits for.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sqlite3
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from pathlib import Path
from random import Random
from threading import Event

import httpx2
import numpy as np

from trundle.cache import cache_entry
from trundle.embedder import Embedder, Vectors, _plain
from trundle.errors import BadInput, BadModel, UserError, WriteFailed
from trundle.teacher.shards import _DIGEST_BYTES

_FIRST_WAIT = 0.5
_LONGEST_WAIT = 60.0
_LONGEST_REQUESTED_WAIT = 300.0
_QUOTED_BYTES = 4096
_QUOTED_CHARACTERS = 200
_RESPONSE_BYTES_PER_TEXT = 1 << 20
_REQUEST = blake2b(b"[null, {}]", digest_size=_DIGEST_BYTES).hexdigest()
"""No width and no prompts are asked for; a part of the names of what is in the cache."""
_HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "trundle"}
_KEY_BYTES = 16
_KEYS_AT_ONCE = 500
_TEXTS_PER_REQUEST = 64
_WAIT_SECONDS = 30.0
_TABLE = "CREATE TABLE IF NOT EXISTS answers (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID"


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
            address = "" if "/v1/" in self.url else "; most addresses end in /v1"
            return BadModel(f"{self.url} has no such model or address ({quoted}); check both names{address}")
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
    opened = _endpoint_embedder(url, model)
    identity = _endpoint_id(url, str(model))
    return _asked_once(opened, identity, most=most), identity


def _endpoint_embedder(
    url: str,
    model: str | None,
    *,
    key_variable: str | None = "OPENAI_API_KEY",
    batch_size: int = 64,
    retries: int = 6,
    timeout: float = 60.0,
) -> Embedder:
    """Return an embedder that posts texts to `url`/embeddings.

    `key_variable` names the environment variable that holds the key, if the server needs one. `timeout` is
    for one complete response, in seconds.
    """
    if model is None:
        raise BadInput("an endpoint serves several models; name the teacher with --teacher-model")
    address = _checked_url(url)
    if batch_size < 1 or retries < 0 or timeout <= 0:
        raise BadInput("pass a batch size and timeout above 0, and 0 retries or more")
    url = f"{address}/embeddings"
    poster = _Poster(url=url, key_variable=key_variable, retries=retries, timeout=timeout)
    encode = _EmbeddingsClient(poster, model, batch_size).encode
    return _plain(f"{model} at {address}", encode)


def _endpoint_id(url: str, model: str) -> str:
    """Return the identity of an endpoint: its address and the request; the model behind it is not visible."""
    return f"endpoint {_checked_url(url)} {model} {_REQUEST}"


class _EmbeddingsClient:
    """Sends batches; all responses must have the width of the first one."""

    def __init__(self, poster: _Poster, model: str, batch_size: int) -> None:
        self._poster = poster
        self._batch_size = batch_size
        self._settings = {"model": model, "encoding_format": "float"}
        self._width: int | None = None

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


def _asked_once(endpoint: Embedder, identity: str, *, most: int | None = None) -> Embedder:
    """Return an endpoint without prompts that sends no text twice, and at most `most` texts in all."""
    answers, sent = _Answers(identity), 0

    def encode(texts: Sequence[str]) -> Vectors:
        nonlocal sent
        known = answers.find(texts)
        new = [text for text in dict.fromkeys(texts) if text not in known]
        if most is not None and sent + len(new) > most:
            what = f"{endpoint.name} would get {sent + len(new):,} texts, more than the {most:,} allowed"
            raise UserError(f"{what}; allow more with --teacher-calls")
        for start in range(0, len(new), _TEXTS_PER_REQUEST):
            part = new[start : start + _TEXTS_PER_REQUEST]
            try:
                vectors = endpoint.text(part)
            except UserError as error:
                raise UserError(str(error)) from error  # no other class: every candidate would fail
            answers.add(part, vectors)
            sent += len(part)
            known |= dict(zip(part, vectors, strict=True))
        if not texts:
            return endpoint.text([])
        return np.stack([known[text] for text in texts])

    return _plain(endpoint.name, encode)


class _Answers:
    """Vectors by text; several processes may use one file."""

    def __init__(self, identity: str, *, root: Path | None = None) -> None:
        """Open the answers of the endpoint with this identity."""
        self._path = cache_entry("answers", identity, root=root).with_suffix(".sqlite")

    def find(self, texts: Sequence[str]) -> dict[str, Vectors]:
        """Return the vectors of those texts that were answered before."""
        if not self._path.is_file():
            return {}
        keys = {_key(text): text for text in texts}
        known = list(keys)
        found: dict[str, Vectors] = {}
        with closing(self._open()) as database:
            for start in range(0, len(known), _KEYS_AT_ONCE):
                part = known[start : start + _KEYS_AT_ONCE]
                marks = ",".join("?" * len(part))
                rows = database.execute(f"SELECT key, vector FROM answers WHERE key IN ({marks})", part)
                found |= {keys[key]: np.frombuffer(vector, dtype="<f4") for key, vector in rows}
        return found

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Keep the vectors of texts; they are on disk when this returns."""
        rows = [(_key(text), row.astype("<f4").tobytes()) for text, row in zip(texts, vectors, strict=True)]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", rows)
        except (OSError, sqlite3.Error) as error:
            raise WriteFailed(
                f"{self._path} can't be written ({error}); free some space, run again"
            ) from error

    def _open(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=_WAIT_SECONDS)
        database.execute(_TABLE)
        return database


def _key(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_KEY_BYTES).digest()
