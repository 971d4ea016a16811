"""What a training of any step tells a person when it can't go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer

from trundle.errors import BadInput
from trundle.methods.contract import Context
from trundle.methods.training import run_training
from trundle.train.loop import TrainingTask, TrainSettings
from trundle.train.trainer import linear


def test_a_gpu_that_runs_full_names_the_mend(
    monkeypatch: pytest.MonkeyPatch, pico_model: Callable[[str], SentenceTransformer], tmp_path: Path
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 46.00 MiB")

    monkeypatch.setattr("trundle.methods.training.train", full)
    model = pico_model("bert")
    task = TrainingTask(name="align", losses=[], batches=SimpleNamespace())
    context = Context(original=model, cache=tmp_path)
    with pytest.raises(
        BadInput, match="align needs more memory than the GPU has left; pass a smaller --batch-size"
    ):
        run_training(model, task, TrainSettings(steps=1), key=[], schedule=linear(), context=context)
