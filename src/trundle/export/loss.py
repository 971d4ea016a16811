"""What int8 costs, on texts that were not calibrated on, and whether that is too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np

from trundle.data import read_texts
from trundle.embedder import Vectors
from trundle.errors import BadInput
from trundle.export.parity import Parity

Item = TypeVar("Item")

NEIGHBOURS = 10
FEWEST_TEXTS = 40
MOST_TEXTS = 1000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most a smaller graph may lose: of cosine to the torch model, and of its nearest neighbours."""

    cosine: float = 0.01
    agreement: float = 0.1


def neighbour_agreement(ours: Vectors, theirs: Vectors, count: int = NEIGHBOURS) -> float:
    """Mean share of each text's nearest others that both agree on, each searching its own vectors."""

    def nearest(vectors: Vectors) -> np.ndarray:
        lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        products = (vectors / lengths) @ (vectors / lengths).T
        np.fill_diagonal(products, -np.inf)
        return np.argsort(-products, axis=1, kind="stable")[:, :count]

    pairs = zip(nearest(ours), nearest(theirs), strict=True)
    return float(np.mean([len(set(mine) & set(yours)) / count for mine, yours in pairs]))


def passes(parity: Parity, agreement: float, limits: Limits) -> bool:
    """Whether the loss is within the limits."""
    return 1 - parity.mean_cosine <= limits.cosine and 1 - agreement <= limits.agreement


def split_texts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every second text to calibrate on, the others to measure the loss on."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < FEWEST_TEXTS:
        raise BadInput(
            f"{len(distinct)} different texts are too few to calibrate and to measure on; "
            f"give {FEWEST_TEXTS} or more with --calibrate"
        )
    return distinct[::2], distinct[1::2]


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly taken from first to last: sources stand one after the other."""
    step = max(1, -(-len(items) // count))
    return list(items[::step])


def calibration_texts(sources: Sequence[str]) -> list[str]:
    """The first texts of each source, as many in all as calibration can use."""
    share = MOST_TEXTS // max(1, len(sources))
    return [text.text for source in sources for text in islice(read_texts(source), share)]


def keep_in_turn(worst: Sequence[str]) -> list[list[str]]:
    """How much to keep in float at each try: nothing, the worst twentieth, then twice as much each time, up to half."""
    tries: list[list[str]] = [[]]
    count = max(1, len(worst) // 20)
    while count <= len(worst) // 2:
        tries.append(list(worst[:count]))
        count *= 2
    return tries
