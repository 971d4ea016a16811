"""Fixtures of the search tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pico import TEXTS
from trundle.data.corpus import Corpus, read_corpus
from trundle.search import budget, candidates, prospects, search
from trundle.search.candidates import _WIDTHS
from trundle.search.prospects import _Prospects, _Speed


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for text in TEXTS for number in range(120)))
    return read_corpus([str(texts)], seed=0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seconds instead of minutes, pico vocabularies, and no timing of graphs or teachers."""
    monkeypatch.setattr(candidates, "_FEWEST_TOKENS", 120)
    monkeypatch.setattr(candidates, "_WIDTHS", _WIDTHS[:1])
    monkeypatch.setattr(budget, "_SHORTEST_TRIAL", 0.1)
    monkeypatch.setattr(budget, "_SHORTEST_GPU_TRIAL", 0.1)
    monkeypatch.setattr(budget, "_TRIED", 3)
    monkeypatch.setattr(search, "_TRYING", 1000.0)
    monkeypatch.setattr(
        prospects, "_measure_speed", lambda *_, **__: _Speed(fixed=0.1, attention=1e-6, mlp=1e-6)
    )
    monkeypatch.setattr(prospects, "_ROUNDS", 1)
    monkeypatch.setattr(prospects, "_SECONDS", 0.01)
    monkeypatch.setattr(_Prospects, "reading_rate", lambda _: 1e6)
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
