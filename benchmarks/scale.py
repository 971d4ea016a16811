"""The store of a cluster that loses workers beside that of one process, and the training of two processes beside one.

    python benchmarks/scale.py MODEL [--texts 1200] [--output scale.json]
    python benchmarks/scale.py MODEL --gpu --texts 100000

MODEL is a folder with a graph (`trundle export MODEL`). A Ray cluster of 2 nodes × 2 workers runs on this machine. With --gpu any model
will do: each node says it has a GPU, which is the same one, and has one worker there; parts 3 and 4 are left out.

1.  One process builds a store with the torch-free runtime.
2.  The cluster builds it while one worker is killed in the middle, then again while a whole node is lost, then again
    with the driver killed in the middle and started anew. Each time every file is compared byte by byte with those of
    the one process, and shards that were finished before the loss are looked at: were they written again?
3.  A student learns from the store in one process, in two, and in two that each open half of it: losses side by side
    (see scale_training.py).

4.  What the driver of a large build holds and takes: the survey of 1 and of 16 million texts, each in a fresh process.

Times are of one machine whose cores the nodes share: they show that it works, not how fast a cluster is.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from ray.cluster_utils import Cluster

from scale_training import compare
from targets_memory import memory, synthetic_texts
from trundle.scale.file_parts import _PART_ROWS
from trundle.scale.on_ray import _HERE, _QUIET, build_on_ray
from trundle.scale.shard_plan import _ShardPlanner
from trundle.scale.shard_writer import TeacherSpec, build_local
from trundle.teacher.labelling import SHARD_SIZE
from trundle.teacher.shards import recorded

SHARD = 32
REPEATED = 10
"""Every so many-th text comes again at the end."""
GPU_SHARD = 2048
NODES, WORKERS = 2, 2
OBJECT_STORE = 100_000_000
SURVEYED = (1 << 20, 1 << 24)


def write_texts(folder: Path, count: int) -> None:
    """Four parquet files of small row groups, with repeats within and between them."""
    folder.mkdir()
    texts = list(synthetic_texts(count))
    texts += texts[::REPEATED]
    for number in range(4):
        part = texts[number::4]
        table = pa.table({"text": [one.text for one in part], "kind": [one.kind for one in part]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=500)


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.iterdir())}


def written(store: Path) -> dict[int, int]:
    """When the vectors of each vouched-for shard were written."""
    return {number: (store / f"{number:05d}.vectors.npy").stat().st_mtime_ns for number in recorded(store)}


def labellers() -> list[psutil.Process]:
    """The actors of the second pass; Ray gives its processes the names of what they run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "Labeller" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@dataclass
class Loss:
    """Something that dies when a third of the shards are there, and what was finished by then."""

    strike: Callable[[], None]
    store: Path
    shards: int
    finished: Mapping[int, int] | None = None

    def __call__(self) -> None:
        """Wait, look, strike."""
        while len(recorded(self.store)) < self.shards // 3:
            time.sleep(0.02)
        self.finished = written(self.store)
        self.strike()


