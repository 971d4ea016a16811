"""One process at a time works in a cache entry; the lock is released when its process dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trundle.cache import locked, model_folder, remove_entry

HOLDS = """
import sys, time
from pathlib import Path
from trundle.cache import locked
with locked(Path(sys.argv[1]), if_taken=exit) as own:
    own.mkdir()
    print("mine", flush=True)
    time.sleep(600)
"""


def test_the_lock_is_released_when_its_process_dies(tmp_path: Path) -> None:
    wanted, told = tmp_path / "cache" / "work", []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(wanted)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "mine\n"
        with locked(wanted, if_taken=lambda: told.append(1)) as own:
            assert own == wanted.with_name(f"work-{os.getpid()}")
        remove_entry(wanted)
        assert wanted.is_dir()
        other.send_signal(signal.SIGKILL)
    assert told == [1]
    with locked(wanted, if_taken=pytest.fail) as own:
        assert own == wanted
        assert own.is_dir()
    remove_entry(wanted)
    assert not list(wanted.parent.iterdir())


def test_the_callback_may_raise(tmp_path: Path) -> None:
    class Refused(Exception):
        pass

    def refuse() -> None:
        raise Refused

    with (
        locked(tmp_path / "work", if_taken=refuse),
        pytest.raises(Refused),
        locked(tmp_path / "work", if_taken=refuse),
    ):
        pytest.fail("it was taken")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("trusted", [False, True])
def test_code_is_downloaded_only_on_request(
    trusted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def download(_name: str, *, allow_patterns: list[str], **_: Any) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert model_folder("someone/model", trust_remote_code=trusted) == tmp_path
    assert ("*.py" in asked) is trusted
