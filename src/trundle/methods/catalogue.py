"""The steps there are: one literal table, in the order they are usually taken."""

from __future__ import annotations

from typing import Any

from trundle.methods.align import ALIGN
from trundle.methods.contract import Method
from trundle.methods.contrast import CONTRAST
from trundle.methods.depth import DEPTH
from trundle.methods.finetune import FINETUNE
from trundle.methods.vocabulary import VOCABULARY
from trundle.methods.weights import WEIGHTS
from trundle.methods.width import WIDTH

METHODS: dict[str, Method[Any, Any]] = {
    step.name: step
    for step in (
        VOCABULARY,
        DEPTH,
        WIDTH,
        WEIGHTS,
        CONTRAST,
        ALIGN,
        FINETUNE,
    )
}
