"""The command `trundle report`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cut(run: Run, pico_folders: Callable[[str], Path], tmp_path: Path) -> Path:
    code, _, err = run("depth", str(pico_folders("bert")), "--keep", "2", "-o", str(tmp_path / "cut"), "-q")
    assert code == 0, err
    return tmp_path / "cut"


def test_a_page_and_its_figures(run: Run, cut: Path, tmp_path: Path) -> None:
    code, out, err = run("report", str(cut), "-o", str(tmp_path / "page.html"))
    assert (code, err) == (0, "")
    assert "page.html" in out
    assert "page.json" in out
    content = json.loads((tmp_path / "page.json").read_text(encoding="utf-8"))
    assert content["runs"][0]["name"] == "cut"
    assert (tmp_path / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_output(run: Run, cut: Path, tmp_path: Path) -> None:
    code, out, _ = run("report", str(cut), "-o", str(tmp_path / "page.html"), "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "page.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("nowhere",), "there is no folder 'nowhere'; name a model folder that trundle wrote"),
        (("nowhere", "-o", "page.pdf"), "page.pdf is not a name for an HTML file; end it in .html"),
        (
            ("nowhere", "-o", "no/page.html"),
            "no/page.html can't be written; name a file in a folder that exists",
        ),
    ],
)
def test_bad_input_gives_one_sentence(
    run: Run, words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("report", *words)
    assert (code, out) == (2, "")
    assert err == f"trundle: {sentence}\n"
    assert not list(tmp_path.iterdir())
