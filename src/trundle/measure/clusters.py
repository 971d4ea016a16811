"""Groups of similar vectors, and the one that stands for each group: tokens of a vocabulary, or queries of a data set."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import BisectingKMeans, KMeans, MiniBatchKMeans
from sklearn.exceptions import ConvergenceWarning

Vectors = NDArray[np.float32]
Numbers = NDArray[np.int64]

SMALL = 4096
"""So many vectors are clustered in one go; more are first split into groups of about this size."""
ROUNDS = 20
FEW = 400
"""Clusters up to which careful first centres (k-means++) are worth their time, which grows with their square."""


def representatives(vectors: Vectors, count: int, *, seed: int) -> Numbers:
    """The positions of the vectors nearest the centres of `count` clusters, by direction."""
    if count >= len(vectors):
        return np.arange(len(vectors))
    return np.sort(_nearest_to_centres(_directions(vectors), count, seed))


def nearest(vectors: Vectors, targets: Vectors) -> Numbers:
    """For each vector, the position of the target with the most similar direction."""
    ends = _directions(targets).T
    parts = [
        np.argmax(_directions(vectors[start : start + SMALL]) @ ends, axis=1)
        for start in range(0, len(vectors), SMALL)
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _directions(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)


def _nearest_to_centres(vectors: Vectors, count: int, seed: int) -> Numbers:
    if len(vectors) <= SMALL or count <= FEW:
        return _one_per_cluster(vectors, count, seed)
    groups = 2 * -(-len(vectors) // SMALL)
    split = BisectingKMeans(
        groups, n_init=1, max_iter=ROUNDS, random_state=seed, bisecting_strategy="largest_cluster"
    )
    labels = split.fit_predict(vectors)
    members = [np.flatnonzero(labels == group) for group in range(groups)]
    found = [
        group[_one_per_cluster(vectors[group], share, seed)]
        for group, share in zip(members, _shares([len(group) for group in members], count), strict=True)
        if share
    ]
    return np.concatenate(found)


def _one_per_cluster(vectors: Vectors, count: int, seed: int) -> Numbers:
    """One position for each cluster; where a cluster came out empty, others fill its place."""
    if count >= len(vectors):
        return np.arange(len(vectors))
    method = KMeans if len(vectors) <= SMALL else MiniBatchKMeans
    with warnings.catch_warnings():
        # Equal vectors leave clusters empty; their places are filled below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        first = "k-means++" if count <= FEW else "random"
        fitted = method(count, init=first, n_init=1, max_iter=ROUNDS, random_state=seed).fit(vectors)
    off_centre = np.linalg.norm(vectors - fitted.cluster_centers_[fitted.labels_], axis=1)
    order = np.lexsort((off_centre, fitted.labels_))
    _, nearest_of_each = np.unique(fitted.labels_[order], return_index=True)
    chosen = order[nearest_of_each]
    others = np.setdiff1d(np.argsort(off_centre, kind="stable"), chosen, assume_unique=True)
    return np.concatenate([chosen, others[: count - len(chosen)]])


def _shares(sizes: list[int], count: int) -> list[int]:
    """`count` shared out by size, exactly: the largest remainders get what rounding down leaves."""
    total = sum(sizes)
    shares = [count * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda group: -(count * sizes[group] % total))
    for group in by_remainder[: count - sum(shares)]:
        shares[group] += 1
    return shares
