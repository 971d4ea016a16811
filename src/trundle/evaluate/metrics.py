"""Metrics of frozen vectors against labels: pure functions of arrays, with the defaults of mteb.

Ranking metrics are in `retrieval`. scipy and scikit-learn are imported on first use: they take seconds.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from trundle.embedder import Vectors
from trundle.evaluate.retrieval import _paired_cosines

_SAMPLES_PER_LABEL = 8
_EXPERIMENTS = 10
_CLASSIFIER_ITERATIONS = 100
_CLUSTERING_BATCH = 500


def _correlations(values: ArrayLike, gold: ArrayLike) -> dict[str, float]:
    """Spearman and Pearson correlation; 0 if there is none because all values are equal."""
    given, wanted = np.asarray(values, dtype=np.float64), np.asarray(gold, dtype=np.float64)
    if len(wanted) < 2 or np.ptp(given) == 0 or np.ptp(wanted) == 0:
        return {"spearman": 0.0, "pearson": 0.0}
    from scipy.stats import pearsonr, spearmanr

    return {
        "spearman": float(spearmanr(wanted, given).statistic),
        "pearson": float(pearsonr(wanted, given).statistic),
    }


def _similarity_measures(left: Vectors, right: Vectors, scores: Sequence[float]) -> dict[str, float]:
    return _correlations(_paired_cosines(left, right), scores)


def _pair_measures(left: Vectors, right: Vectors, labels: Sequence[float]) -> dict[str, float]:
    """Average precision of cosine as a detector of the pairs labelled 1."""
    from sklearn import metrics

    return {"ap": float(metrics.average_precision_score(labels, _paired_cosines(left, right)))}


def _few_shot_samples(labels: Sequence[str], *, seed: int) -> list[list[int]]:
    """The rows to train on in each experiment: the first few of every label after a shuffle."""
    # Each experiment shuffles the order of the one before with the same seed, as mteb does.
    order = list(range(len(labels)))
    samples = []
    for _ in range(_EXPERIMENTS):
        np.random.RandomState(seed).shuffle(order)
        taken: Counter[str] = Counter()
        sample = []
        for row in order:
            if taken[labels[row]] < _SAMPLES_PER_LABEL:
                taken[labels[row]] += 1
                sample.append(row)
        samples.append(sample)
    return samples


def _classification_measures(
    train: Vectors,
    train_labels: Sequence[str],
    test: Vectors,
    test_labels: Sequence[str],
    samples: Sequence[Sequence[int]],
) -> dict[str, float]:
    """Accuracy and macro F1 of logistic regression on frozen vectors, mean over the samples."""
    from sklearn import metrics
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    # Numbers instead of words give the same figures, faster.
    _, numbers = np.unique([*train_labels, *test_labels], return_inverse=True)
    labels, gold = np.split(numbers, [len(train_labels)])
    accuracies, f1s = [], []
    for sample in samples:
        classifier = LogisticRegression(max_iter=_CLASSIFIER_ITERATIONS)
        with warnings.catch_warnings():
            # The number of iterations is part of the metric.
            warnings.simplefilter("ignore", ConvergenceWarning)
            classifier.fit(train[sample], labels[sample])
        predicted = classifier.predict(test)
        accuracies.append(metrics.accuracy_score(gold, predicted))
        f1s.append(metrics.f1_score(gold, predicted, average="macro", zero_division=0.0))
    return {"accuracy": float(np.mean(accuracies)), "f1": float(np.mean(f1s))}


def _clustering_measures(vectors: Vectors, labels: Sequence[str], *, seed: int) -> dict[str, float]:
    """V-measure of mini-batch k-means with one cluster per label."""
    from sklearn import metrics
    from sklearn.cluster import MiniBatchKMeans

    model = MiniBatchKMeans(
        n_clusters=len(set(labels)), batch_size=_CLUSTERING_BATCH, n_init="auto", random_state=seed
    )
    return {"v_measure": float(metrics.v_measure_score(list(labels), model.fit(vectors).labels_))}


def answer_measures(scores: Vectors, right: Sequence[float], classes: int) -> dict[str, float]:
    """Metrics of the highest score of each row as its class, or of the only score if there are no classes."""
    if classes:
        return _class_measures(scores.argmax(axis=1).tolist(), right, classes)
    given, gold = scores[:, 0].astype(np.float64), np.asarray(right, dtype=np.float64)
    return _correlations(given, gold) | {"distance": float(np.abs(given - gold).mean())}


def _class_measures(answers: Sequence[float], right: Sequence[float], classes: int) -> dict[str, float]:
    """Accuracy, F1 and Matthews correlation. F1 is that of the second of two classes (GLUE), or the mean.

    Matthews correlation is 0 if only one class is ever answered.
    """
    from sklearn import metrics

    how = {"pos_label": 1} if classes == 2 else {"average": "macro"}
    return {
        "accuracy": float(metrics.accuracy_score(right, answers)),
        "f1": float(metrics.f1_score(right, answers, zero_division=0.0, **how)),
        "matthews": float(metrics.matthews_corrcoef(right, answers)),
    }
