"""What an alignment leaves besides the model: ranges to keep its vectors as bytes, and the margin while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import trundle.data as data
import trundle.evaluate as evaluate
import trundle.model as body
from trundle.steps.align_texts import joined, sampled
from trundle.steps.contract import Context

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data import Targets

CALIBRATION_TEXTS = 8192
MARGIN_TEXTS = 2048


def calibration(targets: Targets, teacher: str, seed: int) -> dict[str, str]:
    """The file with the ranges of the teacher's dimensions, for whoever keeps its vectors or the student's as bytes."""
    positions = sampled(targets, CALIBRATION_TEXTS, seed)
    ranges = evaluate.measure_ranges([joined(targets, targets.vectors(positions))], teacher)
    return {evaluate.CALIBRATION_FILE: ranges.as_text()}


def watch_margin(
    student: SentenceTransformer, validation: Targets | None, context: Context
) -> Callable[[int, float], dict[str, float]] | None:
    """What is measured beside the validation loss; None where there are too few texts for it."""
    if validation is None:
        return None
    positions = data.sample(range(len(validation)), MARGIN_TEXTS, seed=context.seed)
    watch = evaluate.watch_margin(
        body.embedder(student, name="student"), validation.chosen(positions), validation.vectors(positions)
    )
    if watch is None:
        context.progress.say("too few validation texts to measure the margin; give more with --data")
    return watch
