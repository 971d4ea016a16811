"""A teacher behind an OpenAI-style embeddings endpoint, seen as texts → array.

Paid by the token and limited by the minute: each text is sent once, in batches, and what comes back is
distrusted until it has been looked at. How requests are made and repeated is in `posting`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from trundle.data.digest import DIGEST_BYTES
from trundle.data.posting import Pace, Poster
from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel

ANSWER_BYTES_PER_TEXT = 1 << 20
ROLES = ("text", "query", "document")


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
    if unknown := sorted(set(prompted) - set(ROLES)):
        raise BadInput(f"there is no role {unknown[0]!r} to prompt for; write one of {', '.join(ROLES)}")
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
    poster = Poster(
        url=f"{address}/embeddings",
        key_variable=key_variable,
        retries=retries,
        timeout=timeout,
        pace=Pace(requests_per_minute),
    )
    client = _Client(poster, model, batch_size, dimensions)

    def role(name: str) -> Encode:
        prompt = prompted.get(name, "")

        def encode(texts: Sequence[str]) -> Vectors:
            return client.encode([prompt + text for text in texts])

        return encode

    text, query, document = map(role, ROLES)
    return Embedder(name=f"{model} at {address}", text=text, query=query, document=document)


def endpoint_id(
    url: str, model: str, *, dimensions: int | None = None, prompts: Mapping[str, str] | None = None
) -> str:
    """An endpoint's identity: its address and what it is asked for; the model behind it can't be seen."""
    asked = json.dumps([dimensions, dict(prompts or {})], sort_keys=True).encode()
    return f"endpoint {_checked_url(url)} {model} {blake2b(asked, digest_size=DIGEST_BYTES).hexdigest()}"


class _Client:
    """Sends batches, and remembers the width of the first answer to hold all later ones to it."""

    def __init__(self, poster: Poster, model: str, batch_size: int, dimensions: int | None) -> None:
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
        answer = self._poster.post(body, limit=len(texts) * ANSWER_BYTES_PER_TEXT)
        vectors = read_answer(answer, texts, self._poster.url)
        width = vectors.shape[1]
        if self._width is None:
            self._width = width
        if width != self._width:
            raise BadModel(
                f"{self._poster.url} gave vectors of {width} numbers, not {self._width}; check its model"
            )
        return vectors


def read_answer(raw: bytes, texts: Sequence[str], url: str) -> Vectors:
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
