"""Training from one store in one process, in two, and in two that each open half of it: losses side by side.

    python benchmarks/scale_training.py MODEL STORE

The student is the first layer of MODEL with a new linear layer; every seed begins and goes on otherwise. All ways
validate by the same texts, which none of them learns from. What the seeds differ by is the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from trundle.methods.align.leaf import make_align_task
from trundle.model.heads import copy_of, with_new_head
from trundle.model.load import load
from trundle.model.surgery import Cut, cut
from trundle.progress import is_first, own_rank, process_count
from trundle.teacher.targets import Targets, _TargetsPart, open_share, open_targets
from trundle.train import loop
from trundle.train.loop import TrainSettings

SEEDS, STEPS, BATCH = 5, 80, 16
VALIDATED = 10
"""One text of so many is validated by."""
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one process": ((), ()),
    "two processes": (TOGETHER, ()),
    "two processes, by rank": (TOGETHER, ("--by-rank",)),
}


def chosen(targets: Targets, *, validated: bool) -> Targets:
    """The texts to learn from or to validate by, told apart by their checksums."""
    texts = targets.texts(np.arange(len(targets)))
    kept = [
        place for place, text in enumerate(texts) if (not zlib.crc32(text.encode()) % VALIDATED) == validated
    ]
    return _TargetsPart(targets, np.asarray(kept))


def learn(model: str, store: Path, *, by_rank: bool) -> list[dict[str, float]]:
    """What each process does: one training for each seed."""
    whole = open_targets(store)
    own = open_share(store, rank=own_rank(), processes=process_count()) if by_rank else whole
    learned, validation = chosen(own, validated=False), chosen(whole, validated=True)
    first_layer = cut(load(model, device="cpu"), Cut(blocks=(0,)))
    results = []
    for seed in range(SEEDS):
        student = with_new_head(copy_of(first_layer), whole.width, normalise=whole.normalised, seed=seed)
        task = make_align_task(student, learned, validation, batch_size=BATCH, seed=seed)
        settings = TrainSettings(
            steps=STEPS,
            learning_rate=3e-4,
            dropout=False,
            seed=seed,
            record_every=STEPS,
            validate_every=STEPS,
        )
        result = loop.train(student, task, settings)
        assert result.validation is not None
        results.append({"loss": result.loss, "validation": result.validation})
    return results


def compare(model: str, store: Path) -> list[dict[str, Any]]:
    """All ways, each beside one process: the largest difference of a seed, and the means with what seeds differ by."""
    rows: list[dict[str, Any]] = []
    first: dict[str, list[float]] = {}
    for name, (launch, more) in WAYS.items():
        command = [sys.executable, *launch, __file__, model, str(store), "--learn", *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        said = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
        results = json.loads(next(line for line in said.splitlines() if line.startswith("[")))
        for measure in ("loss", "validation"):
            values = [result[measure] for result in results]
            alone = first.setdefault(measure, values)
            row = {
                "training": name,
                "measure": measure,
                "mean": float(np.mean(values)),
                "deviation between seeds": float(np.std(values, ddof=1)),
                "mean to one process": float(np.mean(values) / np.mean(alone)),
                "largest difference of a seed": float(np.abs(np.subtract(values, alone)).max()),
            }
            print("  ".join(f"{key}: {shown(value)}" for key, value in row.items()), flush=True)
            rows.append(row)
    return rows


def shown(value: object) -> str:
    return f"{value:.5f}" if isinstance(value, float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("store", type=Path)
    parser.add_argument("--learn", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--by-rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.learn:
        compare(asked.model, asked.store)
        return
    results = learn(asked.model, asked.store, by_rank=asked.by_rank)
    if is_first():
        print(json.dumps(results))


if __name__ == "__main__":
    main()
