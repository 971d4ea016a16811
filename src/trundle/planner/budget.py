"""What a model may weigh and take, in the words people use: 12MB, 10x, 20M-params, 5ms."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trundle.errors import BadInput

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
PATTERN = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>k|m|g)?(?P<kind>b|x|ms|-?params|-?parameters)")
EXAMPLES = "12MB, 10x, 20M-params or 5ms"


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits; None where there is none."""

    bytes: int | None = None
    """Of the file that is shipped: the int8 graph, or the weights."""
    parameters: int | None = None
    milliseconds: float | None = None
    """For one short query on this machine."""

    def __str__(self) -> str:
        told = [
            None if self.bytes is None else f"{self.bytes / 1e6:.4g} MB",
            None if self.parameters is None else f"{self.parameters / 1e6:.4g}M parameters",
            None if self.milliseconds is None else f"{self.milliseconds:.4g} ms a query",
        ]
        return " and ".join(each for each in told if each)

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {"bytes": self.bytes, "parameters": self.parameters, "milliseconds": self.milliseconds}

    def allows(self, *, file_bytes: int, parameters: int, milliseconds: float | None = None) -> bool:
        """Whether something of this size and speed is within all limits; an unknown speed is."""
        return not self.exceeded(file_bytes=file_bytes, parameters=parameters, milliseconds=milliseconds)

    def exceeded(
        self, *, file_bytes: int, parameters: int, milliseconds: float | None = None
    ) -> tuple[str, ...]:
        """A sentence for each limit that something of this size and speed is over."""
        told = []
        if self.bytes is not None and file_bytes > self.bytes:
            told.append(
                f"the file has {file_bytes / 1e6:.6g} MB, over the budget of {self.bytes / 1e6:.6g} MB"
            )
        if self.parameters is not None and parameters > self.parameters:
            told.append(f"there are {parameters:,} parameters, over the budget of {self.parameters:,}")
        if self.milliseconds is not None and milliseconds is not None and milliseconds > self.milliseconds:
            told.append(f"a query takes {milliseconds:.4g} ms, over the budget of {self.milliseconds:.4g} ms")
        return tuple(told)


def parse_budget(words: Sequence[str], *, whole_bytes: int) -> Budget:
    """Read every limit; `10x` is a tenth of the model's own `whole_bytes`. The same kind twice is refused."""
    found: dict[str, tuple[str, Budget]] = {}
    for word in (part.strip() for each in words for part in each.split(",")):
        match = PATTERN.fullmatch(word.lower())
        if match is None or float(match["number"]) == 0:
            raise BadInput(f"{word!r} is no budget; say {EXAMPLES}, or several with commas between")
        amount = float(match["number"]) * UNITS[match["unit"] or ""]
        limits = {
            "b": Budget(bytes=int(amount)),
            "x": Budget(bytes=int(whole_bytes / amount)),
            "ms": Budget(milliseconds=amount),
        }
        limit = limits.get(match["kind"], Budget(parameters=int(amount)))
        kind = next(key for key, value in limit.as_json().items() if value is not None)
        if kind in found:
            raise BadInput(f"{found[kind][0]} and {word} both limit the {kind}; keep one of them")
        found[kind] = (word, limit)
    whole = Budget()
    for kind, (_, limit) in found.items():
        whole = replace(whole, **{kind: limit.as_json()[kind]})
    return whole
