"""A look at two models by eye: what each finds first, and where both put the same texts on a plane."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Vectors
from trundle.evaluate.ranking import Positions, nearest, unit


@dataclass(frozen=True, kw_only=True, eq=False)
class Top:
    """The nearest documents of each query, best first, with their cosines."""

    positions: Positions
    cosines: NDArray[np.float64]


def find_top(queries: Vectors, documents: Vectors, k: int) -> Top:
    """What each query finds first."""
    positions = nearest(queries, documents, k)
    cosines = np.einsum("qd,qkd->qk", unit(queries), unit(documents)[positions])
    return Top(positions=positions, cosines=cosines)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plane:
    """Vectors of both models on the two directions in which the teacher's differ most."""

    teacher: NDArray[np.float64]
    student: NDArray[np.float64]
    shown: float
    """Share of the teacher's variance that lies in the plane."""


def on_a_plane(teacher: Vectors, student: Vectors) -> Plane:
    """Principal components of the teacher's vectors; the student's are seen from the same side.

    Each direction is turned so that its largest number is positive: the same vectors give the same picture.
    """
    wide = teacher.astype(np.float64)
    centre = wide.mean(axis=0)
    _, sizes, directions = np.linalg.svd(wide - centre, full_matrices=False)
    plane = directions[:2]
    largest = np.abs(plane).argmax(axis=1)
    plane = plane * np.sign(plane[np.arange(len(plane)), largest])[:, None]
    energy = sizes**2
    shown = float(energy[:2].sum() / energy.sum()) if energy.sum() else 1.0
    return Plane(
        teacher=(wide - centre) @ plane.T,
        student=(student.astype(np.float64) - centre) @ plane.T,
        shown=shown,
    )
