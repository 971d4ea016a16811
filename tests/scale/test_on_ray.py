"""A real cluster writes the same bytes as one process, even if workers are killed."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pico
from recorded_progress import RecordedProgress
from trundle.errors import BadInput, BadModel
from trundle.folders import locked_folder
from trundle.scale.shard_writer import TeacherSpec, build_local
from trundle.teacher.shards import recorded

SHARD = 8
pytestmark = [
    pytest.mark.usefixtures("small_pieces"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_a_worker(store: Path, killed: list[int]) -> None:
    """As soon as one shard is there, and many others are not; to find one then would take too long."""
    found: list[psutil.Process] = []
    while not found:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if "Labeller" in " ".join(process.cmdline()):
                    found.append(process)
        time.sleep(0.2)
    while not recorded(store):
        time.sleep(0.002)
    with suppress(psutil.Error):
        found[0].kill()
        killed.append(found[0].pid)


def test_a_cluster_that_loses_a_worker_makes_the_store_of_one_process(
    cluster: None, graph: Path, tables: Path, tmp_path: Path
) -> None:
    from trundle.scale.on_ray import build_on_ray

    asked = TeacherSpec(model=str(graph), runtime=True, threads=1)
    one = build_local([str(tables)], asked, tmp_path / "one", shard_size=SHARD)
    store, killed = tmp_path / "store", list[int]()
    watch = threading.Thread(target=kill_a_worker, args=(store, killed), daemon=True)
    watch.start()
    made = build_on_ray([str(tables)], asked, store, shard_size=SHARD)
    watch.join(timeout=10)
    assert len(one.manifest.shards) > 30
    assert killed, "the worker must die while there is work"
    assert made.manifest == one.manifest
    assert contents(store) == contents(tmp_path / "one")

    with pytest.raises(BadInput, match="was made with shard size 8, not 9"):
        build_on_ray([str(tables)], asked, store, shard_size=9)
    with pytest.raises(BadInput, match="too few for 3 workers"):
        build_on_ray([str(tables)], asked, tmp_path / "new", workers=3)


def test_a_cluster_failure_gives_one_sentence(
    cluster: None, graph: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trundle.scale import on_ray
    from trundle.scale.on_ray import _connected, ray
    from trundle.scale.shard_writer import _open_teacher

    asked = TeacherSpec(model=str(graph), runtime=True)
    pq.write_table(pa.table({"text": [*pico.TEXTS, ""]}), tmp_path / "bad.parquet")
    sources = [str(tables), str(tmp_path / "bad.parquet")]
    with pytest.raises(BadInput, match=r"a worker on .* row 8 has no text in column 'text'"):
        on_ray.build_on_ray(sources, asked, tmp_path / "new")

    real = _open_teacher
    monkeypatch.setattr(
        on_ray, "_open_teacher", lambda asked: real(asked.model_copy(update={"model": str(graph)}))
    )
    with pytest.raises(BadModel, match=r"a worker on .* can't open .*gone: there is no folder"):
        on_ray.build_on_ray(
            [str(tables)], TeacherSpec(model=str(tmp_path / "gone"), runtime=True), tmp_path / "other"
        )
    for address, says in (
        ("127.0.0.1:1", "no cluster responds at 127.0.0.1:1"),
        ("somewhere", "write HOST:PORT"),
    ):
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        with pytest.raises(BadInput, match=says), _connected(address):
            pass


def test_a_second_driver_waits_for_the_first(
    graph: Path, tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_ray = pytest.importorskip("trundle.scale.on_ray", reason="needs the extra `scale`")
    progress, connected = RecordedProgress(), threading.Event()

    def refused(_address: str) -> None:
        connected.set()
        raise BadInput("no cluster")

    def drive() -> None:
        with suppress(BadInput):
            spec = TeacherSpec(model=str(graph), runtime=True)
            on_ray.build_on_ray([str(tables)], spec, tmp_path / "store", progress=progress)

    monkeypatch.setattr(on_ray, "_connected", refused)
    with locked_folder(tmp_path / "store", lambda: pytest.fail("nobody holds it")):
        second = threading.Thread(target=drive)
        second.start()
        while not progress.lines and not connected.is_set():
            time.sleep(0.01)
        assert "waits for them" in progress.lines[0]
        assert not connected.is_set()
    second.join()
    assert connected.is_set()
