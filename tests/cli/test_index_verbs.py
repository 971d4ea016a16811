"""An index by its verbs: build, search, check."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import pico


def test_the_verbs(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model, index = str(pico_folders("bert")), str(tmp_path / "index")
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(f"{text} {number}" for number in range(12) for text in pico.TEXTS))
    code, out, err = run("index", "build", model, "--data", str(data), "-o", index, "--precision", "int8")
    assert (code, "84 texts, 84 of them new" in out) == (0, True), err
    assert "exported" in err
    code, out, _ = run("index", "build", model, "--data", str(data), "-o", index, "--json")
    assert json.loads(out) == {"index": index, "texts": 84, "added": 0, "precision": "int8"}
    code, out, err = run("index", "search", index, "queries are short 3", "-n", "1")
    assert (code, out.strip()) == (0, "1.000  queries are short 3"), err
    code, out, _ = run("index", "search", index, "a", "b", "-n", "2", "--json")
    assert [len(row["results"]) for row in json.loads(out)] == [2, 2]
    code, out, err = run("index", "check", model, "--against", index)
    assert (code, "agreement@10 1.000" in out) == (0, True), err
    code, out, err = run("index", "check", model, "--against", index, "--teacher", model, "--json")
    assert json.loads(out)["built_by_teacher"] == pytest.approx(1)
    for words, said in (
        (("index", "search", str(tmp_path / "no"), "a"), "there is no index"),
        (("index", "check", model, "--against", index, "--table", "t"), "leave them out for a folder"),
        (("index", "build", model, "--data", "missing.txt", "-o", index), "missing.txt"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert said in err