def compared(
    name: str, store: Path, pattern: Mapping[str, bytes], loss: Loss, seconds: float
) -> dict[str, Any]:
    """Print and return what is the matter with a store."""
    found = contents(store)
    finished = dict(loss.finished or {})
    kept = sum((store / f"{n:05d}.vectors.npy").stat().st_mtime_ns == when for n, when in finished.items())
    facts = {
        "loss": name,
        "seconds": round(seconds, 1),
        "shards": loss.shards,
        "finished before": len(finished),
        "of these written again": len(finished) - kept,
        "files missing": len(pattern.keys() - found.keys()),
        "files too many": len(found.keys() - pattern.keys()),
        "files that differ": sum(found[file] != pattern[file] for file in pattern.keys() & found.keys()),
    }
    print("  ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    return facts


def drive(model: str, texts: Path, store: Path, *, gpu: bool, address: str | None = None) -> None:
    workers = NODES if gpu else NODES * WORKERS
    build_on_ray(
        [str(texts)],
        TeacherSpec(model=model, runtime=not gpu, threads=1),
        store,
        address=address or _HERE,
        shard_size=GPU_SHARD if gpu else SHARD,
        workers=workers,
    )


def builds(model: str, scratch: Path, count: int, *, gpu: bool) -> dict[str, Any]:
    """Parts 1 and 2."""
    texts = scratch / "texts"
    write_texts(texts, count)
    started = time.perf_counter()
    asked = TeacherSpec(model=model, runtime=not gpu, threads=1)
    one = build_local([str(texts)], asked, scratch / "one", shard_size=GPU_SHARD if gpu else SHARD)
    alone = time.perf_counter() - started
    shards, pattern = len(one.manifest.shards), contents(scratch / "one")
    print(
        f"one process: {len(one):,} texts, {one.manifest.repeats} repeats left out, {alone:.1f} s", flush=True
    )
    os.environ.update(_QUIET)
    small = {"num_cpus": WORKERS, "num_gpus": int(gpu), "object_store_memory": OBJECT_STORE}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    others = [cluster.add_node(**small) for _ in range(NODES - 1)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    facts = []
    try:
        losses = {
            "nothing": lambda: None,
            "a worker": lambda: labellers()[-1].kill(),
            "a node": lambda: cluster.remove_node(others.pop(), allow_graceful=False),
        }
        for name, strike in losses.items():
            store = scratch / name.replace(" ", "-")
            loss = Loss(strike, store, shards)
            thread = threading.Thread(target=loss, daemon=True)
            started = time.perf_counter()
            thread.start()
            drive(model, texts, store, gpu=gpu)
            thread.join()
            facts.append(compared(name, store, pattern, loss, time.perf_counter() - started))
        cluster.add_node(**small)
        store = scratch / "the-driver"
        command = [sys.executable, __file__, model, "--drive", str(store), "--address", cluster.address]
        command += ["--gpu"] if gpu else []
        first = subprocess.Popen([*command, "--data", str(texts)])
        loss = Loss(lambda: os.kill(first.pid, signal.SIGKILL), store, shards)
        started = time.perf_counter()
        loss()
        first.wait()
        time.sleep(5)  # its workers end, too
        loss.finished = written(store)
        subprocess.run([*command, "--data", str(texts)], check=True)
        facts.append(compared("the driver", store, pattern, loss, time.perf_counter() - started))
    finally:
        ray.shutdown()
        cluster.shutdown()
    return {"texts": len(one), "alone seconds": round(alone, 1), "losses": facts}


def survey(texts: int) -> dict[str, float]:
    """What the driver does with the hashes of so many texts, a tenth of them repeats, in pieces as they come in."""
    before, started = memory("VmRSS"), time.perf_counter()
    rng = np.random.default_rng(0)
    pieces = -(-texts // _PART_ROWS)
    with TemporaryDirectory(prefix="trundle-survey-") as scratch:
        found = _ShardPlanner(Path(scratch), parts=pieces, rows=texts)
        for piece in rng.permutation(pieces):
            numbers = rng.integers(0, 5 * texts, _PART_ROWS).astype(np.uint64)
            hashes = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1)
            found.add(int(piece), hashes.tobytes(), np.full(_PART_ROWS, 200, dtype="<u4").tobytes())
        repeats = found.duplicates()
        shards = sum(1 for _ in found.shard_ends(repeats, SHARD_SIZE))
    seconds = time.perf_counter() - started
    return {"texts": texts, "shards": shards, "seconds": seconds, "growth": memory("VmHWM") - before}


def surveys() -> list[dict[str, float]]:
    """Part 4."""
    rows = []
    for texts in SURVEYED:
        command = [sys.executable, __file__, "-", "--survey", str(texts)]
        answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        print(
            f"survey of {texts:,} texts: {answer['seconds']:.1f} s, {texts / answer['seconds']:,.0f} texts/s, "
            f"{answer['growth'] / 1e6:.0f} MB at most",
            flush=True,
        )
        rows.append(answer)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=1200)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--survey", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.survey:
        print(json.dumps(survey(asked.survey)))
        return
    if asked.drive:
        drive(asked.model, asked.data, asked.drive, gpu=asked.gpu, address=asked.address)
        return
    with TemporaryDirectory(prefix="trundle-scale-") as folder:
        scratch = Path(folder)
        facts = builds(asked.model, scratch, asked.texts, gpu=asked.gpu)
        if not asked.gpu:
            facts["training"] = compare(asked.model, scratch / "one")
    if not asked.gpu:
        facts["surveys"] = surveys()
    if asked.output:
        asked.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
