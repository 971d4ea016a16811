"""Texts sent through a model to see what happens inside: hooks look, padding is told from tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import batch_to_device
from torch import Tensor

from trundle.model.limits import LONGEST
from trundle.model.modes import dropping
from trundle.progress import SILENT, Progress

BATCH = 32


@torch.no_grad()
def read_through(
    model: SentenceTransformer,
    texts: Sequence[str],
    before: Callable[[Tensor], None],
    *,
    label: str,
    progress: Progress = SILENT,
) -> None:
    """Run texts of like length together, cut after 512 tokens; `before` each batch hear which positions are tokens, not padding."""
    ordered, takes = sorted(texts, key=len), model.max_seq_length
    model.max_seq_length = min(takes or LONGEST, LONGEST)
    try:
        with dropping(model, False), progress.task(label, len(ordered)) as advance:
            for start in range(0, len(ordered), BATCH):
                chosen = ordered[start : start + BATCH]
                features = batch_to_device(model.preprocess(chosen), model.device)
                before(features["attention_mask"].flatten().bool())
                model(features)
                advance(len(chosen))
    finally:
        model.max_seq_length = takes
