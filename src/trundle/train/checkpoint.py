"""The files of a training run: checkpoints, written atomically, and the training log."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trundle.errors import BadInput
from trundle.folders import whole_folder, write_whole
from trundle.records import TRAINING_LOG_FILE, TrainingRecord, training_log_up_to

_CHECKPOINTS = "checkpoints"
_STATE_FILE = "state.pt"


def _copies(model: nn.Module) -> dict[str, Tensor]:
    """Copies every tensor that training can change to main memory; frozen weights are left out."""
    trained = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
    return {
        name: tensor.detach().to("cpu", copy=True) for name, tensor in chain(trained, model.named_buffers())
    }


def _put_back(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Overwrites weights in place, so that an optimizer keeps its references to the tensors."""
    places = dict(chain(model.named_parameters(), model.named_buffers()))
    with torch.no_grad():
        for name, tensor in weights.items():
            places[name].copy_(tensor)


def has_checkpoint(folder: Path) -> bool:
    """Whether a training in this folder can be resumed."""
    return any((folder / _CHECKPOINTS).glob("step-*"))


def _write_checkpoint(folder: Path, step: int, content: Mapping[str, Any]) -> None:
    """Writes a checkpoint, then deletes the older ones, so that there is always a complete one."""
    place = folder / _CHECKPOINTS / f"step-{step:09d}"
    with whole_folder(place, replace=True, marks=(_STATE_FILE,)) as scratch:
        try:
            torch.save(dict(content), scratch / _STATE_FILE)
        except RuntimeError as error:  # raised by torch's writer if the disk is full
            raise OSError(str(error).splitlines()[0]) from error
    for old in place.parent.iterdir():
        if old != place and old.is_dir():
            shutil.rmtree(old)


def _read_checkpoint(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the newest checkpoint, or None; rejects one that was made with other settings."""
    places = sorted((folder / _CHECKPOINTS).glob("step-*"))
    if not places:
        return None
    file = places[-1] / _STATE_FILE
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        stored = content["identity"]
    except Exception as error:
        raise BadInput(f"{file} is damaged; delete {folder / _CHECKPOINTS} and run again") from error
    for name, value in identity.items():
        if stored.get(name) != value:
            raise BadInput(
                f"{folder} was started with {name} {stored.get(name)}, not {value}; "
                "resume it with the same setting, or choose another folder"
            )
    return content


def _keep_metrics(folder: Path, *, up_to: int) -> None:
    """Drop the lines after step `up_to`, and one a kill cut short: the resumed run writes them again."""
    path = folder / TRAINING_LOG_FILE
    if path.is_file():
        write_whole(path, training_log_up_to(path.read_text(encoding="utf-8"), up_to))


def _add_metrics(folder: Path, record: TrainingRecord) -> None:
    """Add one line to the training log."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / TRAINING_LOG_FILE).open("a", encoding="utf-8") as file:
        file.write(record.as_line())
