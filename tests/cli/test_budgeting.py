"""What `compress --budget` prints about its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pico import different_texts
from trundle.cli.compression import _REPORT, _write_report
from trundle.errors import BadInput
from trundle.model.load import load
from trundle.progress import _Silent
from trundle.report import report
from trundle.report.contents import _Report


def test_the_result_is_shown_without_a_comparison_if_texts_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def make_report(*_: object, data: list[str] | None = None, **__: object) -> _Report:
        asked.append(data)
        if data:
            raise BadInput("38 texts are too few; give at least 100")
        return _Report(runs=(), teacher=None)

    monkeypatch.setattr(report, "make_report", make_report)
    monkeypatch.setattr(report, "write_report", lambda _, place: place.write_text("a page"))
    said: list[str] = []
    progress = _Silent()
    monkeypatch.setattr(progress, "say", said.append)
    _write_report(tmp_path, "model", ["few.txt"], texts=7, trust=False, progress=progress)
    assert asked == [["few.txt"], None]
    assert said == ["the report has no comparison: 38 texts are too few; give at least 100"]
    assert (tmp_path / _REPORT).is_file()


def test_an_interrupted_report_leaves_a_complete_model(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    made = SimpleNamespace(run=SimpleNamespace(teacher=SimpleNamespace(model=None)), proof_texts=7)
    monkeypatch.setattr("trundle.search.search.compress_to_budget", lambda *_, **__: made)
    monkeypatch.setattr("trundle.cli.compression._write_report", interrupted)
    (tmp_path / "texts.txt").write_text("\n".join(different_texts(400)), encoding="utf-8")
    words = (
        str(pico_folders("bert", 2)),
        "--data",
        str(tmp_path / "texts.txt"),
        "-o",
        str(tmp_path / "small"),
    )
    code, out, err = run("compress", *words)
    assert (code, out) == (130, "")
    assert err == f"trundle: interrupted; {tmp_path / 'small'} is complete, only report.html is missing\n"


def test_the_verdict_on_the_index_is_the_end(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    monkeypatch.setenv("TRUNDLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trundle.search.budget._SHORTEST_TRIAL", 0.1)
    texts, folder, output = different_texts(400), str(pico_folders("bert", 2)), str(tmp_path / "small")
    vectors = load(folder).encode(texts)
    pq.write_table(pa.table({"text": texts, "vector": list(vectors)}), tmp_path / "rows.parquet")
    index = ("--index", str(tmp_path / "rows.parquet"), "--student", folder)
    code, out, _ = run("compress", *index, "--budget", "1MB", "--minutes", "0.1", "-o", output)
    assert code == 0
    assert "before" not in out
    assert "rows that it was not trained on" in out
    assert "It can encode the queries of this index" in out
    assert out.strip().endswith("to know more.")


def test_fast_reaches_the_search(
    run: Callable[..., tuple[int, str, str]],
    pico_folders: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search(*_: object, fast: bool, **__: object) -> None:
        raise BadInput(f"fast: {fast}")

    monkeypatch.setattr("trundle.search.search.compress_to_budget", search)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(different_texts(400)))
    words = ("compress", str(pico_folders("bert", 2)), "--data", str(texts), "--dry-run")
    assert "fast: False" in run(*words)[2]
    assert "fast: True" in run(*words, "--fast")[2]
    assert "--fast goes with --budget" in run(*words, "--recipe", "leaf", "--fast")[2]
