"""The commands `trundle index build`, `search` and `check`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import pico


def test_build_search_and_check(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model, index = str(pico_folders("bert", 1)), str(tmp_path / "index")
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(pico.different_texts(84)))
    code, out, err = run("index", "build", model, "--data", str(data), "-o", index, "--precision", "int8")
    assert (code, "84 texts, 84 of them new" in out) == (0, True), err
    assert "exported" in err
    code, out, _ = run("index", "build", model, "--data", str(data), "-o", index, "--json")
    assert json.loads(out) == {"index": index, "texts": 84, "added": 0, "empty": 0, "precision": "int8"}
    code, out, err = run("index", "search", index, "queries are short the fox", "-n", "1")
    assert (code, out.strip()) == (0, "1.000  queries are short the fox"), err
    code, out, _ = run("index", "search", index, "a", "b", "-n", "2", "--json")
    assert [len(row["results"]) for row in json.loads(out)] == [2, 2]
    code, out, err = run("index", "check", model, "--against", index)
    agreement = re.search(r"agreement@10 ([\d.]+)%", out)
    assert agreement, err
    assert float(agreement[1]) > 97  # stored in int8, so neighbours at nearly one distance may change places
    code, out, err = run("index", "check", model, "--against", index, "--teacher", model, "--json")
    assert json.loads(out)["built_by_teacher"] == pytest.approx(1)
    (tmp_path / "empty.txt").touch()
    other = tmp_path / "other"
    code, _, err = run("index", "build", model, "--data", str(tmp_path / "empty.txt"), "-o", str(other))
    assert (code, "has no rows" in err, other.exists()) == (2, True, False)
    inside = tmp_path / "index" / "texts.txt"
    shutil.copy(data, inside)
    for words, said in (
        (
            ("index", "build", model, "--data", str(inside), "-o", index, "--force"),
            "an input of this command",
        ),
        (("index", "search", str(tmp_path / "no"), "a"), "there is no index"),
        (("index", "check", model, "--against", index, "--table", "t"), "leave out its table"),
        (("index", "build", model, "--data", "missing.txt", "-o", index), "missing.txt"),
        (
            ("index", "check", "no-such-model", "--against", "http://localhost:6333"),
            "trundle index read --help",
        ),
        (("index", "read", index, "-o", str(data)), "does not end in .parquet"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert said in err
    assert inside.read_text() == data.read_text()


def test_read_and_check_any_index(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model, index, table = str(pico_folders("bert", 1)), str(tmp_path / "index"), str(tmp_path / "out.parquet")
    (tmp_path / "texts.txt").write_text("\n".join(pico.different_texts(84)))
    assert run("index", "build", model, "--data", str(tmp_path / "texts.txt"), "-o", index)[0] == 0
    code, out, err = run("index", "read", index, "-o", table)
    assert (code, "84 of 84 rows of" in out) == (0, True), err
    assert pq.read_schema(table).names == ["id", "text", "vector"]
    assert "already exists" in run("index", "read", index, "-o", table)[2]
    code, out, _ = run("index", "read", index, "-o", table, "--sample", "60", "--force", "--json")
    assert {"rows": 60, "left_out": 0, "metric": "cosine"}.items() <= json.loads(out).items()
    assert "is an input of this command" in run("index", "read", table, "-o", table, "--force")[2]
    code, out, err = run("index", "check", model, "--against", table, "--fail-under", "100")
    assert (code, "agreement@10 100.0%" in out) == (0, True), err
    cut = str(tmp_path / "cut")
    assert run("depth", str(pico_folders("bert", 2)), "--keep", "1", "--heal", "none", "-o", cut)[0] == 0
    code, out, err = run("index", "check", cut, "--against", table, "--fail-under", "99.5")
    assert (code, "agreement@10" in out, "under 99.5%" in err) == (1, True, True), err


def test_a_model_that_was_trained_in_its_place(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model, index = tmp_path / "model", str(tmp_path / "index")
    shutil.copytree(pico_folders("bert", 1), model)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(pico.different_texts(20)))
    build = ("index", "build", str(model), "--data", str(data), "-o", index)
    assert run(*build)[0] == 0
    weights = load_file(model / "model.safetensors")
    save_file({name: weight * 1.5 for name, weight in weights.items()}, model / "model.safetensors")
    for words in (build, ("index", "search", index, "a text")):
        code, _, err = run(*words)
        assert (code, "has changed since" in err) == (2, True), err
    assert run(*build, "--force")[0] == 0
    assert run("index", "search", index, "a text")[0] == 0
