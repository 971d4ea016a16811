"""Budgets as people write them: 12MB, 10x, 20M-params, 5ms. Checked first, so nothing heavy is imported."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trundle.errors import BadInput

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>k|m|g)?(?P<kind>b|x|ms|-?params|-?parameters)")
_EXAMPLES = "12MB, 10x, 20M-params or 5ms"


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
