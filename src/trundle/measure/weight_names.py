"""How weights may be judged and chosen, by name; light, for the command line reads it."""

from __future__ import annotations

from typing import Literal

Method = Literal["gaprune", "magnitude", "random", "general-fisher", "domain-fisher", "wanda"]
AlignedBy = Literal["row", "tensor"]
FisherScale = Literal["mean", "largest", "raw"]
Selection = Literal["global", "tensor", "row"]
