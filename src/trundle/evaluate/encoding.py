"""Each distinct text is encoded once, and what comes back is checked before it is used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trundle.embedder import Embedder, Encode, Vectors
from trundle.errors import BadInput, BadModel
from trundle.progress import SILENT, Progress

_TEXTS_AT_ONCE = 2048


class Memory:
    """The vectors of one run, by encoding function and text: tasks that share texts share their vectors."""

    def __init__(self, progress: Progress = SILENT) -> None:
        self._progress = progress
        self._tables: dict[Encode, dict[str, Vectors]] = {}

    def remember(self, embedder: Embedder, label: str) -> Embedder:
        """The same embedder, asked only for texts it has not seen; `label` stands beside the progress."""
        return Embedder(
            name=embedder.name,
            text=self._through(embedder.name, embedder.text, label),
            query=self._through(embedder.name, embedder.query, label),
            document=self._through(embedder.name, embedder.document, label),
        )

    def known(self, encode: Encode) -> Vectors | None:
        """All vectors that a function of a model has given so far."""
        table = self._tables.get(encode)
        return np.stack(list(table.values())) if table else None

    def _through(self, name: str, encode: Encode, label: str) -> Encode:
        def remembered(texts: Sequence[str]) -> Vectors:
            if len(texts) == 0:
                raise BadInput(f"{label} has no texts to encode; give it at least one")
            for text in texts:
                if not isinstance(text, str):
                    raise BadInput(
                        f"{label} holds a {type(text).__name__} among its texts; make it a string first"
                    )
            table = self._tables.setdefault(encode, {})
            # Longest first, as sentence-transformers sorts within one call: slices pad no more than the whole.
            new = sorted({text for text in texts if text not in table}, key=lambda text: (-len(text), text))
            with self._progress.task(label, len(new)) as advance:
                for start in range(0, len(new), _TEXTS_AT_ONCE):
                    part = new[start : start + _TEXTS_AT_ONCE]
                    table.update(zip(part, checked(encode(part), part, name), strict=True))
                    advance(len(part))
            rows = [table[text] for text in texts]
            if len({len(row) for row in rows}) > 1:
                raise BadModel(
                    f"{name} gave vectors of differing widths; load it again and check its last module"
                )
            return np.stack(rows)

        return remembered


def checked(vectors: Vectors, texts: Sequence[str], name: str) -> Vectors:
    """The vectors, if there is one finite row for each text."""
    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2 or len(array) != len(texts):
        raise BadModel(
            f"{name} gave an array of shape {array.shape} for {len(texts)} texts; it must give one row for each"
        )
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        example = texts[int(bad.argmax())]
        raise BadModel(
            f"{name} gave NaN or infinity for {int(bad.sum())} of {len(texts)} texts, {example[:60]!r} for "
            "one; load it in float32, or make it again if its weights are damaged"
        )
    return array


def _check_same_width(queries: Vectors, documents: Vectors, name: str) -> None:
    """Refuse two spaces of differing widths: one cannot be searched with vectors of the other."""
    if queries.shape[1] != documents.shape[1]:
        raise BadInput(
            f"{name} has vectors of {queries.shape[1]} and of {documents.shape[1]} dimensions, which "
            "can't be compared; align the student to the teacher's space first"
        )
