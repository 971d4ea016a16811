"""What the page's routes compute, without a browser: its own event loop must not meet the browser's."""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trundle.serve import playground

PARAGRAPHS = ["The fox jumps over the lazy dog.", "A small bed slides under a large one."]


def test_a_passage_without_tokens_does_not_stop_the_others() -> None:
    class Model:
        dimensions = 2

        def read(self, texts: Sequence[str]) -> list[list[int]]:
            return [[1] if text.isalpha() else [] for text in texts]

        async def encode(self, texts: Sequence[str]) -> Any:
            assert all(text.isalpha() for text in texts), "the server rejects such a request"
            return SimpleNamespace(vectors=np.full((len(texts), 2), len(texts[0]), np.float32))

    model: Any = Model()
    found = asyncio.run(playground._encode_when_free(model, model, ["one", "\u200b", "two"]))
    assert found.tolist() == [[3, 3], [0, 0], [3, 3]]
    assert asyncio.run(playground._encode_when_free(model, model, ["\u200b"])).tolist() == [[0, 0]]


def test_passages() -> None:
    assert playground._split_passages("\n\n".join(PARAGRAPHS)) == PARAGRAPHS
    assert playground._split_passages("first line of it\nsecond line of it\n") == [
        "first line of it",
        "second line of it",
    ]
    long = "This is a sentence of some words. " * 100
    pieces = playground._split_passages(long)
    assert all(len(piece) <= playground._LONGEST for piece in pieces)
    numbered = " ".join(f"Sentence number {number} has some words." for number in range(100))
    assert " ".join(playground._split_passages(numbered)) == numbered
    words = " ".join(f"word{number}" for number in range(1000))
    assert " ".join(playground._split_passages(words)) == words
    letters = "".join(chr(0x4E00 + number) for number in range(2000))
    unbroken = playground._split_passages(letters)
    assert "".join(unbroken) == letters
    assert all(len(piece) <= playground._LONGEST for piece in unbroken)
    assert playground._split_passages("") == []


@pytest.mark.parametrize("text", ["a" * 1_000_000, "word " * 200_000, "A sentence. " * 83_333])
def test_a_long_paragraph_is_not_copied_for_each_piece(text: str) -> None:
    """Copying the rest after each piece would take a time that grows with the square of the length."""
    tracemalloc.start()
    try:
        pieces = playground._PIECE.findall(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < sum(map(sys.getsizeof, pieces)) + len(text) // 2


def test_overlap_counts_shared_places() -> None:
    columns = [{"results": [{"place": 1}, {"place": 2}]}, {"results": [{"place": 2}, {"place": 3}]}]
    second = playground._with_overlap(columns)[1]
    assert second["overlap"] == 0.5
    assert [result["teacher_rank"] for result in second["results"]] == [2, None]
