"""Models side by side by the size of a batch: texts a second, the shortest wait, and the largest batch within 100 ms.

    python benchmarks/batches.py all-mpnet-base-v2 student shipped --texts msmarco [--threads 1 --own-time] -o batches.json

LEAF's table 9. MODEL is run by torch where it has torch weights and by its first graph otherwise; MODEL@ENGINE names an engine
of `trundle bench`, such as onnx-int8. Every model is a process of its own, asked in turns for the same texts, drawn anew in
each round, never two at a time. The folder `--texts` is a search: `queries.parquet` and `corpus.parquet`. Ratios are to
the first model. Where others use the cores, `--own-time` counts the processor time of one thread instead of what the clock
says: that is about the time a model would take on an idle core. `trundle bench` has more figures, for batches of one size.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trundle.bench.child import _engines_of, _loader, _private_streams
from trundle.bench.results import _rotated
from trundle.bench.rounds import _PAUSE, _Worker
from trundle.bench.workload import _cpu_clock, _other_cores, _usable_cores, this_machine
from trundle.records import versions

SIZES = (1, 2, 4, 8, 16, 24)
"""The paper's."""
FILES = {"documents": "corpus.parquet", "queries": "queries.parquet"}
PATIENCE = 0.1
"""Seconds within which an answer seems to be there at once."""
TIMEOUT = 1800.0


def serve_model(name: str, threads: int) -> None:
    """In a process of its own: open a model, then encode what is asked for and tell how long it took."""
    requests, replies = _private_streams()
    model, _, chosen = name.partition("@")
    engine = chosen or _engines_of(model)[0]
    embedder = _loader(engine)(model, threads=threads, batch_size=SIZES[-1]).embedder
    encode = {"documents": embedder.document, "queries": embedder.query}
    for line in requests:
        asked = json.loads(line)
        before = _cpu_clock()
        encode[asked["kind"]](asked["texts"])
        after = _cpu_clock()
        found = {"clock": after.wall - before.wall, "own": after.own - before.own, "runs": engine}
        replies.write(json.dumps(found | {"other_cores": _other_cores(before, after)}) + "\n")
        replies.flush()


def read_pool(folder: str) -> dict[str, list[str]]:
    """All texts of each kind."""
    from trundle.evaluate.tasks import _read_columns, _texts_of

    places = {kind: Path(folder) / name for kind, name in FILES.items()}
    return {
        kind: list(_texts_of(_read_columns(place, ("text",)), "text", place))
        for kind, place in places.items()
    }


def race(models: list[str], pool: dict[str, list[str]], *, rounds: int, threads: int) -> list[dict[str, Any]]:
    """One row for every batch that was encoded."""
    dice, rows = random.Random(0), []
    command = (sys.executable, "-P", __file__, "--serve", str(threads))
    with ExitStack() as running:
        workers = [
            running.enter_context(_Worker(model, threads=threads, timeout=TIMEOUT, command=(*command, model)))
            for model in models
        ]
        for kind, texts in pool.items():
            for worker in workers:
                worker.ask({"kind": kind, "texts": texts[: SIZES[-1]]})
            for turn in range(rounds):
                for size in SIZES:
                    drawn = dice.sample(texts, size)
                    for place in _rotated(len(models), turn):
                        time.sleep(_PAUSE)
                        found = workers[place].ask({"kind": kind, "texts": drawn})
                        rows.append({"model": models[place], "kind": kind, "size": size} | found)
                print(f"{kind}: round {turn + 1} of {rounds}", flush=True)
    return rows


def summary(rows: list[dict[str, Any]], model: str, kind: str, time_of: str) -> dict[str, Any]:
    """The figures of table 9; the time of a size is the median of its rounds."""
    mine = [row for row in rows if (row["model"], row["kind"]) == (model, kind)]
    taken = {size: statistics.median(row[time_of] for row in mine if row["size"] == size) for size in SIZES}
    return {
        "per_second": statistics.fmean(size / seconds for size, seconds in taken.items()),
        "latency": min(taken.values()),
        "largest": max((size for size, seconds in taken.items() if seconds <= PATIENCE), default=0),
        "seconds": taken,
    }


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        serve_model(sys.argv[3], int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL[@ENGINE]")
    parser.add_argument("--texts", required=True, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=_usable_cores())
    parser.add_argument("--own-time", action="store_true", help="processor time, with --threads 1")
    parser.add_argument("-o", "--output", required=True)
    options = parser.parse_args()
    if options.own_time and options.threads != 1:
        parser.error("--own-time adds up what threads work and wait; use it with --threads 1")
    time_of = "own" if options.own_time else "clock"
    rows = race(options.models, read_pool(options.texts), rounds=options.rounds, threads=options.threads)
    found = {model: {kind: summary(rows, model, kind, time_of) for kind in FILES} for model in options.models}
    first = found[options.models[0]]
    busy = [row["other_cores"] for row in rows if row["other_cores"] is not None]
    for model, kinds in found.items():
        for kind, one in kinds.items():
            ratio = one["ratio"] = one["per_second"] / first[kind]["per_second"]
            print(
                f"{model:40} {kind:9} {one['per_second']:8.1f}/s {ratio:6.1f} × {1000 * one['latency']:8.1f} ms {one['largest']:3}"
            )
    runs = {row["model"]: row["runs"] for row in rows}
    content = {
        "models": {model: {"runs": runs[model]} | kinds for model, kinds in found.items()},
        "rounds": options.rounds,
        "threads": options.threads,
        "time": time_of,
        "other_cores": statistics.fmean(busy) if busy else None,
        "machine": this_machine().cpu,
        "cores": _usable_cores(),
        "versions": dict(versions()),
    }
    print(f"others kept {content['other_cores']} of {content['cores']} cores busy")
    Path(options.output).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
