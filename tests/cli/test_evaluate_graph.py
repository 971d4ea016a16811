"""`trundle evaluate` on an exported folder scores the graph that would run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pico
from trundle.export.exporting import export_model
from trundle.model.load import load
from trundle.records import Lineage, read_lineage

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(pico.different_texts(140)), "utf-8")
    return str(path)


def test_a_folder_of_graphs_alone_is_scored_by_its_graph(
    run: Run, pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    student, teacher, out = pico_folders("mpnet", 1), pico_folders("bert", 1), tmp_path / "out"
    export_model(str(student), to="onnx", output=out)
    words = ["--teacher", str(teacher), "--data", texts, "--json"]
    code, by_torch, _ = run("evaluate", str(student), *words)
    assert code == 0
    code, by_graph, _ = run("evaluate", str(out), *words)
    assert code == 0
    code, chosen, _ = run("evaluate", str(student), *words, "--graph", "onnx")
    assert code == 0
    truth, *graphs = (json.loads(said) for said in (by_torch, by_graph, chosen))
    assert truth["notes"] == []
    for found in graphs:
        assert found["notes"][0].endswith("is run by onnx float32.")
        for figure in ("agreement_asymmetric", "agreement_standard", "cosine"):
            # Neighbours at nearly one distance may change places.
            assert found["fidelity"][0][figure] == pytest.approx(truth["fidelity"][0][figure], abs=0.01)
    code, _, _ = run("evaluate", str(student), "--teacher", str(out), "--data", texts)
    assert code == 0  # a teacher may be a graph, too
    code, _, complaint = run("evaluate", str(out), *words, "--graph", "openvino-int8")
    assert code == 2
    assert "choose one of onnx-float32" in complaint


def test_a_table_of_vectors_stands_for_the_teacher_that_made_it(
    run: Run, pico_folders: Callable[[str], Path], texts: str, tmp_path: Path
) -> None:
    lines = Path(texts).read_text("utf-8").splitlines()
    vectors = load(pico_folders("bert", 1)).encode(lines)
    table = tmp_path / "vectors.parquet"
    pq.write_table(pa.table({"text": lines, "vector": vectors.tolist()}), table)
    found = []
    for teacher in (pico_folders("bert", 1), table):
        words = ["--teacher", str(teacher), "--data", texts, "--json"]
        code, said, _ = run("evaluate", str(pico_folders("mpnet", 1)), *words)
        assert code == 0
        found.append(json.loads(said)["fidelity"][0])
    assert found[1]["distance"] == pytest.approx(found[0]["distance"], rel=1e-4)
    pq.write_table(pa.table({"text": lines[:3], "vector": vectors[:3].tolist()}), table)
    code, _, complaint = run("evaluate", str(pico_folders("mpnet", 1)), *words)
    assert code == 2
    assert "has no vector of" in complaint


def test_an_exported_folder_keeps_its_training_data_record(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    model = pico.model("bert", str(tmp_path / "backbone"), num_hidden_layers=1)
    model.save_pretrained(str(tmp_path / "model"))
    Lineage(source="big", space="big").write(tmp_path / "model")
    export_model(str(tmp_path / "model"), to="onnx", output=tmp_path / "out")
    assert read_lineage(tmp_path / "out") == read_lineage(tmp_path / "model")
