"""What a plan of align tells a person."""

from __future__ import annotations

from typing import Any

import pytest

from trundle.recipe import make_options
from trundle.steps.align import AlignPlan, settings_for
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


def test_only_a_distance_can_be_near_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trundle.steps.align.ENOUGH", 0.02)
    options = [make_options(STEPS["align"], {"steps": 5, "loss": loss}) for loss in ("leaf", "distilbert")]
    assert [settings_for(one, 10, 1, 0).enough for one in options] == [0.02, None]
