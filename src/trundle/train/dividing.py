"""A batch that does not fit into memory, in parts that do: where the loss is a mean over texts, its gradients are the same.

What this is not: a way to train in less memory by plan. It costs a failed attempt each time the room is found to be smaller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

B = TypeVar("B")


@dataclass(kw_only=True)
class Divider(Generic[B]):
    """How batches are cut, and how much may be in one part."""

    texts: Callable[[B], int]
    size: Callable[[B], int]
    """What a part takes, in any unit that grows with its memory; 0 for a batch that can't be cut."""
    halves: Callable[[B], tuple[B, B]]
    say: Callable[[str], None]
    room: float = field(default=float("inf"), init=False)

    def parts(self, batch: B) -> list[tuple[B, float]]:
        """The batch as parts that have room, each with its share of the texts."""
        whole, waiting, found = self.texts(batch), [batch], []
        while waiting:
            part = waiting.pop()
            if self.size(part) <= self.room or self.texts(part) == 1:
                found.append((part, self.texts(part) / whole))
            else:
                waiting += reversed(self.halves(part))
        return found

    def give_way(self, batch: B) -> bool:
        """Allow half of what the largest part of this batch took; False where nothing smaller is left to try."""
        largest, _ = max(self.parts(batch), key=lambda part: self.size(part[0]))
        if self.texts(largest) == 1 or self.size(largest) == 0:
            return False
        if self.room == float("inf"):
            self.say("a batch does not fit into memory, so it goes through in parts; only the time changes")
        self.room = self.size(largest) / 2
        return True
