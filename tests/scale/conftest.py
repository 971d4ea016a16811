from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentence_transformers import SentenceTransformer

import pico
from trundle.export.exporting import export_model
from trundle.scale import shard_plan


@pytest.fixture(scope="session")
def graph(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pico model with prompts as a graph: what workers open without torch, in no time."""
    folder = tmp_path_factory.mktemp("graph") / "model"
    model = SentenceTransformer(str(pico_folders("bert", 1)), device="cpu")
    model.prompts = {"query": "how do I ", "document": "the "}
    model.save_pretrained(str(folder))
    export_model(str(folder), to="onnx")
    return folder


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three parquet files of several row groups with queries and documents, and duplicates."""
    folder = tmp_path_factory.mktemp("tables")
    for number in range(3):
        asked = [f"{text} {place % 30 + number}" for place in range(40) for text in pico.TEXTS[:4]]
        table = pa.table({"query": asked, "document": [f"about {text}" for text in reversed(asked)]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=25)
    return folder


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_plan, "_PART_ROWS", 60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """It ends with its tests: its processes never rest, even without work."""
    ray = pytest.importorskip("ray", reason="needs a cluster: pip install 'trundle[scale]'")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_BACKEND_LOG_LEVEL"] = "fatal"
    # Beside other tests, workers that give way to everything would hardly run.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    ray.init(
        address="local",
        num_cpus=2,
        object_store_memory=80_000_000,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()
