"""The steps there are: one literal table, in the order they are usually taken."""

from __future__ import annotations

from typing import Any

from trundle.steps import align, contrast, depth, finetune, vocabulary, weights, width
from trundle.steps.contract import Step

STEPS: dict[str, Step[Any, Any]] = {
    step.name: step
    for step in (
        vocabulary.STEP,
        depth.STEP,
        width.STEP,
        weights.STEP,
        contrast.STEP,
        align.STEP,
        finetune.STEP,
    )
}
