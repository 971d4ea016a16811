"""align in two processes, as torchrun starts it: one encodes the teacher's vectors, both train, one writes.

From a store, each process may also load only its own half. The processes run the commands of all tests one
after the other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

import forked
import pico
from recorded_progress import RecordedProgress
from trundle.cli.app import main
from trundle.data.corpus import read_corpus
from trundle.methods import METHODS
from trundle.methods.align.teacher_vectors import _ALONE_BY_RANK
from trundle.pipeline.compress import run_recipe
from trundle.pipeline.run import Request
from trundle.recipe import single
from trundle.records import CALIBRATION_FILE
from trundle.scale.shard_writer import TeacherSpec, build_local

CHOSEN = {"start": "random", "learning_rate": 1e-3, "precision": "fp32"}
"""With the closed form as a start, pico models have nothing left to learn, and step 0 would be kept."""


def run_commands(lines: list[list[str]]) -> None:
    for words in lines:
        sys.argv = ["trundle", *words]
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code


@dataclass(frozen=True, kw_only=True)
class Command:
    """An alignment: its options, and what only the command line in two processes is given."""

    options: dict[str, Any]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Together:
    """What the commands wrote in two processes, and what they printed."""

    student: Path
    commands: dict[str, Command]
    folder: Path
    printed: str

    def output(self, name: str) -> Path:
        return self.folder / name / "together"

    def alone(self, name: str, **options: Any) -> Path:
        """The folder that one process writes."""
        output = self.folder / name / "alone"
        recipe = single(METHODS["align"], self.commands[name].options | options.pop("more", {}))
        run_recipe(Request(source=str(self.student), output=output, **options), recipe)
        return output


@pytest.fixture(scope="module")
def together(pico_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Together:
    """All commands in two processes with a cache of their own, so they find nothing done."""
    folder, teacher, student = (
        tmp_path_factory.mktemp("together"),
        pico_folders("mpnet", 1),
        pico_folders("bert", 1),
    )
    texts, ordered = folder / "texts.txt", folder / "ordered.txt"
    texts.write_text("\n".join(f"{text} {number}" for number in range(100) for text in pico.TEXTS))
    # Ordered by kind: a process that asked its own half alone would know one kind only.
    ordered.write_text("\n".join(f"{text} {number}" for text in pico.TEXTS for number in range(40)))
    for file, shard_size in ((texts, 150), (ordered, 50)):
        build_local(
            [str(file)], TeacherSpec(model=str(teacher)), folder / f"{file.stem} store", shard_size=shard_size
        )
    commands = {
        "texts": Command(
            options=CHOSEN | {"teacher": str(teacher), "steps": 12}, words=("--data", str(texts))
        ),
        "store": Command(
            options=CHOSEN | {"teacher": str(folder / "texts store"), "steps": 80}, words=("--by-rank",)
        ),
        "closed form": Command(
            options={"teacher": str(folder / "ordered store"), "steps": 0}, words=("--by-rank",)
        ),
    }
    lines = []
    for name, command in commands.items():
        (folder / name).mkdir()
        options = [f"--{key.replace('_', '-')}={value}" for key, value in command.options.items()]
        lines.append(["align", str(student), *options, *command.words, "-o", str(folder / name / "together")])
    printed = forked.together(
        run_commands, lines, output=folder / "printed", environment={"TRUNDLE_CACHE": str(folder / "cache")}
    )
    return Together(student=student, commands=commands, folder=folder, printed=printed[0] + printed[1])


def facts(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "trundle.json").read_text())["steps"][0]["facts"])


def test_two_processes_make_the_model_that_one_makes(together: Together) -> None:
    corpus = read_corpus([str(together.folder / "texts.txt")], seed=0)
    folders = [together.alone("texts", corpus=corpus), together.output("texts")]
    assert together.printed.count("Written to") == len(together.commands)
    steps = [facts(folder)["best_step"] for folder in folders]
    assert steps[0] == steps[1] > 0, "what is compared was learned"
    results = [load_file(folder / "model.safetensors") for folder in folders]
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_two_processes_with_half_a_store_each_learn_what_one_learns(together: Together) -> None:
    folders = [together.alone("store", replace=False), together.output("store")]
    assert [facts(folder)["texts"] for folder in folders] == [630, 630]
    logs: list[list[dict[str, Any]]] = []
    for folder in folders:
        (metrics,) = folder.rglob("align.jsonl")
        logs.append([json.loads(line) for line in metrics.read_text().splitlines()])
    # Other texts meet in a batch: as far from each other as two seeds may be, by two of their deviations
    # (docs/scale.md).
    assert last_epochs(logs[1]) == pytest.approx(last_epochs(logs[0]), rel=0.08)
    assert last_validation(logs[1]) == pytest.approx(last_validation(logs[0]), rel=0.18)
    assert last_validation(logs[1]) < 0.8 * logs[1][0]["validation"], "it has learned"


def test_a_closed_form_from_halves_of_a_store_is_that_of_the_whole(together: Together) -> None:
    progress = RecordedProgress()
    alone = together.alone("closed form", more={"by_rank": True}, progress=progress)
    assert _ALONE_BY_RANK in progress.lines
    folders = [alone, together.output("closed form")]
    vectors = [SentenceTransformer(str(folder)).encode(pico.TEXTS) for folder in folders]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-3)
    ranges = [(folder / CALIBRATION_FILE).read_text() for folder in folders]
    assert ranges[1] == ranges[0]


def last_epochs(log: list[dict[str, Any]]) -> float:
    """The mean loss after the first epoch: single batches hold texts of one length, hard or easy."""
    lines = [
        (line["step"] - before["step"], line["loss"]) for before, line in pairwise(log) if line["step"] > 20
    ]
    return sum(steps * loss for steps, loss in lines) / sum(steps for steps, _ in lines)


def last_validation(log: list[dict[str, Any]]) -> float:
    return float(log[-1]["validation"])
