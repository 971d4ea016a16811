"""What benchmarks share: a row per model, each in a process of its own, some at once, each with its log; and plain texts as a corpus."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trundle.data.corpus import Corpus
from trundle.data.texts import Text
from trundle.progress import _Silent

ENGLISH_STS = ("STS12", "STS13", "STS14", "STS15", "STS17-en-en", "STSBenchmark")


def to_learn_from(texts: Sequence[str]) -> Corpus:
    """All of them; none is kept to validate or to measure by."""
    return Corpus(
        train=lambda: (Text(text=text) for text in texts),
        validation=lambda: iter(()),
        held_out=lambda: iter(()),
        facts=lambda: (),
    )


class Lines(_Silent):
    """Progress for a log file."""

    def say(self, line: str) -> None:
        """One line with the time."""
        print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def run_rows(rows: Mapping[str, str], output: str | Path, *, at_once: int) -> None:
    """Start this very script again with `--only ROW` for each name and its row; a row that fails is named at the end."""
    Path(output).mkdir(parents=True, exist_ok=True)
    # Evaluators that each start a thread per core get in each other's way.
    threads = max(1, (os.cpu_count() or 1) // at_once)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started: dict[str, subprocess.Popen[bytes]] = {}
    for name, row in rows.items():
        while sum(process.poll() is None for process in started.values()) >= at_once:
            time.sleep(0.5)
        with (Path(output) / f"{name}.log").open("w") as log:
            command = [sys.executable, *sys.argv, "--only", row]
            started[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
    failed = [name for name, process in started.items() if process.wait()]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; see the logs in {output}")
