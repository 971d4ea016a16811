"""The vectors of the texts that measure a model: held-out texts, and the texts of tasks.

A run computes each of them once; its comparison with the teacher, its scores and its report share them. The
vectors of training and validation texts are in a store (`labelling`): a training reads them from disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trundle.embedder import Embedder, Encode, Vectors, check_vectors
from trundle.errors import BadInput, BadModel
from trundle.progress import SILENT, Progress

_TEXTS_AT_ONCE = 2048


class HeldOutVectors:
    """The vectors of one run, by encoding function and text; each is computed once."""

    def __init__(self, progress: Progress = SILENT) -> None:
        self._progress = progress
        self._tables: dict[Encode, dict[str, Vectors]] = {}

    def remember(self, embedder: Embedder, label: str) -> Embedder:
        """Return the same embedder, which encodes only new texts; `label` names its progress bar."""
        return embedder.through(lambda encode: self._through(embedder.name, encode, label))

    def known(self, encode: Encode) -> Vectors | None:
        """Return all vectors so far from one function of a model."""
        table = self._tables.get(encode)
        return np.stack(list(table.values())) if table else None

    def _through(self, name: str, encode: Encode, label: str) -> Encode:
        def remembered(texts: Sequence[str]) -> Vectors:
            if len(texts) == 0:
                raise BadInput(f"{label} has no texts to encode; add at least one")
            for text in texts:
                if not isinstance(text, str):
                    raise BadInput(f"{label} holds a {type(text).__name__} among its texts; convert it first")
            table = self._tables.setdefault(encode, {})
            # Longest first, as in sentence-transformers, so that slices need no more padding.
            new = sorted({text for text in texts if text not in table}, key=lambda text: (-len(text), text))
            with self._progress.task(label, len(new)) as advance:
                for start in range(0, len(new), _TEXTS_AT_ONCE):
                    part = new[start : start + _TEXTS_AT_ONCE]
                    table.update(zip(part, check_vectors(encode(part), part, name), strict=True))
                    advance(len(part))
            rows = [table[text] for text in texts]
            if len({len(row) for row in rows}) > 1:
                raise BadModel(f"{name} gave vectors of differing widths; check its last module")
            return np.stack(rows)

        return remembered
