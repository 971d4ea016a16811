"""What the planner's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pico import TEXTS
from trundle.data import read_corpus
from trundle.data.corpus import Corpus


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for text in TEXTS for number in range(120)))
    return read_corpus([str(texts)], seed=0)
