"""What every index can do, and the records that all of them share."""

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
"""Candidates per requested result that are rescored with full vectors."""
_EXACT_UP_TO = 50_000
"""Up to this many texts are searched exactly; for more, a graph is built."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The settings that a build requests; without a precision, an existing index keeps its own."""

    model: str
    dimensions: int
    precision: _Precision | None = None
    identity: str = ""
    """A digest of the model; empty if it is not known."""

    @property
    def facts(self) -> _Facts:
        """The settings of a new index."""
        return _Facts(**vars(self) | {"precision": self.precision or "float"})


@dataclass(frozen=True, kw_only=True)
class _Facts(Wanted):
    """The settings that an index records when it is created."""

    precision: _Precision = "float"


@dataclass(frozen=True, kw_only=True)
class _Hit:
    """One search result: a text and its cosine with the query."""

    text: str
    score: float


class _Store(Protocol):
    """An index that trundle writes and searches."""

    @property
    def name(self) -> str:
        """Its folder or address, without secrets."""

    @property
    def dimensions(self) -> int:
        """The width of its vectors."""

    @property
    def facts(self) -> _Facts:
        """The settings it was created with."""

    def count(self) -> int:
        """Return the number of texts."""

    def missing(self, texts: Sequence[str]) -> list[str]:
        """Return the texts that are not stored yet, without duplicates."""

    def add(self, texts: Sequence[str], vectors: Vectors) -> None:
        """Store texts that `missing` returned; all of them or none."""

    def finish(self) -> None:
        """Build the graph of a large index."""

    def search(self, queries: Vectors, k: int) -> list[list[_Hit]]:
        """Return the k nearest texts of each query by cosine, best first."""

    def close(self) -> None:
        """Close files and connections."""


def _agreed(there: _Facts, wanted: Wanted, name: str) -> _Facts:
    """Return the settings of an existing index; two models' vectors in one index are an error."""
    same = there.model == wanted.model and there.dimensions == wanted.dimensions
    if not same or wanted.precision not in (None, there.precision):
        built = f"by {there.model} with {there.dimensions} dimensions as {there.precision}"
        raise BadInput(f"{name} was built {built}; pass --force to rebuild it, or choose another place")
    if not same_model(there.identity, wanted.identity):
        changed = f"{there.model} has changed since {name} was built"
        raise BadInput(f"{changed}; pass --force to rebuild it, or choose another place")
    return there


def same_model(one: str, other: str) -> bool:
    """Return whether two digests may be those of one model; an unknown one may be any."""
    return not one or not other or one == other


def _key_of(text: str) -> bytes:
    return blake2b(text.encode("utf-8"), digest_size=_KEY_BYTES).digest()
