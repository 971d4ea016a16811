"""What every store can do, and the records they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, Protocol

from trundle.embedder import Vectors
from trundle.errors import BadInput

_Precision = Literal["float", "int8", "binary"]
_KEY_BYTES = 16
_OVERSAMPLE = 10
"""Candidates per wanted result that are looked at again with full vectors."""
_EXACT_UP_TO = 50_000
"""A set of this many texts is searched whole; beyond it a graph is built."""


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a store must be told once."""

    model: str
    dimensions: int
    precision: _Precision = "float"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a builder asks for; with no precision an index that is there keeps its own."""

    model: str
    dimensions: int
    precision: _Precision | None = None

    @property
    def facts(self) -> _Facts:
        """What a new store is told."""
        return _Facts(model=self.model, dimensions=self.dimensions, precision=self.precision or "float")


@dataclass(frozen=True, kw_only=True)
class _Found:
    """One text that was found, with its cosine to the query."""

    text: str
    score: float


@dataclass(frozen=True, kw_only=True)
class _Sample:
    """Some texts of a store with their vectors, and how many texts it has in all."""

    texts: tuple[str, ...]
    vectors: Vectors
    total: int


class _Readable(Protocol):
    """A store that is only looked at: also one that somebody else filled."""

    @property
    def name(self) -> str:
        """Where it is, without secrets."""
        ...

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        ...

    def sample(self, count: int, seed: int) -> _Sample:
        """Up to `count` texts drawn evenly."""
        ...

    def close(self) -> None:
        """Let go of files and connections."""
        ...


class _Store(_Readable, Protocol):
    """A store of ours: it can be added to and searched."""

    @property
    def facts(self) -> _Facts:
        """What it was told when it was made."""
        ...

    def count(self) -> int:
        """How many texts there are."""
        ...

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Those that are not stored yet, each once."""
        ...

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Store texts that `missing` named; all of them or none."""
        ...

    def finish(self) -> None:
        """Make what large sets need to be searched fast."""
        ...

    def search(self, queries: Vectors, k: int) -> list[list[_Found]]:
        """The k nearest texts of each query by cosine, best first."""
        ...


def _agreed(there: _Facts, wanted: Wanted, name: str) -> _Facts:
    """The facts of a store that may be added to, or a refusal: two models' vectors don't go into one index."""
    same = there.model == wanted.model and there.dimensions == wanted.dimensions
    if not same or wanted.precision not in (None, there.precision):
        raise BadInput(
            f"{name} was built by {there.model} with {there.dimensions} numbers as {there.precision}; "
            "say --force to build it anew, or choose another place"
        )
    return there


def _key_of(text: str) -> bytes:
    """What tells a text from all others."""
    return blake2b(text.encode("utf-8"), digest_size=_KEY_BYTES).digest()
