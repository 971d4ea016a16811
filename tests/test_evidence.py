"""The rule that gives every claim of docs/results.md its verdict."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind


@pytest.fixture
def evidence(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "papers"))
    return importlib.import_module("evidence")


def claim(evidence: Any, *gaps: Any, **more: str) -> Any:
    return evidence.Claim(says="", paper="", here="", scale="", command="A", gaps=gaps, **more)


HIGH, LOW, SPREAD = [80.0, 80.5, 81.0], [70.0, 71.0, 70.2], [60.0, 90.0, 77.0]


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(HIGH, LOW)], "holds"),
        ([(LOW, HIGH)], "does not hold"),
        ([(SPREAD, LOW)], "can't tell"),
        ([(HIGH, LOW), (SPREAD, LOW)], "can't tell"),
        ([(HIGH, LOW), (LOW, HIGH)], "does not hold"),
        ([(HIGH[:2], LOW[:2])], "can't tell"),
        ([(HIGH, LOW[:1])], "can't tell"),
        ([], "can't tell"),
    ],
)
def test_a_verdict_needs_intervals_on_one_side(evidence: Any, pairs: Any, verdict: str) -> None:
    gaps = [evidence.gap(evidence.figure(one), evidence.figure(other)) for one, other in pairs]
    found = claim(evidence, *gaps)
    assert found.verdict == verdict
    assert bool(found.lacks) is (verdict == "can't tell")


def test_figures_of_another_setting_decide_nothing(evidence: Any) -> None:
    clear = evidence.gap(evidence.figure(HIGH), evidence.figure(LOW))
    found = claim(evidence, clear, missing="the published setting")
    assert (found.verdict, found.lacks) == ("can't tell", "the published setting")


def test_no_worse_needs_an_interval_within_the_margin(evidence: Any) -> None:
    one = evidence.figure([80.0, 80.4, 79.7])
    assert claim(evidence, evidence.gap(one, 80.0)).verdict == "can't tell"
    assert claim(evidence, evidence.gap(one, 80.0, margin=0.5)).verdict == "can't tell"
    assert claim(evidence, evidence.gap(one, 80.0, margin=1.0)).verdict == "holds"


def test_the_interval_is_welchs(evidence: Any) -> None:
    found = evidence.gap(evidence.figure(SPREAD), evidence.figure(LOW))
    expected = ttest_ind(SPREAD, LOW, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
