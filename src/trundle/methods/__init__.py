"""The methods, in the usual order of a recipe. A new method is one folder and one line here."""

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
    method.name: method for method in (VOCABULARY, DEPTH, WIDTH, WEIGHTS, CONTRAST, ALIGN, FINETUNE)
}
