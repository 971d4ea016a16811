"""Does the bench slow down what it measures? Its texts/s against a bare `SentenceTransformer.encode` loop.

    python benchmarks/bench_overhead.py MODEL [--rounds 7] [--seconds 2] [--threads 2]

Both run in worker processes of their own on the same texts, in turns; the ratio must stay above 0.90.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from itertools import cycle
from pathlib import Path

from sentence_transformers import SentenceTransformer

from trundle.bench.results import _of_rounds, _rotated
from trundle.bench.rounds import _COMMAND, _PAUSE, _Worker
from trundle.bench.workload import _usable_cores, workload

BATCH_SIZE = 32
BARE_ROLE = "--bare-loop"


def bare_loop(folder: str) -> None:
    """The child that knows nothing of trundle's encoders: a model, a loop, a clock."""
    model = SentenceTransformer(folder)
    for line in sys.stdin:
        request = json.loads(line)
        texts = request["texts"]
        batches = cycle([texts[start : start + BATCH_SIZE] for start in range(0, len(texts), BATCH_SIZE)])
        done, started = 0, time.perf_counter()
        while time.perf_counter() - started < request["seconds"]:
            batch = next(batches)
            model.encode(batch, batch_size=BATCH_SIZE)
            done += len(batch)
        taken = time.perf_counter() - started
        sys.stdout.write(json.dumps({"texts": done, "seconds": taken}) + "\n")
        sys.stdout.flush()


def compare(folder: str, rounds: int, seconds: float, threads: int) -> None:
    work = workload()
    texts = {"short": work.short, "long": work.long}
    bare_command = (sys.executable, __file__, BARE_ROLE, folder)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _Worker("bench", threads=threads, timeout=300, command=_COMMAND) as bench,
        _Worker("bare loop", threads=threads, timeout=300, command=bare_command) as bare,
    ):
        place = Path(scratch) / "texts.json"
        place.write_text(work.as_json(), encoding="utf-8")
        opening = {"ask": "open", "model": folder, "engine": "torch", "texts": str(place)}
        bench.ask({**opening, "threads": threads, "batch_size": BATCH_SIZE})
        for kind in texts:
            print(
                f"{kind} texts, batches of {BATCH_SIZE}, {threads} threads, {rounds} rounds of {seconds:g} s"
            )
            asks = (
                (bench, {"ask": "throughput", "kind": kind, "seconds": seconds}),
                (bare, {"texts": texts[kind], "seconds": seconds}),
            )
            rates: tuple[list[float], list[float]] = ([], [])
            for turn in range(-1, rounds):
                for index in _rotated(2, turn):
                    worker, request = asks[index]
                    time.sleep(_PAUSE)
                    answer = worker.ask(request)
                    if turn >= 0:  # the round before the first is warm-up
                        rates[index].append(answer["texts"] / answer["seconds"])
            ours, theirs = map(_of_rounds, rates)
            print(f"  bench     {ours.value:8.1f} texts/s ±{ours.spread:.1f}")
            print(f"  bare loop {theirs.value:8.1f} texts/s ±{theirs.spread:.1f}")
            print(f"  ratio     {ours.value / theirs.value:8.3f}   (must be above 0.90)")


def main() -> None:
    if sys.argv[1:2] == [BARE_ROLE]:
        bare_loop(sys.argv[2])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a model folder")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--threads", type=int, default=_usable_cores())
    given = parser.parse_args()
    compare(os.fspath(given.model), given.rounds, given.seconds, given.threads)


if __name__ == "__main__":
    main()
