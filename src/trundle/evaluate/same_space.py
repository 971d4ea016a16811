"""Whether two models speak of the same space at all: a few sentences that every such pair knows again."""

from __future__ import annotations

import numpy as np

from trundle.embedder import Vectors

SENTENCES = (
    "The bank raised its interest rate by half a percent.",
    "Whales breathe air and nurse their young.",
    "How do I undo the last commit in git?",
    "Simmer the onions in butter until they turn golden.",
    "The treaty ended a war of thirty years.",
    "A vaccine teaches the immune system to know a virus.",
    "Our train to the coast was two hours late.",
    "The striker scored twice in the second half.",
)
"""So unlike each other that two models in one space know each one again."""


def find_themselves(queries: Vectors, documents: Vectors) -> bool:
    """Whether most rows of one model are nearest to their own row of the other."""
    near = queries @ documents.T
    return bool(np.mean(near.argmax(axis=1) == np.arange(len(queries))) > 0.5)
