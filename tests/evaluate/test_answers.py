"""Metrics of a classifier against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trundle.evaluate.metrics import _class_measures, answer_measures


def test_two_classes():
    # right: two of three ones, one of two zeros
    found = _class_measures([1, 1, 0, 0, 1], [1, 1, 1, 0, 0], 2)
    assert found["accuracy"] == pytest.approx(3 / 5)
    assert found["f1"] == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert found["matthews"] == pytest.approx((2 * 1 - 1 * 1) / (3 * 2 * 3 * 2) ** 0.5)


def test_more_classes_count_the_same_in_f1():
    found = _class_measures([0, 0, 0, 1, 0], [0, 0, 0, 1, 2], 3)
    assert found["f1"] == pytest.approx((6 / 7 + 1 + 0) / 3)


def test_one_answer_for_everything_is_no_correlation():
    assert _class_measures([1, 1, 1], [1, 0, 1], 2)["matthews"] == 0
    found = answer_measures(np.full((2, 1), 3, np.float32), [1.0, 2.0], classes=0)
    assert found == {"pearson": 0, "spearman": 0, "distance": 1.5}


def test_numbers():
    found = answer_measures(np.array([[1], [2], [10]], np.float32), [1.0, 2.0, 3.0], classes=0)
    assert found["spearman"] == pytest.approx(1)
    assert 0.8 < found["pearson"] < 1
    assert found["distance"] == pytest.approx(7 / 3)
