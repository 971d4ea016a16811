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

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

import pico
from told import Told
from trundle.data.corpus import read_corpus
from trundle.methods.align.teacher_vectors import _ALONE_BY_RANK
from trundle.methods.catalogue import METHODS
from trundle.pipeline.compress import compress
from trundle.recipe import single
from trundle.records import CALIBRATION_FILE
from trundle.scale.local import Asked, build_alone

CHOSEN = {"start": "random", "learning_rate": 1e-3, "precision": "fp32"}
"""With the closed form as a start, pico models have nothing left to learn, and step 0 would be kept."""
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def align_together(student: Path, chosen: dict[str, Any], more: list[str], output: Path) -> str:
    """What `trundle align` in two processes says; it has a cache of its own, so it finds nothing done."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    command = [sys.executable, *TOGETHER, "-m", "trundle", "--", "align", str(student), *options, *more]
    environment = os.environ | {"TRUNDLE_CACHE": str(output.with_name("cache")), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "-o", str(output)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    if "the server socket" in ran.stderr:
        pytest.skip("two processes can't find each other on this machine")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "trundle.json").read_text())["steps"][0]["facts"])


def test_two_processes_make_the_model_that_one_makes(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(f"{text} {number}" for number in range(100) for text in pico.TEXTS))
    student, alone, together = pico_folders("bert"), tmp_path / "alone", tmp_path / "together"
    chosen = CHOSEN | {"teacher": str(pico_folders("mpnet")), "steps": 12}
    corpus = read_corpus([str(texts)], seed=0)
    compress(str(student), single(METHODS["align"], chosen), output=alone, corpus=corpus)
    said = align_together(student, chosen, ["--data", str(texts)], together)
    assert said.count("Written to") == 1
    assert facts(together)["best_step"] == facts(alone)["best_step"] > 0, "what is compared was learned"
    results = [load_file(folder / "model.safetensors") for folder in (alone, together)]
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_two_processes_with_half_a_store_each_learn_what_one_learns(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts, store, student = tmp_path / "texts.txt", tmp_path / "store", pico_folders("bert")
    texts.write_text("\n".join(f"{text} {number}" for number in range(100) for text in pico.TEXTS))
    build_alone([str(texts)], Asked(model=str(pico_folders("mpnet"))), store, shard_size=150)
    chosen = CHOSEN | {"teacher": str(store), "steps": 80}
    compress(str(student), single(METHODS["align"], chosen), output=tmp_path / "alone", replace=False)
    align_together(student, chosen, ["--by-rank"], tmp_path / "together")
    logs: list[list[dict[str, Any]]] = []
    assert [facts(tmp_path / name)["texts"] for name in ("alone", "together")] == [630, 630]
    for name in ("alone", "together"):
        (metrics,) = (tmp_path / name).rglob("align.jsonl")
        logs.append([json.loads(line) for line in metrics.read_text().splitlines()])
    # Other texts meet in a batch: as far apart as two seeds may be, by two of their deviations (docs/scale.md).
    assert last_epochs(logs[1]) == pytest.approx(last_epochs(logs[0]), rel=0.08)
    assert last_validation(logs[1]) == pytest.approx(last_validation(logs[0]), rel=0.18)
    assert last_validation(logs[1]) < 0.8 * logs[1][0]["validation"], "it has learned"


def test_a_closed_form_from_halves_of_a_store_is_that_of_the_whole(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts, store, student = tmp_path / "texts.txt", tmp_path / "store", pico_folders("bert")
    # Ordered by kind: a process that asked its own half alone would know one kind only.
    texts.write_text("\n".join(f"{text} {number}" for text in pico.TEXTS for number in range(40)))
    build_alone([str(texts)], Asked(model=str(pico_folders("mpnet"))), store, shard_size=50)
    chosen, told = {"teacher": str(store), "steps": 0}, Told()
    recipe = single(METHODS["align"], chosen | {"by_rank": True})
    compress(str(student), recipe, output=tmp_path / "alone", progress=told)
    assert _ALONE_BY_RANK in told.lines
    align_together(student, chosen, ["--by-rank"], tmp_path / "together")
    folders = [tmp_path / name for name in ("alone", "together")]
    vectors = [SentenceTransformer(str(folder)).encode(pico.TEXTS) for folder in folders]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-3)
    ranges = [(folder / CALIBRATION_FILE).read_text() for folder in folders]
    assert ranges[1] == ranges[0]


def last_epochs(log: list[dict[str, Any]]) -> float:
    """The mean loss of the steps after the first epoch: a single batch holds texts of one length, hard or easy."""
    lines = [
        (line["step"] - before["step"], line["loss"]) for before, line in pairwise(log) if line["step"] > 20
    ]
    return sum(steps * loss for steps, loss in lines) / sum(steps for steps, _ in lines)


def last_validation(log: list[dict[str, Any]]) -> float:
    return float(log[-1]["validation"])
