"""How good the answers of a classifier or of a model that gives a number are: pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef


def class_measures(answers: Sequence[float], right: Sequence[float], classes: int) -> dict[str, float]:
    """Accuracy, F1 and Matthews correlation. Of two classes, F1 is the second's, as in GLUE; of more, their mean.

    Where one class is all that is ever answered, Matthews correlation is 0.
    """
    f1 = (
        f1_score(right, answers, pos_label=1, zero_division=0.0)
        if classes == 2
        else f1_score(right, answers, average="macro", zero_division=0.0)
    )
    return {
        "accuracy": float(accuracy_score(right, answers)),
        "f1": float(f1),
        "matthews": float(matthews_corrcoef(right, answers)),
    }


def number_measures(answers: ArrayLike, right: ArrayLike) -> dict[str, float]:
    """Pearson and Spearman correlation, 0 where there is none to speak of, and the mean distance."""
    given, gold = np.asarray(answers, dtype=np.float64), np.asarray(right, dtype=np.float64)
    distance = float(np.abs(given - gold).mean())
    if len(gold) < 2 or np.ptp(given) == 0 or np.ptp(gold) == 0:
        return {"pearson": 0.0, "spearman": 0.0, "distance": distance}
    return {
        "pearson": float(pearsonr(gold, given).statistic),
        "spearman": float(spearmanr(gold, given).statistic),
        "distance": distance,
    }
