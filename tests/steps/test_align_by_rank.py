"""align where each process opens its own part of a store: what is computed from some texts is computed from all parts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

import pico
from told import Told
from trundle.pipeline import compress
from trundle.recipe import single
from trundle.scale import Asked, build_alone
from trundle.steps.align_texts import ALONE_BY_RANK
from trundle.steps.catalogue import STEPS

TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "trundle", "--")


def test_a_closed_form_by_rank_is_that_of_the_whole_store(
    pico_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    texts, store, student = tmp_path / "texts.txt", tmp_path / "store", pico_folders("bert")
    # Ordered by kind: a process that asked its own half alone would know one kind only.
    texts.write_text("\n".join(f"{text} {number}" for text in pico.TEXTS for number in range(40)))
    build_alone([str(texts)], Asked(model=str(pico_folders("mpnet"))), store, shard_size=50)
    told = Told()
    chosen = {"teacher": str(store), "steps": 0, "by_rank": True}
    compress(str(student), single(STEPS["align"], chosen), output=tmp_path / "alone", progress=told)
    assert ALONE_BY_RANK in told.lines
    arguments = ["align", str(student), "--teacher", str(store), "--steps", "0", "--by-rank"]
    command = [sys.executable, *TOGETHER, *arguments, "-o", str(tmp_path / "together")]
    environment = os.environ | {"TRUNDLE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if "the server socket" in ran.stderr:
        pytest.skip("two processes can't find each other on this machine")
    assert ran.returncode == 0, ran.stderr
    vectors = [SentenceTransformer(str(tmp_path / name)).encode(pico.TEXTS) for name in ("alone", "together")]
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-3)
    assert (tmp_path / "together" / "calibration.json").read_text() == (
        tmp_path / "alone" / "calibration.json"
    ).read_text()
