"""Memory after a graph is loaded."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FREED = """
from pathlib import Path
from trundle.runtime.engines import _release_memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])

blocks = [b"x" * 100_000 for _ in range(3000)]
last = blocks[-1]  # what lies below it is not given back by itself
full = resident()
del blocks
kept = resident()
_release_memory()
print(full, kept, resident())
"""


@pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"),
    reason="only glibc has to be asked",
)
def test_free_memory_is_returned_to_the_system() -> None:
    ran = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    full, kept, left = map(int, ran.stdout.split())
    assert kept > 0.8 * full
    assert left < 0.5 * full
