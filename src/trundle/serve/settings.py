"""The settings of a server; the default limits suit a small machine."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trundle.errors import BadInput, MissingExtra

try:
    import fastapi as fastapi
    import prometheus_client as prometheus_client
    import uvicorn as uvicorn
except ImportError as error:
    raise MissingExtra("serve", "serve") from error

KEYS_VARIABLE = "TRUNDLE_API_KEYS"
_SHORTEST_KEY = 8
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and permissions of one server."""

    keys: tuple[str, ...] = ()
    """Valid API keys; if empty, no key is needed."""
    cors: tuple[str, ...] = ()
    """Web origins that may send requests."""
    hosts: tuple[str, ...] = ()
    """Names with a dot under which clients without a key may call the server."""
    page: bool = True
    """Whether to serve the page at /."""
    most_texts: int = 2048
    """Texts in one request."""
    most_tokens: int = 300_000
    """Tokens in one request, after each text was truncated to the model's length."""
    most_bytes: int = 8 << 20
    """Bytes of one request's body."""
    most_characters: int = 200_000
    """Characters of one text, which are tokenised even if the model reads only the first."""
    most_connections: int = 800
    """Open connections; beyond that, the one that has waited longest for a request is closed."""
    waiting: int = 4096
    """Texts in the queue; further requests are answered with 429."""
    waiting_bytes: int = 64 << 20
    """Bytes of all large bodies and answers in memory; further large requests are answered with 429."""
    timeout: float = 30.0
    """Seconds until a request is answered with 504."""
    body_timeout: float = 10.0
    """Seconds that a client may take to send its headers or its body, or to read a part of its answer."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int | float) and name != "page" and value <= 0:
                raise BadInput(f"{name.replace('_', ' ')} must be above 0; leave it out for the default")
        if self.waiting < self.most_texts:
            sizes = f"a request may have {self.most_texts} texts, but the queue holds {self.waiting}"
            raise BadInput(f"{sizes}; let more texts wait, or allow fewer in a request")
        if self.waiting_bytes < self.most_bytes:
            sizes = f"a request may have {self.most_bytes:,} bytes, but {self.waiting_bytes:,} may wait"
            raise BadInput(f"{sizes}; let more bytes wait, or allow fewer in a request")
        for origin in self.cors:
            if not _ORIGIN.fullmatch(origin):
                raise BadInput(f"{origin!r} is not a web origin; pass one such as https://example.org")
        for key in self.keys:
            if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise BadInput(f"an API key needs {_SHORTEST_KEY} or more ASCII characters without spaces")


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Returns the keys in a file, one per line, and in an environment variable, comma-separated."""
    keys: list[str] = []
    if file is not None:
        try:
            keys = _listed_keys(file.read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{file} can't be read; pass a text file with one API key per line") from error
        if not keys:
            raise BadInput(f"{file} has no API key; write one per line")
    if variable is not None:
        more = _listed_keys(variable.split(","))
        if not more:
            raise BadInput(f"${KEYS_VARIABLE} is set but has no API key; unset it to serve without keys")
        keys += more
    return tuple(dict.fromkeys(keys))


def _listed_keys(entries: Iterable[str]) -> list[str]:
    return [key for key in map(str.strip, entries) if key and not key.startswith("#")]
