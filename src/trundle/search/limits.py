"""What a search is asked for, checked before anything heavy is imported: its budget, its teacher, its texts.

Budgets are as people write them: 12MB, 10x, 20M-params, 5ms.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from trundle.errors import BadInput
from trundle.teacher import teacher_kind

if TYPE_CHECKING:
    from trundle.data.corpus import Corpus
    from trundle.progress import Progress
    from trundle.teacher.teacher import Teacher

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>k|m|g)?(?P<kind>b|x|ms|-?params|-?parameters)")
_EXAMPLES = "12MB, 10x, 20M-params or 5ms"
MINUTES = 30.0
_FEWEST = 200
"""The fewest texts of which some can be held out for training, calibration and the comparison."""
_READING_SHARE = 0.15
"""The share of the time that reading an index may take."""


@dataclass(frozen=True, kw_only=True)
class _Budget:
    """Limits; None means no limit."""

    bytes: int | None = None
    """Size of the exported file: the graph, or the weights if there is no graph."""
    parameters: int | None = None
    milliseconds: float | None = None
    """For one short query on this machine."""

    def __str__(self) -> str:
        limits = [
            "" if self.bytes is None else f"{self.bytes / 1e6:.4g} MB",
            "" if self.parameters is None else f"{self.parameters / 1e6:.4g}M parameters",
            "" if self.milliseconds is None else f"{self.milliseconds:.4g} ms a query",
        ]
        return " and ".join(filter(None, limits))

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def allows(self, *, file_bytes: int, parameters: int, milliseconds: float | None = None) -> bool:
        """Whether a model of this size and speed is within all limits; an unknown speed counts as within."""
        return not self.exceeded(file_bytes=file_bytes, parameters=parameters, milliseconds=milliseconds)

    def exceeded(self, *, file_bytes: int, parameters: int, milliseconds: float | None) -> tuple[str, ...]:
        """Returns a sentence for each limit that a model of this size and speed exceeds."""
        found = []
        if self.bytes is not None and file_bytes > self.bytes:
            size, most = file_bytes / 1e6, self.bytes / 1e6
            found.append(f"the file has {size:.6g} MB, over the budget of {most:.6g} MB")
        if self.parameters is not None and parameters > self.parameters:
            found.append(f"there are {parameters:,} parameters, over the budget of {self.parameters:,}")
        if self.milliseconds is not None and milliseconds is not None and milliseconds > self.milliseconds:
            over = f"over the budget of {self.milliseconds:.4g} ms"
            found.append(f"a query takes {milliseconds:.4g} ms, {over}")
        return tuple(found)


def parse_budget(words: Sequence[str], *, whole_bytes: int | None) -> _Budget:
    """Parses limits; `10x` is a tenth of `whole_bytes`, the size of the model itself, if it is known."""
    found: dict[str, str] = {}
    whole = _Budget()
    for word in (part.strip() for each in words for part in each.split(",")):
        match = _PATTERN.fullmatch(word.lower())
        if match is None or float(match["number"]) == 0:
            raise BadInput(f"{word!r} is not a budget; pass {_EXAMPLES}, or several separated by commas")
        if match["kind"] == "x" and whole_bytes is None:
            raise BadInput(f"{word} is a share of a model that is not here; pass a size such as 12MB")
        amount = float(match["number"]) * _UNITS[match["unit"] or ""]
        if match["kind"] == "x" and amount < 1:
            raise BadInput(
                f"{word} is larger than the model itself; pass {1 / amount:g}x for {amount:g} of it"
            )
        limits: dict[str, tuple[str, Any]] = {
            "b": ("bytes", int(amount)),
            "x": ("bytes", int((whole_bytes or 0) / amount)),
            "ms": ("milliseconds", amount),
        }
        kind, limit = limits.get(match["kind"], ("parameters", int(amount)))
        if kind in found:
            raise BadInput(f"{found[kind]} and {word} both limit the {kind}; keep one of them")
        found[kind] = word
        whole = replace(whole, **{kind: limit})
    return whole


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Who teaches, if that is not a local model alone."""

    index: str | None = None
    """A file, a folder or the address of a database that holds texts and vectors."""
    table: str | None = None
    texts: str | None = None
    vectors: str | None = None
    """Its table or collection and its columns, if there are several."""
    rows: int | None = None
    """How many rows of it are read at most, if not the usual number."""
    model: str | None = None
    """The model's name, if the teacher is an endpoint."""
    calls: int | None = None
    """How many texts an endpoint, or who made the index, gets at most."""
    queries: str | None = None
    """A file of queries that who made the index labels."""
    opened: Teacher | None = None
    """The index, if it is open already."""

    def check(self, source: str, corpus: Corpus | None, *, pair: bool) -> None:
        """Rejects options that contradict each other, and too few texts: none of them could be held out."""
        kind = teacher_kind(source) if source else None
        if self.index is None:
            if not source:
                raise BadInput("name what to compress: a model, or an index with --index")
            if self.queries:
                raise BadInput("--queries goes with --index; pass other texts with --data")
            if self.table or self.texts or self.vectors or self.rows:
                raise BadInput("--table, --text-column, --vector-column and --rows go with --index")
            if kind == "model" and self.calls:
                raise BadInput("--teacher-calls limits an endpoint, or who made an index; leave it out")
        if self.index is not None and kind not in (None, "model", "endpoint"):
            raise BadInput(f"{source} has vectors of its own texts only; name the model that made the index")
        brings_texts = self.index is not None or kind in ("table", "store", "index")
        if brings_texts and corpus is not None:
            raise BadInput("an index, table or store has its own texts; leave --data out")
        if self.queries and not source:
            raise BadInput("your own queries need the model that made the index; name it with --teacher")
        if kind == "endpoint" and self.model is None:
            raise BadInput("an endpoint serves several models; name one with --teacher-model")
        if pair and kind != "model":
            raise BadInput("--pair needs a local model as teacher; leave it out")
        if corpus is None and not brings_texts:
            raise BadInput("the small model learns from texts; pass them with --data")
        count = _FEWEST if corpus is None else sum(int(fact["texts"]) for fact in corpus.facts())
        if count < _FEWEST:
            raise BadInput(f"{count:,} texts are too few to learn from; pass at least {_FEWEST:,}")

    def open_index(self, *, minutes: float, seed: int, fresh: bool, progress: Progress) -> Teacher:
        """Returns the index as a teacher, which is opened once; nothing of it is read yet."""
        from trundle.teacher.stored import ROWS
        from trundle.teacher.teacher import open_index

        assert self.index is not None
        return self.opened or open_index(
            self.index,
            named={"table": self.table, "texts": self.texts, "vectors": self.vectors},
            rows=self.rows or ROWS,
            seed=seed,
            seconds=60 * minutes * _READING_SHARE,
            fresh=fresh,
            progress=progress,
        )
