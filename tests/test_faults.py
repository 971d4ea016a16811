"""A few points of benchmarks/faults.py: commands that are killed, that fail, and that run together."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HARNESS = Path(__file__).parents[1] / "benchmarks" / "faults.py"
WITHOUT_MODELS = "folder,index,index-force,targets"


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="needs Linux and a C compiler")
def test_nothing_is_lost() -> None:
    what = ("kill", "fail", "together", "--points", "4", "--rounds", "2")
    command = [sys.executable, str(HARNESS), *what, "--jobs", WITHOUT_MODELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
