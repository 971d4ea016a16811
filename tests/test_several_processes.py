"""align in two processes, as torchrun starts it: one asks the teacher, both train, one writes.

From a store, each may also open its own half of it and nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pico
from trundle.pipeline import compress
from trundle.recipe import single
from trundle.scale import Asked, build_alone
from trundle.steps.catalogue import STEPS

TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def call(launch: tuple[str, ...], arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launch, "-m", "trundle", "--", *arguments]
    environment = os.environ | {"TRUNDLE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)


def test_two_processes_make_the_model_that_one_makes(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for number in range(100) for text in pico.TEXTS))
    teacher, student = pico_folders("mpnet"), pico_folders("bert")
    results = []
    for launch, name in ((("-W", "error::SyntaxWarning"), "alone"), (TOGETHER, "together")):
        options = [str(student), "--teacher", str(teacher), "--steps", "12", "--data", str(texts)]
        options += ["--precision", "fp32"]
        ran = call(launch, ["align", *options, "-o", str(tmp_path / name)], tmp_path / f"cache-{name}")
        if launch is TOGETHER and "the server socket" in ran.stderr:
            pytest.skip("two processes can't find each other on this machine")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("Written to") == 1
        results.append(load_file(tmp_path / name / "model.safetensors"))
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_two_processes_with_half_a_store_each_learn_what_one_learns(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts, store, student = tmp_path / "texts.txt", tmp_path / "store", pico_folders("bert")
    texts.write_text("\n".join(f"{text} {number}" for number in range(100) for text in pico.TEXTS))
    build_alone([str(texts)], Asked(model=str(pico_folders("mpnet"))), store, shard_size=150)
    chosen = {
        "teacher": str(store),
        "steps": 80,
        "start": "random",
        "learning_rate": 1e-3,
        "precision": "fp32",
    }
    compress(str(student), single(STEPS["align"], chosen), output=tmp_path / "alone", replace=False)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    arguments = ["align", str(student), *options, "--by-rank", "-o", str(tmp_path / "together")]
    ran = call(TOGETHER, arguments, tmp_path / "cache")
    if "the server socket" in ran.stderr:
        pytest.skip("two processes can't find each other on this machine")
    assert ran.returncode == 0, ran.stderr
    logs: list[list[dict[str, Any]]] = []
    steps = [json.loads((tmp_path / name / "trundle.json").read_text()) for name in ("alone", "together")]
    assert [step["steps"][0]["facts"]["texts"] for step in steps] == [630, 630]
    for name in ("alone", "together"):
        (metrics,) = (tmp_path / name).rglob("align.jsonl")
        logs.append([json.loads(line) for line in metrics.read_text().splitlines()])
    # Other texts meet in a batch: as far apart as two seeds may be, by two of their deviations (docs/scale.md).
    assert last_epochs(logs[1]) == pytest.approx(last_epochs(logs[0]), rel=0.08)
    assert last_validation(logs[1]) == pytest.approx(last_validation(logs[0]), rel=0.18)
    assert last_validation(logs[1]) < 0.8 * logs[1][0]["validation"], "it has learned"


def last_epochs(log: list[dict[str, Any]]) -> float:
    """The mean loss of the steps after the first epoch: a single batch holds texts of one length, hard or easy."""
    lines = [
        (line["step"] - before["step"], line["loss"]) for before, line in pairwise(log) if line["step"] > 20
    ]
    return sum(steps * loss for steps, loss in lines) / sum(steps for steps, _ in lines)


def last_validation(log: list[dict[str, Any]]) -> float:
    return float(log[-1]["validation"])
