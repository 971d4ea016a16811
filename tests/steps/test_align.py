"""What a plan of align tells a person."""

from __future__ import annotations

from typing import Any

import pytest

from trundle.recipe import make_options
from trundle.steps.align import AlignPlan
from trundle.steps.catalogue import STEPS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "training for 3 × 10 epochs"),
        ({"steps": 0}, "in closed form"),
        ({"steps": 100}, "training for 100 steps"),
        ({"minutes": 30}, "training for 30 minutes"),
        ({"minutes": 30, "steps": 100}, "training for 30 minutes, at most 100 steps"),
    ],
)
def test_the_length_of_the_training_is_told_whole(options: dict[str, Any], says: str) -> None:
    asked = make_options(STEPS["align"], options)
    plan = AlignPlan(options=asked, teacher="large", inputs=8, outputs=16, normalise=True)
    assert str(plan) == f"8 → 16 into the space of large, {says}"
