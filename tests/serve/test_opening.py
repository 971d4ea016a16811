"""What can be served: an exported folder, any other model folder, a pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, BadModel
from trundle.export.open import open_encoder
from trundle.pipeline.pair import _save_pair
from trundle.serve.settings import open_served


def test_a_folder_without_a_graph_is_exported_once(pico_folders: Callable[[str], Path]) -> None:
    folder, progress = pico_folders("roberta", 1), RecordedProgress()
    before = sorted(folder.rglob("*"))
    for _ in range(2):
        found = open_encoder(str(folder), progress=progress).encode(pico.TEXTS)
    assert len([line for line in progress.lines if "is exported once" in line]) == 1
    truth = SentenceTransformer(str(folder), device="cpu").encode(pico.TEXTS)
    np.testing.assert_allclose(found, truth, atol=1e-5)
    assert sorted(folder.rglob("*")) == before


def test_a_pair_is_served_as_two_models(pico_folders: Callable[[str], Path], tmp_path: Path) -> None:
    student = SentenceTransformer(str(pico_folders("bert", 1)), device="cpu")
    teacher = SentenceTransformer(str(pico_folders("mpnet", 1)), device="cpu")
    student.prompts = {"query": "how do I "}
    teacher.prompts = {"document": "the "}
    _save_pair(student, teacher, names=("small", "big"), output=tmp_path / "both")
    progress = RecordedProgress()
    served = open_served(str(tmp_path / "both"), progress=progress)
    assert [model.name for model in served.models] == ["both", "both-teacher"]
    assert served.teacher is not None
    truth = SentenceTransformer(str(tmp_path / "both"), device="cpu")
    pairs = (
        (served.student.encoder.encode_query(pico.TEXTS), truth.encode_query(pico.TEXTS)),
        (served.teacher.encoder.encode_document(pico.TEXTS), truth.encode_document(pico.TEXTS)),
    )
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(BadInput, match="brings its own teacher"):
        open_served(str(tmp_path / "both"), teacher=str(pico_folders("mpnet", 1)))


def test_models_that_do_not_form_a_pair(student_folder: Path, tmp_path: Path) -> None:
    wide = pico.model("bert", str(tmp_path / "backbone"), hidden_size=64, num_hidden_layers=1)
    wide.save_pretrained(str(tmp_path / "wide"))
    with pytest.raises(BadInput, match="trundle align"):
        open_served(str(student_folder), teacher=str(tmp_path / "wide"))


def test_unrelated_models_are_served_with_a_warning(student_folder: Path, teacher_folder: Path) -> None:
    progress = RecordedProgress()
    served = open_served(str(student_folder), teacher=str(teacher_folder), name="mine", progress=progress)
    assert [model.name for model in served.models] == ["mine", "big"]
    card = served.student.card()
    assert card["dimensions"] == 32
    assert card["bytes"] > 10_000
    assert card["runs"] == "onnx float32"


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in (str(tmp_path / "empty"), str(tmp_path / "nothing")):
        with pytest.raises(BadModel):
            open_served(name)
