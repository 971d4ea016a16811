"""What `align` does differently for a model without layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pico
from compressing import compress
from trundle.data.corpus import read_corpus
from trundle.methods.align import align
from trundle.recipe import parse_recipe


@pytest.mark.parametrize(("keep", "rate"), [(0, 1e-3), (2, 1e-4)])
def test_a_table_learns_at_a_rate_of_its_own(
    keep: int, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    settings_for = align.settings_for

    def noted(*given: Any, **named: Any) -> Any:
        made = settings_for(*given, **named)
        rates.append(made.learning_rate)
        return made

    monkeypatch.setattr(align, "settings_for", noted)
    folder = tmp_path / "teacher"
    pico.model("bert", str(tmp_path / "backbone")).save_pretrained(str(folder))
    (tmp_path / "texts.txt").write_text(
        "\n".join(f"{text} {number}" for number in range(7) for text in pico.TEXTS)
    )
    recipe = f"steps: [{{depth: {{keep: {keep}}}}}, {{align: {{steps: 2, batch_size: 8}}}}]"
    corpus = read_corpus([str(tmp_path / "texts.txt")], seed=0)
    compress(str(folder), parse_recipe(recipe, name="x"), output=tmp_path / "out", corpus=corpus)
    assert rates == [rate]
