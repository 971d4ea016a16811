"""What the planner's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from pico import TEXTS
from trundle.data import read_corpus
from trundle.data.corpus import Corpus
from trundle.planner import candidates as space
from trundle.planner import halving, prospects, search
from trundle.planner.speed import Speed


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for text in TEXTS for number in range(120)))
    return read_corpus([str(texts)], seed=0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seconds instead of minutes, pico vocabularies, and no timing of graphs or teachers."""
    monkeypatch.setattr(space, "FEWEST_TOKENS", 120)
    monkeypatch.setattr(space, "WIDTHS", space.WIDTHS[:1])
    monkeypatch.setattr(halving, "SHORTEST_TRIAL", 0.1)
    monkeypatch.setattr(halving, "SHORTEST_GPU_TRIAL", 0.1)
    monkeypatch.setattr(halving, "TRIED", 3)
    monkeypatch.setattr(search, "TRYING", 1000.0)
    monkeypatch.setattr(
        prospects, "measure_speed", lambda *_, **__: Speed(fixed=0.1, attention=1e-6, mlp=1e-6)
    )
    monkeypatch.setattr(prospects.Prospects, "reading_rate", lambda _: 1e6)
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
