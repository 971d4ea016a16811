"""If a graph is rejected, the trained model is still written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trundle.cli.compression import _show_outcome
from trundle.data.corpus import Corpus
from trundle.errors import BadModel
from trundle.model.cost import cost
from trundle.model.load import load
from trundle.model.save import weight_bytes
from trundle.pipeline.run import Request
from trundle.progress import SILENT
from trundle.records import PLANNING_FILE
from trundle.search import budget, prospects, search
from trundle.search.candidates import _Candidate, _list_candidates
from trundle.search.limits import _Budget
from trundle.search.prospects import _export_graph, _Speed, _Timed
from trundle.search.search import _ship, compress_to_budget

GATE = (
    "int8 loses too much on these texts (cosine 0.9; with 3 of 6 matmuls in float cosine 0.95), so nothing "
    "was written; use --half, or allow more with --max-cosine-loss and --max-agreement-loss"
)
SPEED = _Speed(fixed=0.1, attention=1e-6, mlp=1e-6)


@pytest.fixture
def shipped(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[_Budget], tuple[_Candidate, Path, dict[str, Any]]]:
    """A model whose int8 graph is rejected, exported within some limits."""
    plain = _export_graph

    def refuse(folder: Path, precision: Any, **options: Any) -> int:
        if precision == "int8":
            raise BadModel(GATE)
        return plain(folder, precision, **options)

    monkeypatch.setattr(search, "_export_graph", refuse)
    output = tmp_path / "small"
    shutil.copytree(pico_folders("bert", 2), output)
    candidate = _list_candidates(load(output), "pico", dimensions=32, precisions=["int8"])[0]
    speeds = {("pico", "float32"): SPEED, ("pico", "int8"): SPEED}

    def ship(limits: _Budget) -> tuple[_Candidate, Path, dict[str, Any]]:
        made = _ship(candidate, output, corpus, limits=limits, speeds=speeds, progress=SILENT)
        return candidate, output, made

    return ship


def test_a_float_graph_replaces_a_rejected_one(
    shipped: Callable[[_Budget], tuple[_Candidate, Path, dict[str, Any]]],
) -> None:
    _, output, made = shipped(_Budget(parameters=10**6))
    assert made["bytes"] == (output / "onnx" / "model.onnx").stat().st_size
    assert made["milliseconds"] > 0
    assert made["no_graph"] == (
        "there is no int8 graph: int8 loses too much on these texts (cosine 0.9; with 3 of 6 matmuls in "
        "float cosine 0.95); the float32 graph fits as well and is there instead"
    )


def test_matmuls_that_lose_too_much_in_int8_run_in_float(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file stays as small where the time allows it."""
    asked: list[str] = []

    def export_graph(_: Path, precision: str, **__: Any) -> int:
        asked.append(precision)
        if precision == "int4+int8":
            raise BadModel("int4+int8 loses too much; use --int4 alone")
        return 7

    monkeypatch.setattr(search, "_export_graph", export_graph)
    monkeypatch.setattr(search, "_time_queries", lambda _: [_Timed(milliseconds=0.3, undisturbed=True)])
    folder = pico_folders("bert", 2)
    candidate = _list_candidates(load(folder), "pico", dimensions=32, precisions=["int4+int8"])[0]
    speeds = {("pico", "float32"): SPEED, ("pico", "int8"): SPEED}
    limits = _Budget(milliseconds=1000.0)
    made = _ship(candidate, folder, corpus, limits=limits, speeds=speeds, progress=SILENT)
    assert asked == ["int4+int8", "int4"]
    assert made["bytes"] == 7
    assert "the int4 graph fits as well" in made["no_graph"]


@pytest.mark.parametrize("over", ["bytes", "milliseconds"])
def test_no_graph_is_forced_into_a_budget_it_does_not_fit(
    over: str, shipped: Callable[[_Budget], tuple[_Candidate, Path, dict[str, Any]]]
) -> None:
    limits = _Budget(bytes=100_000) if over == "bytes" else _Budget(milliseconds=0.05)
    _, output, made = shipped(limits)
    assert not (output / "onnx").exists()
    assert made["bytes"] == weight_bytes(output)
    assert "the weights are there without it" in made["no_graph"]
    assert "--half" not in made["no_graph"]
    assert load(output).encode(["a text"]).shape == (1, 32)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One candidate, trained for a second."""
    monkeypatch.setattr(budget, "_SHORTEST_TRIAL", 0.1)
    monkeypatch.setattr(budget, "_TRIED", 1)
    monkeypatch.setattr(prospects, "_measure_speed", lambda *_, **__: SPEED)
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("at_once")
def test_the_plan_is_written_before_anything_is_exported(
    pico_folders: Callable[[str], Path], corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_ship", cut_short)
    folder, output = pico_folders("bert", 2), tmp_path / "small"
    words = [f"{cost(load(folder)).parameters // 2}-params"]
    with pytest.raises(KeyboardInterrupt):
        compress_to_budget(Request(source=str(folder), output=output, corpus=corpus), words, minutes=0.02)
    planning = json.loads((output / PLANNING_FILE).read_text())
    assert planning["candidates"][0]["outcome"] == "chosen"
    assert planning["measured"]["parameters"] == cost(load(output)).parameters
    assert planning["measured"]["bytes"] is None


@pytest.mark.usefixtures("at_once")
def test_a_result_over_the_budget_is_reported(
    pico_folders: Callable[[str], Path],
    corpus: Corpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        search, "_ship", lambda *_, **__: {"bytes": 3_000_000, "milliseconds": 99.0, "no_graph": None}
    )
    folder, output = pico_folders("bert", 2), tmp_path / "small"
    words = [f"{cost(load(folder)).parameters // 2}-params", "2MB", "50ms"]
    outcome = compress_to_budget(
        Request(source=str(folder), output=output, corpus=corpus), words, minutes=0.02
    )
    told = ("the file has 3 MB, over the budget of 2 MB", "a query takes 99 ms, over the budget of 50 ms")
    assert outcome.remarks == told
    assert json.loads((output / PLANNING_FILE).read_text())["remarks"] == list(told)
    _show_outcome(outcome)
    assert "A query takes 99 ms, over the budget of 50 ms." in capsys.readouterr().out
    untimed = replace(outcome, bytes=1, milliseconds=None, no_graph="there is no graph")
    assert untimed.remarks == ("there is no graph", "no query was timed, so 50 ms a query is not proven")
    busy = replace(outcome, bytes=1, undisturbed=False)
    assert busy.remarks[1].startswith("other programs used the processor")
    assert not replace(busy, milliseconds=49.0).remarks
