"""Vectors as a small index stores them: truncated to their first dimensions, and in int8 or binary.

The codes are those of sentence-transformers' `quantize_embeddings`. An int8 code is one of 256 intervals
between a dimension's lowest and highest value in calibration vectors, compared as the middle of its interval.
Binary keeps signs, compared as ±1: then cosine orders as the Hamming distance does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trundle.data.texts import Text
from trundle.embedder import Embedder, Encode, Vectors, asymmetric, top_agreement
from trundle.errors import BadInput
from trundle.evaluate.fidelity import AGREEMENT_AT, queries_and_documents
from trundle.evaluate.retrieval import nearest
from trundle.evaluate.scoring import _SEED
from trundle.evaluate.tasks import Task
from trundle.progress import Progress
from trundle.records import CALIBRATION_FILE
from trundle.teacher.targets import HeldOutVectors

_Precision = Literal["float32", "int8", "binary"]
_PRECISIONS: tuple[_Precision, ...] = get_args(_Precision)
_STEPS = 255
_SMALLEST_SHARE = 16
"""By default vectors are not truncated below this part of their width."""

_Score = Callable[[Embedder], dict[str, float]]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Ranges:
    """The lowest and highest value of each dimension, over some vectors of a teacher."""

    lowest: NDArray[np.float32]
    highest: NDArray[np.float32]
    vectors: int
    teacher: str

    def as_text(self) -> str:
        numbers = {"lowest": self.lowest.tolist(), "highest": self.highest.tolist()}
        return json.dumps({"teacher": self.teacher, "vectors": self.vectors, **numbers}) + "\n"


def measure_ranges(blocks: Iterable[Vectors], teacher: str) -> _Ranges:
    """The ranges of vectors that come in blocks."""
    ends = [(block.min(axis=0), block.max(axis=0), len(block)) for block in blocks]
    if not ends:
        raise BadInput("there are no vectors to take ranges from; pass at least one")
    lows, highs, counts = zip(*ends, strict=True)
    lowest, highest = np.min(lows, axis=0).astype(np.float32), np.max(highs, axis=0).astype(np.float32)
    return _Ranges(lowest=lowest, highest=highest, vectors=sum(counts), teacher=teacher)


def read_ranges(folder: str | Path) -> _Ranges | None:
    """The ranges in a model's folder, or None if there are none."""
    path = Path(folder) / CALIBRATION_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lowest, highest = (np.asarray(content[key], dtype=np.float32) for key in ("lowest", "highest"))
        if lowest.shape != highest.shape or lowest.ndim != 1 or not np.isfinite([lowest, highest]).all():
            raise ValueError("its ranges are not finite lists of one length")
        return _Ranges(
            lowest=lowest, highest=highest, vectors=int(content["vectors"]), teacher=str(content["teacher"])
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadInput(f"{path} is damaged ({error}); align the model again, or delete the file") from error


def _shortened(vectors: Vectors, dimensions: int, precision: _Precision, ranges: _Ranges) -> Vectors:
    """Truncated and quantised vectors, as numbers that can be compared."""
    kept = vectors[:, :dimensions]
    if precision == "float32":
        return kept
    if precision == "binary":
        return np.where(kept > 0, np.float32(1), np.float32(-1))
    lowest, step = _steps(dimensions, ranges)
    return (lowest + (_to_bytes(kept, ranges).astype(np.float32) + 128.5) * step).astype(np.float32)


def _to_bytes(vectors: Vectors, ranges: _Ranges) -> NDArray[np.int8]:
    """The int8 codes of vectors, which may be truncated."""
    lowest, step = _steps(vectors.shape[1], ranges)
    codes: NDArray[np.int8] = (np.clip(np.floor((vectors - lowest) / step), 0, _STEPS) - 128).astype(np.int8)
    return codes


def _steps(dimensions: int, ranges: _Ranges) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    lowest = ranges.lowest[:dimensions]
    step = (ranges.highest[:dimensions] - lowest) / _STEPS
    return lowest, np.where(step == 0, np.float32(1), step)


def _with_shortened(embedder: Embedder, dimensions: int, precision: _Precision, ranges: _Ranges) -> Embedder:
    def shorten(encode: Encode) -> Encode:
        return lambda texts: _shortened(encode(texts), dimensions, precision, ranges)

    return embedder.through(shorten, f"{embedder.name} ({dimensions} × {precision})")


def _bytes_of(dimensions: int, precision: _Precision) -> int:
    return {"float32": 4 * dimensions, "int8": dimensions, "binary": -(-dimensions // 8)}[precision]


def _usual_dimensions(width: int) -> tuple[int, ...]:
    """The full width, and the powers of two below it."""
    powers = (2**power for power in reversed(range(width.bit_length())))
    return width, *(power for power in powers if width / _SMALLEST_SHARE <= power < width)


@dataclass(frozen=True, kw_only=True)
class Shorten:
    """How vectors are truncated and quantised."""

    dimensions: tuple[int, ...] = ()
    """Dimensions to truncate to; none: the usual ones."""
    ranges: Mapping[str, _Ranges] = field(default_factory=dict)
    """int8 ranges by model; a model without gets those of the teacher's vectors of the measured texts."""


@dataclass(frozen=True, kw_only=True)
class _ShortenedScore:
    """One way to store vectors, and the scores of searches in them."""

    dimensions: int
    precision: _Precision
    bytes: int
    scores: dict[str, float]
    """Of the teacher alone, of the student's queries in the teacher's index, and of the student alone."""
    kept: dict[str, float | None]
    """Each score as a share of the same score with full vectors."""
    tasks: dict[str, dict[str, float]]


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """All ways to store vectors, for one student."""

    student: str
    teacher: str
    measure: str
    calibration: str
    rows: tuple[_ShortenedScore, ...]


def _measure_inheritance(
    student: Embedder,
    teacher: Embedder,
    score: _Score,
    dimensions: Sequence[int],
    ranges: _Ranges,
    progress: Progress,
) -> tuple[_ShortenedScore, ...]:
    """Score both models, and the student in the teacher's index, for each way to store vectors."""
    width = len(ranges.lowest)
    ways = list(product(sorted({width, *dimensions}, reverse=True), _PRECISIONS))
    rows: list[_ShortenedScore] = []
    with progress.task(f"shortened vectors, {student.name}", len(ways)) as advance:
        for size, precision in ways:
            theirs, ours = (_with_shortened(model, size, precision, ranges) for model in (teacher, student))
            models = {"teacher": theirs, "asymmetric": asymmetric(ours, theirs), "student": ours}
            tasks = {who: score(model) for who, model in models.items()}
            means = {who: sum(found.values()) / len(found) for who, found in tasks.items()}
            full = rows[0].scores if rows else means
            row = _ShortenedScore(
                dimensions=size,
                precision=precision,
                bytes=_bytes_of(size, precision),
                scores=means,
                kept={who: mean / full[who] if full[who] else None for who, mean in means.items()},
                tasks=tasks,
            )
            rows.append(row)
            advance(1)
    return tuple(rows)


def _inherited(
    model: Embedder,
    teacher: Embedder,
    tasks: Sequence[Task],
    texts: Sequence[Text],
    shorten: Shorten,
    held_out: HeldOutVectors,
    progress: Progress,
) -> list[Inheritance]:
    """The scores of shortened vectors on the tasks, and their agreement on the texts."""
    theirs, ours = (held_out.remember(one, f"{one.name}: encoding") for one in (teacher, model))
    measured: dict[str, _Score] = {}
    if tasks:
        chosen = [task for task in tasks if task.has_documents] or list(tasks)
        names = ", ".join(task.name for task in chosen)
        measured[f"mean of {names}" if len(chosen) > 1 else names] = _by_tasks(chosen)
    if texts:
        by_agreement = _by_agreement(theirs, *queries_and_documents(texts))
        measured[f"agreement@{AGREEMENT_AT} with whole vectors of the teacher"] = by_agreement
    ranges = shorten.ranges.get(model.name)
    if ranges is not None:
        calibration = f"{ranges.vectors:,} training vectors of the teacher, kept with the model"
    else:
        seen = [held_out.known(encode) for encode in dict.fromkeys((teacher.document, teacher.text))]
        ranges = measure_ranges([block for block in seen if block is not None], teacher.name)
        calibration = f"{ranges.vectors:,} of the measured vectors: the model's folder keeps no ranges"
    dimensions = shorten.dimensions or _usual_dimensions(len(ranges.lowest))
    return [
        Inheritance(
            student=model.name,
            teacher=teacher.name,
            measure=measure,
            calibration=calibration,
            rows=_measure_inheritance(ours, theirs, score, dimensions, ranges, progress),
        )
        for measure, score in measured.items()
    ]


def _by_tasks(tasks: Sequence[Task]) -> _Score:
    def score(model: Embedder) -> dict[str, float]:
        found = {task.name: task.run(model, seed=_SEED) for task in tasks}
        return {name: scores.measures[scores.main] for name, scores in found.items()}

    return score


def _by_agreement(teacher: Embedder, queries: Sequence[str], documents: Sequence[str]) -> _Score:
    asked, held = list(dict.fromkeys(queries)), list(dict.fromkeys(documents))
    truth = nearest(teacher.query(asked), teacher.document(held), AGREEMENT_AT)

    def score(model: Embedder) -> dict[str, float]:
        found = nearest(model.query(asked), model.document(held), AGREEMENT_AT)
        return {f"agreement@{AGREEMENT_AT}": top_agreement(truth, found)}

    return score
