"""Texts to measure on: all texts except those that a model was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trundle.data.corpus import read_corpus, unseen_texts
from trundle.data.texts import read_texts


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    for name in ("one", "two"):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} text {n}" for n in range(900)), "utf-8")
    return [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]


def lineage_of(sources: list[str], seed: int, parent: dict[str, object] | None = None) -> dict[str, object]:
    return {"data": read_corpus(sources, seed=seed).facts(), "seed": seed, "parent": parent}


def test_only_held_out_texts_of_the_training_data_are_used(sources: list[str]) -> None:
    found = unseen_texts(sources, [lineage_of(sources, 5)], 10_000)
    assert found == list(read_corpus(sources, seed=5).held_out())
    assert 0 < len(found) < 400


def test_one_source_of_two_is_split_as_it_was_together_with_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With so many texts the share that is held out depends on how many there were in all.
    monkeypatch.setattr("trundle.data.corpus._ENOUGH_HELD_OUT", 320)
    for name, count in (("small", 1_000), ("large", 6_000)):
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {n}" for n in range(count)), "utf-8")
    both = [str(tmp_path / "small.txt"), str(tmp_path / "large.txt")]
    held = {text.text for text in read_corpus(both, seed=1).held_out()}
    found = {text.text for text in unseen_texts(both[:1], [lineage_of(both, 1)], 10_000)}
    assert found == {text for text in held if text.startswith("small")}


def test_new_texts_are_all_used_and_earlier_lineages_count(sources: list[str]) -> None:
    everything = [text for source in sources for text in read_texts(source)]
    assert unseen_texts(sources, [None], 10_000) == everything
    child = lineage_of(sources[1:], 5, parent=lineage_of(sources[:1], 6))
    found = {text.text for text in unseen_texts(sources, [child], 10_000)}
    assert found == {
        text.text
        for source, seed in zip(sources, (6, 5), strict=True)
        for text in read_corpus([source], seed=seed).held_out()
    }


def test_at_most_the_requested_number_and_no_duplicates(sources: list[str]) -> None:
    found = unseen_texts([sources[0], sources[0]], [], 100)
    assert len(found) == len(set(found)) == 100
