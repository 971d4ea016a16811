"""How close a graph's vectors are to torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from trundle.embedder import Vectors, top_agreement
from trundle.errors import BadModel

_PROBES = (
    "a",
    "how do I keep my index when the model changes?",
    "The river that runs through the old town carries more water in spring than in autumn.",
    "Größe, naïve café, 東京 and emoji 🙂 appear in real text",
    "SELECT name, COUNT(*) FROM visits WHERE day >= '2024-01-01' GROUP BY name;",
    "A small model that shares the frame of a large one is slid under it by day and pulled out by night. "
    * 6,
    "",
    "one text that is longer than anything a model takes, so that it is cut at the end " * 60,
)
_FLOAT_COSINE = 0.9999
"""What a float32 graph must reach on every probe; rounding alone leaves six nines."""
_NEIGHBOURS = 10


@dataclass(frozen=True, kw_only=True)
class _Closeness:
    """Cosines of a graph's vectors with torch's, over some texts."""

    texts: int
    lowest_cosine: float
    mean_cosine: float
    largest_difference: float
    worst: str
    """The text with the lowest cosine."""

    def as_json(self) -> dict[str, float | int | str]:
        return {
            "texts": self.texts,
            "lowest cosine": round(self.lowest_cosine, 6),
            "mean cosine": round(self.mean_cosine, 6),
            "largest difference": float(f"{self.largest_difference:.2g}"),
        }


def _torch_vectors(model: SentenceTransformer, texts: Sequence[str]) -> Vectors:
    """Torch's vectors, each text alone, so that padding has no influence."""
    with torch.inference_mode():
        vectors = model.encode(
            list(texts), batch_size=1, prompt="", convert_to_numpy=True, show_progress_bar=False
        )
    return np.asarray(vectors, dtype=np.float32)


def _compare(vectors: Vectors, reference: Vectors, texts: Sequence[str]) -> _Closeness:
    """A graph's vectors of texts compared with torch's; two equal vectors agree even if they are zero."""
    if vectors.shape != reference.shape:
        raise BadModel(
            f"the graph's vectors are {vectors.shape}, torch's {reference.shape}; report this model"
        )
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    dots = np.einsum("ij,ij->i", vectors, reference)
    same = np.abs(vectors - reference).max(axis=1, initial=0) < 1e-6
    cosines = np.where(same, np.float32(1), dots / np.maximum(lengths, 1e-12)).astype(np.float32)
    worst = int(np.argmin(cosines))
    return _Closeness(
        texts=len(texts),
        lowest_cosine=float(cosines[worst]),
        mean_cosine=float(cosines.mean(dtype=np.float64)),
        largest_difference=float(np.abs(vectors - reference).max()),
        worst=texts[worst],
    )


def _neighbour_agreement(vectors: Vectors, reference: Vectors) -> float:
    """Mean share of each text's ten nearest other texts that both sets of vectors agree on."""

    def nearest(those: Vectors) -> np.ndarray:
        scaled = those / np.maximum(np.linalg.norm(those, axis=1, keepdims=True), 1e-12)
        cosines = scaled @ scaled.T
        np.fill_diagonal(cosines, -np.inf)
        return np.argsort(-cosines, axis=1, kind="stable")[:, :_NEIGHBOURS]

    return top_agreement(nearest(reference), nearest(vectors))


def _check_tokens(
    model: SentenceTransformer, read: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]
) -> None:
    """Reject a model that changes texts in another way than through its tokenizer."""
    for text, ids in zip(texts, read(texts), strict=True):
        wanted = model.preprocess([text])["input_ids"].flatten().tolist()
        if ids != wanted:
            raise BadModel(
                f"tokenizer.json and the model disagree on the tokens of {text[:40]!r}; "
                "save the model with sentence-transformers and export that"
            )
