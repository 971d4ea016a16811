"""The command `trundle export`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sentence_transformers import SentenceTransformer

import pico
from trundle.pipeline.pair import _save_pair


def test_a_graph_in_its_own_folder(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "\n".join(f"{text} {number}" for number in range(7) for text in pico.TEXTS), encoding="utf-8"
    )
    source, out = str(pico_folders("bert", 1)), str(tmp_path / "out")
    wide = ("--max-cosine-loss", "0.05", "--max-agreement-loss", "0.6")
    code, said, _ = run("export", source, "--int8", "--data", str(texts), *wide, "-o", out, "--json")
    assert code == 0
    assert json.loads(said)["graph"] == "onnx/model_quantized.onnx"
    code, _, complaint = run("export", source, "-o", out)
    assert code == 2
    assert "pass --force" in complaint
    code, shown, _ = run("export", source, "-o", out, "--force")
    assert code == 0
    assert "cosine to torch" in shown
    assert f'Encoder("{out}")' in shown
    code, _, complaint = run("export", source, "--int8", "--half")
    assert code == 2
    assert "exclude each other" in complaint


def test_a_pair_shows_both_sides(
    run: Callable[..., tuple[int, str, str]], pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    student, teacher = (
        SentenceTransformer(str(pico_folders(name, 1)), device="cpu") for name in ("bert", "mpnet")
    )
    both, out = tmp_path / "both", tmp_path / "out"
    _save_pair(student, teacher, names=("small", "big"), output=both)
    code, shown, _ = run("export", str(both), "-o", str(out))
    assert code == 0
    for side in ("query", "document"):
        assert str(out / side / "onnx" / "model.onnx") in shown
    assert f'Encoder("{out}").encode(["a text"], side="query")' in shown
    code, said, _ = run("export", str(both), "-o", str(out), "--force", "--json")
    assert code == 0
    assert json.loads(said)["documents"]["folder"] == str(out / "document")
