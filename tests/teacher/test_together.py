"""Several runs need the same vectors at the same time: one computes them, the others wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from trundle.data.texts import Text
from trundle.embedder import Embedder, Vectors
from trundle.progress import _Silent
from trundle.teacher import labelling
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import Manifest
from trundle.teacher.targets import Targets

TEXTS = [Text(text=f"text number {number}", kind="query") for number in range(40)]


class Waiting(_Silent):
    """Records that a process waits."""

    def __init__(self) -> None:
        self.told = threading.Event()

    def say(self, line: str) -> None:
        """Only this is said."""
        assert "waits" in line
        self.told.set()


def build(folder: Path, teacher: Embedder, progress: _Silent) -> Targets:
    return build_targets(TEXTS, teacher, Manifest(teacher="a", shard_size=10), folder, progress=progress)


def test_no_text_is_encoded_twice_and_no_file_is_left(tmp_path: Path) -> None:
    begun, second = threading.Event(), Waiting()
    asked: list[str] = []

    def encode(texts: list[str]) -> Vectors:
        begun.set()
        assert second.told.wait(20), "the other came and does not wait"
        asked.extend(texts)
        return np.array([[float(text.split()[-1]), 1.0] for text in texts], dtype=np.float32)

    teacher = Embedder(name="a", text=encode, query=encode, document=encode)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(build, tmp_path / "store", teacher, _Silent())
        assert begun.wait(20)
        found = [build(tmp_path / "store", teacher, second), first.result()]
    assert sorted(asked) == sorted(text.text for text in TEXTS)
    assert [len(each) for each in found] == [40, 40]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_after_a_failure_the_next_process_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def encode(texts: list[str]) -> Vectors:
        if len(asked) == 20:
            raise KeyboardInterrupt
        asked.extend(texts)
        return np.ones((len(texts), 2), dtype=np.float32)

    teacher = Embedder(name="a", text=encode, query=encode, document=encode)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "store", teacher, _Silent())
    monkeypatch.setattr(labelling, "_TEXTS_PER_CALL", 5)
    asked += ["the second run counts on"]
    assert len(build(tmp_path / "store", teacher, _Silent())) == 40
    assert len(asked) == 41
