"""Does memory stay flat, and is the second run free? Teacher vectors of 10,000 and of 500,000 texts.

    python benchmarks/targets_memory.py

Each figure comes from a fresh process with a made-up teacher 384 wide: make the texts and nothing else (the
other times hold this one); build the vectors; build again, where all is cached and the teacher must not be
asked; read everything in random order, 32 texts at a time, as training does.
Peak memory is the largest resident size of the process (Linux), less what it was before the first text.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trundle.data.texts import Text
from trundle.embedder import Vectors, _plain
from trundle.teacher.labelling import build_targets
from trundle.teacher.targets import open_targets

SIZES = (10_000, 500_000)
WIDTH = 384
BATCH = 32
JOBS = ("make texts", "build", "build again", "read at random")
WORDS = (
    "index",
    "vector",
    "search",
    "small",
    "query",
    "teacher",
    "table",
    "window",
    "river",
    "copper",
    "seven",
)


def synthetic_texts(count: int) -> Iterator[Text]:
    """Distinct texts of 3 to 60 words; every third is a query."""
    for number in range(count):
        words = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(3 + number * 7919 % 58))
        yield Text(text=f"{words} {number}", kind="query" if number % 3 == 0 else "document")


class CountingTeacher:
    """Draws a text's vector from a table by the text's checksum, and counts the texts it was asked for."""

    def __init__(self) -> None:
        table = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
        self._table: Vectors = table / np.linalg.norm(table, axis=1, keepdims=True)
        self.asked = 0

    def encode(self, texts: Sequence[str]) -> Vectors:
        """One vector a text."""
        self.asked += len(texts)
        return self._table[[zlib.crc32(text.encode()) % len(self._table) for text in texts]]


def memory(field: str) -> int:
    """A size of this process in bytes, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def work(job: str, count: int, folder: Path) -> dict[str, float]:
    """Do one job in this process."""
    teacher = CountingTeacher()
    before, start = memory("VmRSS"), time.perf_counter()
    if job == "make texts":
        for _ in synthetic_texts(count):
            pass
    elif job == "read at random":
        targets = open_targets(folder)
        order = np.random.default_rng(1).permutation(len(targets))
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            assert len(targets.texts(batch)) == len(targets.vectors(batch))
    else:
        build_targets(
            synthetic_texts(count), _plain("made up", teacher.encode), teacher_id="made up", folder=folder
        )
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "growth": memory("VmHWM") - before, "asked": teacher.asked}


def in_fresh_process(job: str, count: int, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--job", job, "--count", str(count), "--folder", str(folder)]
    answer: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job:
        print(json.dumps(work(asked.job, asked.count, asked.folder)))
        return
    print(f"{'job':<16}{'texts':>9}{'seconds':>9}{'texts/s':>10}{'asked for':>11}{'peak growth':>14}")
    peaks: dict[str, list[float]] = {job: [] for job in JOBS}
    with TemporaryDirectory() as scratch:
        for count in SIZES:
            for job in JOBS:
                done = in_fresh_process(job, count, Path(scratch, str(count)))
                peaks[job].append(done["growth"])
                print(
                    f"{job:<16}{count:>9,}{done['seconds']:>9.1f}{count / done['seconds']:>10,.0f}"
                    f"{done['asked']:>11,.0f}{done['growth'] / 1e6:>11.0f} MB"
                )
    for job, (small, large) in peaks.items():
        print(
            f"{job}: {(large - small) / 1e6:+.0f} MB from {SIZES[0]:,} to {SIZES[1]:,} texts (goal: within 200 MB)"
        )


if __name__ == "__main__":
    main()
