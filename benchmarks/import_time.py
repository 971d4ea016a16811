"""The time to import trundle or show its help, against importing sentence-transformers.

    python benchmarks/import_time.py [--repeats 5]

Every repeat is a fresh process, interleaved; times include the start of the interpreter. The limit for the first two
is 1/20 of `import sentence_transformers`, without torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

CODES = {
    "import trundle": "import trundle",
    "trundle --help": "import sys; sys.argv = ['trundle', '--help']; from trundle.cli.app import main; main()",
    "import sentence_transformers": "import sentence_transformers",
}
# The command line ends with SystemExit, so torch is looked for at exit.
WATCH = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    times: dict[str, list[float]] = {name: [] for name in CODES}
    torch = {}
    for repeat in range(-1, parser.parse_args().repeats):
        for name, code in CODES.items():
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", WATCH + code], capture_output=True, text=True, check=True
            )
            torch[name] = done.stderr.split()[-1]
            if repeat >= 0:  # the first repeat reads the files into the disk cache
                times[name].append(time.perf_counter() - began)
    slowest = median(times["import sentence_transformers"])
    for name, taken in times.items():
        print(
            f"{name:30}{median(taken):10.3f} s  ratio {median(taken) / slowest:.4f}  torch loaded: {torch[name]}"
        )


if __name__ == "__main__":
    main()
