"""A build interrupted by a kill or a full disk resumes without encoding a text twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fake_teacher import Teacher, assert_holds, build, make_texts
from trundle.errors import BadInput, WriteFailed
from trundle.teacher.shards import read_manifest
from trundle.teacher.targets import open_targets

TESTS = Path(__file__).parents[1]
SOURCE = TESTS.parent / "src"


class Killed(BaseException):
    """Ends the run on the spot, as no code of ours catches it."""


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_at_any_write_loses_at_most_one_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    texts = make_texts(14)
    replace = Path.replace
    stops = 0
    while True:
        folder, first, second, writes = tmp_path / str(stops), Teacher(), Teacher(), 0

        def stopping(source: Path, target: Path, last: int = stops) -> Path:
            nonlocal writes
            writes += 1
            if writes > last and before:
                raise Killed
            replaced = replace(source, target)
            if writes > last:
                raise Killed
            return replaced

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", stopping)
            try:
                build(folder, texts, first)
            except Killed:
                pass
            else:
                break
        left = read_manifest(folder)
        if left is not None and left.complete:
            assert_holds(open_targets(folder), texts)
        else:
            with pytest.raises(BadInput, match=r"not finished|no teacher vectors"):
                open_targets(folder)
        assert_holds(build(folder, texts, second), texts)
        assert first.asked + second.asked <= len(texts) + 2 * 4
        assert not [file for file in folder.iterdir() if file.name.startswith(".")]
        stops += 1
    assert stops == 1 + 4 * 4 + 1


CHILD = """
import sys, time
sys.path.insert(0, sys.argv[2])
from fake_teacher import Teacher, build, make_texts
from pathlib import Path

class Slow(Teacher):
    def role(self, role):
        quick = super().role(role)
        def encode(texts):
            time.sleep(0.02)
            return quick(texts)
        return encode

build(Path(sys.argv[1]), make_texts(400), Slow())
"""


@pytest.mark.parametrize("shards", [1, 6])
def test_kill_nine_and_resume(tmp_path: Path, shards: int) -> None:
    folder = tmp_path / "targets"
    command = [sys.executable, "-c", CHILD, str(folder), str(TESTS)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(SOURCE)})
    try:
        while not (folder / f"{shards:05d}.vectors.npy").exists():
            assert child.poll() is None, "the run ended before it could be killed"
            time.sleep(0.001)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert child.returncode == -signal.SIGKILL
    manifest = read_manifest(folder)
    assert manifest is not None
    assert manifest.count >= 4 * shards
    teacher = Teacher()
    assert_holds(build(folder, make_texts(400), teacher), make_texts(400))
    assert teacher.asked == 400 - manifest.count


LIMITED = """
import resource, sys
sys.path.insert(0, sys.argv[2])
resource.setrlimit(getattr(resource, sys.argv[3]), (int(sys.argv[4]),) * 2)
from fake_teacher import assert_holds, build, make_texts
from pathlib import Path
assert_holds(build(Path(sys.argv[1]), make_texts(100), shard_size=2), make_texts(100))
"""


def run_limited(folder: Path, what: str, limit: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LIMITED, str(folder), str(TESTS), what, str(limit)]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_many_shards_need_few_open_files(tmp_path: Path) -> None:
    assert run_limited(tmp_path / "targets", "RLIMIT_NOFILE", 64).returncode == 0


def test_a_full_disk_is_reported_and_finished_shards_are_kept(tmp_path: Path) -> None:
    ended = run_limited(tmp_path / "targets", "RLIMIT_FSIZE", 4000)
    assert f"{WriteFailed.__name__}: " in ended.stderr
    assert "free some space and run again" in ended.stderr
    manifest = read_manifest(tmp_path / "targets")
    assert manifest is not None
    assert manifest.count > 0
    teacher = Teacher()
    assert_holds(build(tmp_path / "targets", make_texts(100), teacher, shard_size=2), make_texts(100))
    assert teacher.asked == 100 - manifest.count
