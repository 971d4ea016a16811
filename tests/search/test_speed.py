"""The time of a query is predicted from a few timed graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from trundle.model.cost import cost, predict_static
from trundle.model.layout import layout_of
from trundle.model.load import load
from trundle.model.surgery import cut, transformer_of
from trundle.search import prospects
from trundle.search.candidates import _list_candidates
from trundle.search.prospects import _fit, _measure_speed, _Speed, _Timed, _timed_cuts


@pytest.mark.parametrize("undisturbed", [True, False])
def test_timings_of_a_busy_machine_are_not_cached(
    undisturbed: bool, pico_folders: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(folders: Sequence[Path]) -> list[_Timed]:
        return [
            _Timed(milliseconds=2.0 + n, undisturbed=undisturbed or n != 1) for n, _ in enumerate(folders)
        ]

    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path))
    monkeypatch.setattr(prospects, "_time_queries", timed)
    if not undisturbed:  # the graphs are the same
        monkeypatch.setattr(prospects, "_export_graph", lambda *_, **__: 0)
    found = _measure_speed(load(pico_folders("bert")), "float32")
    assert found.undisturbed == undisturbed
    assert found.static == 6.0  # the fifth graph: no other tells how long a model without layers takes
    assert found.milliseconds(predict_static(load(pico_folders("bert")))) == 6.0
    assert bool(list((tmp_path / "speed").glob("*.json"))) == undisturbed


@pytest.mark.parametrize("layer", [0.0, 0.2])
def test_speed_is_predicted_from_timings(layer: float, pico_folders: Callable[[str], Path]) -> None:
    model = load(pico_folders("bert"))
    real = _Speed(fixed=0.5, attention=2e-6, mlp=3e-6, layer=layer)
    cuts = _timed_cuts(layout_of(transformer_of(model).model))
    costs = [cost(cut(model, what)) for what in cuts]
    assert len(costs) == 4
    told = _fit(costs, [real.milliseconds(each) for each in costs])
    for each in _list_candidates(model, "", dimensions=32, precisions=["float32"]):
        np.testing.assert_allclose(told.milliseconds(each.cost), real.milliseconds(each.cost), rtol=1e-3)


def test_a_model_that_cant_be_narrowed_is_timed(pico_folders: Callable[[str], Path]) -> None:
    layout = layout_of(transformer_of(load(pico_folders("bert"))).model)
    odd = replace(layout, sizes={**layout.sizes, "head": 1})
    assert len(_timed_cuts(odd)) == 3
    few = _timed_cuts(layout)[:3]
    real = _Speed(fixed=0.5, attention=2e-6, mlp=3e-6)
    model = load(pico_folders("bert"))
    costs = [cost(cut(model, what)) for what in few]
    assert _fit(costs, [real.milliseconds(each) for each in costs]).layer == 0


def test_a_round_times_at_least_one_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the time may be over before the first query."""
    monkeypatch.setattr(prospects, "_SECONDS", 0.0)
    asked: list[str] = []
    encoder = SimpleNamespace(encode=asked.append)
    assert prospects._one_round(encoder, ["a", "b"]).milliseconds >= 0  # type: ignore[arg-type]
    assert asked == ["a"]
