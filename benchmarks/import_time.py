"""What it costs to touch trundle, against importing sentence-transformers.

    python benchmarks/import_time.py [--repeats 5]

Every repeat is a fresh process, interleaved; the times are of whole processes, the interpreter's own start included.
`import trundle` and `trundle --help` must stay under 1/20 of `import sentence_transformers`, without torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from statistics import median

HELP = "import sys; sys.argv = ['trundle', '--help']; from trundle.cli.app import main; main()"
CONTESTANTS = {
    "bare interpreter": "pass",
    "import trundle": "import trundle",
    "trundle --help": HELP,
    "import sentence_transformers": "import sentence_transformers",
}
LIMIT = 1 / 20


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def seconds(code: str) -> float:
    started = time.perf_counter()
    run(code)
    return time.perf_counter() - started


def loads_torch(code: str) -> bool:
    """Whether torch is there afterwards; the command line leaves by SystemExit, so the look is taken at exit."""
    look = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr)); "
    return run(look + code).stderr.split()[-1] == "True"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    for repeat in range(-1, repeats):
        for name, code in CONTESTANTS.items():
            taken = seconds(code)
            if repeat >= 0:  # the one before the first reads the files into the disk cache
                times[name].append(taken)
    heavy = median(times["import sentence_transformers"])
    print(f"{'':30}{'median s':>10}{'ratio':>10}  torch loaded")
    for name, code in CONTESTANTS.items():
        middle = median(times[name])
        print(f"{name:30}{middle:10.3f}{middle / heavy:10.4f}  {loads_torch(code)}")
    print(f"limit for import trundle and trundle --help: {LIMIT:.4f}")


if __name__ == "__main__":
    main()
