from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

from trundle.export.exporting import export_model


@pytest.fixture(scope="session")
def exported(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico BERT with prompts, as one ONNX graph next to its torch weights."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    model = SentenceTransformer(str(pico_folders("bert", 1)), device="cpu")
    model.prompts = {"query": "how do I ", "document": "the ", "other": "a small "}
    model.save_pretrained(str(folder))
    export_model(str(folder), to="onnx")
    return folder


@pytest.fixture(scope="session")
def torch_model(exported: Path) -> SentenceTransformer:
    return SentenceTransformer(str(exported), device="cpu")
