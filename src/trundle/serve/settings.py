"""What an operator may set; every limit has a default that a small machine survives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trundle.errors import BadInput, MissingExtra

KEYS_VARIABLE = "TRUNDLE_API_KEYS"
_LEAST_KEY = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and permissions of one server."""

    keys: tuple[str, ...] = ()
    """Any of these opens the server; none: everybody who can reach it may use it."""
    cors: tuple[str, ...] = ()
    """Web pages from these origins may call; none by default."""
    page: bool = True
    """Whether the page at / is there."""
    most_texts: int = 2048
    """Texts in one request."""
    most_tokens: int = 300_000
    """Tokens in one request, after each text was cut to what the model takes."""
    most_bytes: int = 8 << 20
    """Bytes of one request's body."""
    waiting: int = 4096
    """Texts that may wait; beyond it clients are told to come again."""
    timeout: float = 30.0
    """Seconds until a request is given up."""
    body_timeout: float = 10.0
    """Seconds a client may take to send its body."""

    def __post_init__(self) -> None:
        for name in ("most_texts", "most_tokens", "most_bytes", "waiting", "timeout", "body_timeout"):
            if getattr(self, name) <= 0:
                raise BadInput(f"{name.replace('_', ' ')} must be above 0; leave it out for the default")
        if self.waiting < self.most_texts:
            raise BadInput(
                f"a request may hold {self.most_texts} texts, but only {self.waiting} may wait; "
                "let more wait, or take fewer in a request"
            )
        for key in self.keys:
            if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise BadInput(f"an API key needs {_LEAST_KEY} or more plain characters without spaces")


def read_keys(file: Path | None, variable: str | None) -> tuple[str, ...]:
    """Keys from a file with one a line, and from the environment, comma-separated."""
    lines: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"{file} can't be read as a list of API keys; give a text file, one key a line"
            ) from error
    found = [key.strip() for key in (*lines, *(variable or "").split(","))]
    keys = tuple(dict.fromkeys(key for key in found if key and not key.startswith("#")))
    if file is not None and not keys:
        raise BadInput(f"{file} holds no API key; write one a line")
    return keys


try:
    import fastapi as fastapi
    import prometheus_client as prometheus_client
    import uvicorn as uvicorn
except ImportError as error:
    raise MissingExtra("serve", "serve") from error
