"""Pico models behind a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra `serve`")

from sentence_transformers import SentenceTransformer

from live_server import Gated, LiveServer, running
from trundle.export.exporting import export_model
from trundle.runtime.encoder import Encoder
from trundle.serve.settings import _Model, _Served


@pytest.fixture(scope="session", autouse=True)
def little_documentation() -> Iterator[None]:
    """The page of each server reads the documentation of a few packages instead of thirty."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("trundle.serve.playground._PACKAGES", 3)
        patched.setattr("trundle.serve.playground._OF_PYTHON", 30)
        yield


def exported_folder(source: Path, folder: Path, prompts: dict[str, str]) -> Path:
    model = SentenceTransformer(str(source), device="cpu")
    model.prompts = prompts
    model.save_pretrained(str(folder))
    export_model(str(folder), to="onnx")
    return folder


@pytest.fixture(scope="session")
def student_folder(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "small"
    return exported_folder(pico_folders("bert", 1), folder, {"query": "how do I ", "document": "the "})


@pytest.fixture(scope="session")
def teacher_folder(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "big"
    return exported_folder(pico_folders("distilbert", 1), folder, {"query": "", "document": ""})


@pytest.fixture(scope="session")
def student(student_folder: Path) -> Encoder:
    return Encoder(student_folder)


@pytest.fixture(scope="session")
def teacher(teacher_folder: Path) -> Encoder:
    return Encoder(teacher_folder)


@pytest.fixture(scope="session")
def alone(student: Encoder) -> _Served:
    return _Served(student=_Model(name="small", encoder=student))


@pytest.fixture(scope="session")
def pair(student: Encoder, teacher: Encoder) -> _Served:
    return _Served(student=_Model(name="small", encoder=student), teacher=_Model(name="big", encoder=teacher))


@pytest.fixture(scope="session")
def server(pair: _Served) -> Iterator[LiveServer]:
    with running(pair) as live:
        yield live


@pytest.fixture
def gated(student_folder: Path) -> Gated:
    return Gated(student_folder)
