"""Vectors as a small index keeps them: their first dimensions only, and each as a byte or a bit.

Bytes and bits are those of sentence-transformers' `quantize_embeddings`. A byte is one of 256 steps between a dimension's
lowest and highest value in calibration vectors; it is compared as the middle of its step. A bit is a sign; compared as ±1,
cosine orders as the Hamming distance does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trundle.artifact import CALIBRATION_FILE as CALIBRATION_FILE
from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput

Precision = Literal["float32", "int8", "binary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
STEPS = 255
SMALLEST_SHARE = 16
"""By default vectors are cut to no less than this part of their width."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Ranges:
    """The lowest and highest value of each dimension, over so many vectors of a teacher."""

    lowest: NDArray[np.float32]
    highest: NDArray[np.float32]
    vectors: int
    teacher: str

    def as_text(self) -> str:
        """JSON, with every number as it is."""
        numbers = {"lowest": self.lowest.tolist(), "highest": self.highest.tolist()}
        return json.dumps({"teacher": self.teacher, "vectors": self.vectors, **numbers}) + "\n"


def measure_ranges(blocks: Iterable[Vectors], teacher: str) -> Ranges:
    """The ranges of vectors that come in blocks."""
    lowest, highest, count = None, None, 0
    for block in blocks:
        low, high = block.min(axis=0), block.max(axis=0)
        lowest = low if lowest is None else np.minimum(lowest, low)
        highest = high if highest is None else np.maximum(highest, high)
        count += len(block)
    if lowest is None or highest is None:
        raise BadInput("there are no vectors to take ranges from; give at least one")
    return Ranges(
        lowest=lowest.astype(np.float32), highest=highest.astype(np.float32), vectors=count, teacher=teacher
    )


def read_ranges(folder: str | Path) -> Ranges | None:
    """The ranges kept in a model's folder, or None where there are none."""
    path = Path(folder) / CALIBRATION_FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lowest, highest = (np.asarray(content[key], dtype=np.float32) for key in ("lowest", "highest"))
        ranges = Ranges(
            lowest=lowest, highest=highest, vectors=int(content["vectors"]), teacher=str(content["teacher"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{path} is damaged ({error}); align the model again, or delete the file") from error
    if lowest.shape != highest.shape or lowest.ndim != 1 or not np.isfinite([lowest, highest]).all():
        raise BadInput(f"{path} is damaged; align the model again, or delete the file")
    return ranges


def shortened(vectors: Vectors, dimensions: int, precision: Precision, ranges: Ranges) -> Vectors:
    """What is left of vectors after being kept so, as numbers that can be compared."""
    kept = vectors[:, :dimensions]
    if precision == "float32":
        return kept
    if precision == "binary":
        return np.where(kept > 0, np.float32(1), np.float32(-1))
    lowest, step = _steps(dimensions, ranges)
    return (lowest + (to_bytes(kept, ranges).astype(np.float32) + 128.5) * step).astype(np.float32)


def to_bytes(vectors: Vectors, ranges: Ranges) -> NDArray[np.int8]:
    """The int8 codes of vectors; ranges are cut to their width."""
    lowest, step = _steps(vectors.shape[1], ranges)
    codes: NDArray[np.int8] = (np.clip(np.floor((vectors - lowest) / step), 0, STEPS) - 128).astype(np.int8)
    return codes


def _steps(dimensions: int, ranges: Ranges) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    lowest = ranges.lowest[:dimensions]
    step = (ranges.highest[:dimensions] - lowest) / STEPS
    return lowest, np.where(step == 0, np.float32(1), step)


def with_shortened(embedder: Embedder, dimensions: int, precision: Precision, ranges: Ranges) -> Embedder:
    """The same model with an index that keeps less."""

    def through(encode: Encode) -> Encode:
        return lambda texts: shortened(encode(texts), dimensions, precision, ranges)

    return Embedder(
        name=f"{embedder.name} ({dimensions} × {precision})",
        text=through(embedder.text),
        query=through(embedder.query),
        document=through(embedder.document),
    )


def bytes_of(dimensions: int, precision: Precision) -> int:
    """What one vector takes in an index."""
    return {"float32": 4 * dimensions, "int8": dimensions, "binary": -(-dimensions // 8)}[precision]


def usual_dimensions(width: int) -> tuple[int, ...]:
    """The whole width, and the powers of two below it."""
    powers = (2**power for power in reversed(range(width.bit_length())))
    return width, *(power for power in powers if width / SMALLEST_SHARE <= power < width)
