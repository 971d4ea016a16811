"""The error of a training that runs out of memory."""

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


def test_a_full_gpu_gives_an_error_with_a_fix(
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
