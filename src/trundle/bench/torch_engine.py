"""A model run by torch through sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from trundle.bench.engines import _Opened
from trundle.model.encode import embedder
from trundle.model.load import load


def _open_model(model: str, *, threads: int, batch_size: int) -> _Opened:
    """Open a folder or hub name; torch is told its threads, as it need not follow the environment."""
    torch.set_num_threads(threads)
    opened = load(model)
    return _Opened(
        embedder=embedder(opened, name=model, batch_size=batch_size),
        parameters=sum(parameter.numel() for parameter in opened.parameters()),
        max_tokens=_limit(opened.max_seq_length),
        device=str(opened.device),
        folder=_folder(model, opened.transformers_model),
    )


def _limit(tokens: float | None) -> int | None:
    """How much of a text is read; a static model states infinity, which means no limit."""
    return None if tokens is None or tokens == float("inf") else int(tokens)


def _folder(model: str, backbone: torch.nn.Module | None) -> Path | None:
    """Where the files are: the folder that was given, or where a hub name was fetched to."""
    for place in (Path(model).expanduser(), Path(str(getattr(backbone, "name_or_path", "")))):
        if place.is_dir() and place != Path():
            return place
    return None
