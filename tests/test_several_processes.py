"""align in two processes, as torchrun starts it: one asks the teacher, both train, one writes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import pico

TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def call(launch: tuple[str, ...], arguments: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launch, "-m", "trundle", *arguments]
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
        ran = call(launch, ["align", *options, "-o", str(tmp_path / name)], tmp_path / f"cache-{name}")
        if launch is TOGETHER and "the server socket" in ran.stderr:
            pytest.skip("two processes can't find each other on this machine")
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.count("Written to") == 1
        results.append(load_file(tmp_path / name / "model.safetensors"))
    for name, weight in results[0].items():
        torch.testing.assert_close(weight, results[1][name], atol=1e-4, rtol=1e-3, msg=name)
