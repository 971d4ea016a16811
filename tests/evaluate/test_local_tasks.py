"""Tasks of each kind in the shared data, if that folder is next to the repository."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from trundle.evaluate.scoring import evaluate, find_tasks
from trundle.evaluate.tasks import Task

DATA = Path(__file__).parents[3] / "shared" / "data"

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not beside this checkout")

NOTES = {
    "ArguAna": "1401 queries ranked without the document that is the query itself",
    "QNLI": "no test split, dev is used",
    "RTE": "no test split, dev is used",
}


def choose_tasks() -> list[Task]:
    """Those with a note, and the smallest of each kind."""
    tasks = find_tasks(["all"], DATA) if DATA.is_dir() else []
    smallest: dict[str, Task] = {}
    for task in sorted(tasks, key=size_of):
        smallest.setdefault(task.kind, task)
    return [task for task in tasks if task.name in NOTES or task is smallest[task.kind]]


def size_of(task: Any) -> int:
    files = [task.path] if task.path.is_file() else task.path.glob("*.parquet")
    return sum(file.stat().st_size for file in files)


TASKS = choose_tasks()


@pytest.mark.parametrize("task", TASKS, ids=lambda task: f"{task.kind}-{task.name}")
def test_it_runs(task, words):
    [result] = evaluate(words, [task])
    assert result.texts > 400
    assert -1 <= result.score <= 1
    assert all(math.isfinite(value) for value in result.measures.values())
    assert result.note == NOTES.get(task.name, "")
    rows = pq.read_table(task.path / "queries.parquet" if task.kind == "retrieval" else task.path)
    splits = set(rows["split"].to_pylist()) if "split" in rows.column_names else {"all"}
    assert result.split == ("test" if "test" in splits else "dev" if "dev" in splits else "all")


def test_the_dev_split_can_be_used(words):
    [result] = evaluate(words, find_tasks(["STSBenchmark"], DATA, split="dev"))
    assert result.split == "dev"
    [test] = evaluate(words, find_tasks(["STSBenchmark"], DATA))
    assert test.fingerprint != result.fingerprint
