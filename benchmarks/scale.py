"""Stores of teacher vectors: on a cluster that loses workers, in training by several processes, and memory.

    python benchmarks/scale.py cluster MODEL [--texts 1200] [--gpu --texts 100000]
    python benchmarks/scale.py training MODEL STORE
    python benchmarks/scale.py memory

cluster   MODEL is an exported folder, or any model with --gpu. A Ray cluster of 2 nodes × 2 workers on this
          machine builds a store while nothing, a worker, a node and the driver (started again) is killed. All
          files are compared with those of one process, and finished shards must not be written again. Then
          `training` on that store
training  the first layer of MODEL with a new linear layer trains on STORE in one process, in two, and in two
          that each open half of it, with several seeds
memory    peak memory above that at the start, and time, of building and reading the vectors of 10,000 and
          500,000 texts with an artificial teacher, and of the driver's survey of 1 and 16 million texts, each
          in a fresh process
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
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil  # type: ignore[import-untyped]
import pyarrow as pa
import pyarrow.parquet as pq

import harness
from harness import Json
from trundle.data.texts import Text
from trundle.embedder import Vectors, _plain
from trundle.methods.align.leaf import make_align_task
from trundle.methods.contract import Context
from trundle.model.heads import copy_of, with_new_head
from trundle.model.load import load
from trundle.model.surgery import Cut, cut
from trundle.progress import is_first, own_rank, process_count
from trundle.scale.on_ray import _HERE, _QUIET, build_on_ray
from trundle.scale.shard_plan import _PART_ROWS, _ShardPlanner
from trundle.scale.shard_writer import TeacherSpec, build_local
from trundle.teacher.labelling import build_targets
from trundle.teacher.shards import SHARD_SIZE, Manifest, recorded
from trundle.teacher.targets import Targets, _TargetsPart, open_share, open_targets
from trundle.train.loop import TrainSettings, train

NODES, WORKERS = 2, 2
SEEDS, STEPS, BATCH = 5, 80, 16
SETTINGS = TrainSettings(
    steps=STEPS, learning_rate=3e-4, dropout=False, record_every=STEPS, validate_every=STEPS
)
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
COUNTS, SURVEYED = (10_000, 500_000), (1 << 20, 1 << 24)
JOBS = ("make texts", "build", "build again", "read at random", "survey")
WORDS = harness.names("index,vector,search,small,query,teacher,table,window,river,copper,seven")


def synthetic_texts(count: int) -> Iterator[Text]:
    """Make distinct texts of 3 to 60 words; every third is a query."""
    for number in range(count):
        words = " ".join(WORDS[(number * step) % len(WORDS)] for step in range(3 + number * 7919 % 58))
        yield Text(text=f"{words} {number}", kind="query" if number % 3 == 0 else "document")


def shard_times(store: Path, shards: Sequence[int]) -> dict[int, int]:
    return {number: (store / f"{number:05d}.vectors.npy").stat().st_mtime_ns for number in shards}


class Loss:
    """Kills something when a third of the shards are finished, and remembers when these were written."""

    def __init__(self, strike: Callable[[], object], store: Path, shards: int) -> None:
        self.strike, self.store, self.shards, self.began = strike, store, shards, time.perf_counter()
        self.finished: dict[int, int] = {}

    def __call__(self) -> None:
        """Wait, then strike."""
        while len(recorded(self.store)) < self.shards // 3:
            time.sleep(0.02)
        self.finished = shard_times(self.store, list(recorded(self.store)))
        self.strike()

    def compare(self, name: str, pattern: Mapping[str, bytes]) -> None:
        """Print how the finished store differs from that of one process."""
        found = {path.name: path.read_bytes() for path in self.store.iterdir()}
        later, finished = shard_times(self.store, list(self.finished)), self.finished
        facts = {
            "lost": name,
            "seconds": round(time.perf_counter() - self.began, 1),
            "shards": self.shards,
            "finished before": len(finished),
            "of these written again": sum(later[number] != when for number, when in finished.items()),
            "files missing": len(pattern.keys() - found.keys()),
            "files too many": len(found.keys() - pattern.keys()),
            "files that differ": sum(found[file] != pattern[file] for file in pattern.keys() & found.keys()),
        }
        harness.show(facts)


def kill_a_worker() -> None:
    """Kill one of the processes that Ray named after the second pass."""
    for process in reversed(psutil.Process().children(recursive=True)):
        try:
            if "Labeller" in " ".join(process.cmdline()):
                process.kill()
                return
        except psutil.Error:
            continue


def drive(options: argparse.Namespace, texts: Path, store: Path, address: str = _HERE) -> None:
    workers, shard = (NODES, 2048) if options.gpu else (NODES * WORKERS, 32)
    asked = TeacherSpec(model=options.model, runtime=not options.gpu, threads=1)
    build_on_ray([str(texts)], asked, store, address=address, shard_size=shard, workers=workers)


def cluster(options: argparse.Namespace, scratch: Path) -> None:
    import ray
    from ray.cluster_utils import Cluster

    folder, listed = scratch / "texts", list(synthetic_texts(options.texts))
    folder.mkdir()
    listed += listed[::10]  # repeats, within and between the files
    for number in range(4):
        part = listed[number::4]
        table = pa.table({"text": [one.text for one in part], "kind": [one.kind for one in part]})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=500)
    asked, began = TeacherSpec(model=options.model, runtime=not options.gpu, threads=1), time.perf_counter()
    one = build_local([str(folder)], asked, scratch / "one", shard_size=2048 if options.gpu else 32)
    print(f"one process: {len(one):,} texts, {time.perf_counter() - began:.1f} s", flush=True)
    shards = len(one.manifest.shards)
    pattern = {path.name: path.read_bytes() for path in (scratch / "one").iterdir()}
    os.environ.update(_QUIET)
    small = {"num_cpus": WORKERS, "num_gpus": int(options.gpu), "object_store_memory": 100_000_000}
    nodes = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    others = [nodes.add_node(**small) for _ in range(NODES - 1)]
    ray.init(address=nodes.address, logging_level="ERROR", log_to_driver=False)
    strikes: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "a worker": kill_a_worker,
        "a node": lambda: nodes.remove_node(others.pop(), allow_graceful=False),
    }
    try:
        for name, strike in strikes.items():
            loss = Loss(strike, scratch / name.replace(" ", "-"), shards)
            thread = threading.Thread(target=loss, daemon=True)
            thread.start()
            drive(options, folder, loss.store)
            thread.join()
            loss.compare(name, pattern)
        nodes.add_node(**small)
        store = scratch / "the-driver"
        command = [sys.executable, __file__, "drive", options.model, str(store), "--folder", str(folder)]
        command += ["--address", nodes.address, *(["--gpu"] if options.gpu else [])]
        first = subprocess.Popen(command, preexec_fn=harness.end_with_parent)
        loss = Loss(lambda: os.kill(first.pid, signal.SIGKILL), store, shards)
        loss()
        first.wait()
        time.sleep(5)  # until its workers have ended too
        loss.finished = shard_times(store, list(recorded(store)))
        subprocess.run(command, check=True, preexec_fn=harness.end_with_parent)
        loss.compare("the driver", pattern)
    finally:
        ray.shutdown()
        nodes.shutdown()


def part_of(targets: Targets, *, validated: bool) -> Targets:
    """Split texts by checksum: one of ten validates, the others train."""
    texts = targets.texts(np.arange(len(targets)))
    kept = [at for at, text in enumerate(texts) if (not zlib.crc32(text.encode()) % 10) == validated]
    return _TargetsPart(targets, np.asarray(kept))


def learn(options: argparse.Namespace) -> None:
    """Train once per seed, in each of the processes."""
    whole = open_targets(options.store)
    own = open_share(options.store, rank=own_rank(), processes=process_count()) if options.by_rank else whole
    learned, validation = part_of(own, validated=False), part_of(whole, validated=True)
    first_layer, results = cut(load(options.model, device="cpu"), Cut(blocks=(0,))), []
    for seed in range(SEEDS):
        student = with_new_head(copy_of(first_layer), whole.width, normalise=whole.normalised, seed=seed)
        task = make_align_task(
            student, learned, validation, batch_size=BATCH, context=Context(original=student, seed=seed)
        )
        settings = replace(SETTINGS, seed=seed)
        result = train(student, task, settings)
        results.append({"loss": result.loss, "validation": result.validation})
    if is_first():
        print(json.dumps(results))


def training(options: argparse.Namespace) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    words, first = ("learn", options.model, str(options.store)), dict[str, list[float]]()
    ways = {"one process": ((), ()), "two processes": (TOGETHER, ()), "by rank": (TOGETHER, ("--by-rank",))}
    for name, (launch, more) in ways.items():
        results = harness.in_fresh_process(*words, *more, launch=launch)
        for measure in ("loss", "validation"):
            values = [result[measure] for result in results]
            alone = first.setdefault(measure, values)
            row = {"training": name, "measure": measure, "mean": np.mean(values)}
            row |= {"of one process": np.mean(values) / np.mean(alone), "deviation": np.std(values, ddof=1)}
            harness.show(row | {"largest difference": np.abs(np.subtract(values, alone)).max()})


def survey(texts: int, scratch: Path) -> None:
    """Survey the hashes of so many texts, a tenth of them repeats, in pieces of random order."""
    rng, pieces = np.random.default_rng(0), -(-texts // _PART_ROWS)
    found = _ShardPlanner(scratch, parts=pieces, rows=texts)
    for piece in rng.permutation(pieces):
        numbers = rng.integers(0, 5 * texts, _PART_ROWS).astype(np.uint64)
        hashes = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1)
        found.add(int(piece), hashes.tobytes(), np.full(_PART_ROWS, 200, dtype="<u4").tobytes())
    for _ in found.shard_ends(found.duplicates(), SHARD_SIZE):
        pass


def work(job: str, count: int, folder: Path) -> Json:
    """Do one job of `memory` in this process."""
    vectors = np.random.default_rng(0).normal(size=(4096, 384)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    asked = [0]

    def encode(texts: Sequence[str]) -> Vectors:
        asked[0] += len(texts)
        return vectors[[zlib.crc32(text.encode()) % len(vectors) for text in texts]]

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, began = harness.memory("VmRSS"), time.perf_counter()
    if job == "make texts":
        for _ in synthetic_texts(count):
            pass
    elif job == "read at random":
        targets = open_targets(folder)
        order = np.random.default_rng(1).permutation(len(targets))
        for at in range(0, len(order), 32):
            assert len(targets.texts(order[at : at + 32])) == len(targets.vectors(order[at : at + 32]))
    elif job == "survey":
        with TemporaryDirectory() as scratch:
            survey(count, Path(scratch))
    else:
        build_targets(synthetic_texts(count), _plain("made up", encode), Manifest(teacher="made up"), folder)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "growth": harness.memory() - before, "asked": asked[0]}


def memory(scratch: Path) -> None:
    for job in JOBS:
        counts, growth = SURVEYED if job == "survey" else COUNTS, []
        for count in counts:
            done = harness.in_fresh_process("work", job, str(scratch / str(count)), "--texts", str(count))
            growth.append(done["growth"] / 1e6)
            harness.show({"job": job, "texts": count, "texts/s": count / done["seconds"]} | done)
        print(f"{job}: {growth[1] - growth[0]:+.0f} MB from {counts[0]:,} to {counts[1]:,} texts", flush=True)


def main() -> None:
    parser = harness.make_parser(__doc__, "cluster", "training", "memory", "drive", "learn", "work")
    parser.add_argument("model", nargs="?")
    parser.add_argument("store", nargs="?", type=Path)
    parser.add_argument("--texts", type=int, default=1200, help="cluster")
    parser.add_argument("--gpu", action="store_true", help="cluster")
    parser.add_argument("--by-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.what == "drive":
        drive(options, options.folder, options.store, options.address)
    elif options.what == "work":
        print(json.dumps(work(options.model, options.texts, options.store)))
    elif options.what in ("learn", "training"):
        (learn if options.what == "learn" else training)(options)
    else:
        with TemporaryDirectory(prefix="trundle-scale-") as scratch:
            if options.what == "memory":
                memory(Path(scratch))
            else:
                cluster(options, Path(scratch))
                if not options.gpu:
                    options.store = Path(scratch) / "one"
                    training(options)


if __name__ == "__main__":
    main()
