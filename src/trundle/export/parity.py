"""Whether a graph gives what torch gives, and where it first does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from trundle.data.texts import read_texts
from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel, MissingExtra

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


@dataclass(frozen=True, kw_only=True)
class _Parity:
    """How near one way of running a model is to another, text by text."""

    texts: int
    lowest_cosine: float
    mean_cosine: float
    largest_difference: float
    worst: str

    def as_json(self) -> dict[str, float | int | str]:
        """For the description of the graph."""
        return {
            "texts": self.texts,
            "lowest cosine": round(self.lowest_cosine, 6),
            "mean cosine": round(self.mean_cosine, 6),
            "largest difference": float(f"{self.largest_difference:.2g}"),
        }


def _torch_vectors(model: SentenceTransformer, texts: Sequence[str], *, prompt: str = "") -> Vectors:
    """What torch says, each text alone, so that no padding can play a part."""
    with torch.inference_mode():
        vectors = model.encode(
            list(texts), batch_size=1, prompt=prompt, convert_to_numpy=True, show_progress_bar=False
        )
    return np.asarray(vectors, dtype=np.float32)


def _cosines(ours: Vectors, theirs: Vectors) -> Vectors:
    """Cosine of each row with its partner; two empty vectors agree."""
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = np.einsum("ij,ij->i", ours, theirs)
    same = np.abs(ours - theirs).max(axis=1, initial=0) < 1e-6
    return np.where(same, np.float32(1), products / np.maximum(lengths, 1e-12)).astype(np.float32)


def _compare(vectors: Vectors, reference: Vectors, texts: Sequence[str]) -> _Parity:
    """Vectors of texts beside the reference's."""
    if vectors.shape != reference.shape:
        raise BadModel(
            f"the graph gives vectors of {vectors.shape[1]} numbers where torch gives {reference.shape[1]}; "
            "report this model"
        )
    alike = _cosines(vectors, reference)
    worst = int(np.argmin(alike))
    return _Parity(
        texts=len(texts),
        lowest_cosine=float(alike[worst]),
        mean_cosine=float(alike.mean(dtype=np.float64)),
        largest_difference=float(np.abs(vectors - reference).max()),
        worst=texts[worst],
    )


def _check_tokens(
    model: SentenceTransformer, read: Callable[[Sequence[str]], list[list[int]]], texts: Sequence[str]
) -> None:
    """Refuse a model whose texts reach it otherwise than through its tokenizer alone."""
    for text, ids in zip(texts, read(texts), strict=True):
        wanted = model.preprocess([text])["input_ids"].flatten().tolist()
        if ids != wanted:
            first = next(
                (place for place, pair in enumerate(zip(ids, wanted, strict=False)) if pair[0] != pair[1]),
                min(len(ids), len(wanted)),
            )
            raise BadModel(
                f"the model's tokenizer file does not read texts as the model does (first difference at token "
                f"{first} of {text[:40]!r}); save the model with sentence-transformers and export that"
            )


_Item = TypeVar("_Item")

_NEIGHBOURS = 10
_FEWEST_TEXTS = 40
_MOST_TEXTS = 1000


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most a smaller graph may lose: of cosine to the torch model, and of its nearest neighbours."""

    cosine: float = 0.01
    agreement: float = 0.1


def _neighbour_agreement(ours: Vectors, theirs: Vectors, count: int = _NEIGHBOURS) -> float:
    """Mean share of each text's nearest others that both agree on, each searching its own vectors."""

    def nearest(vectors: Vectors) -> np.ndarray:
        lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        products = (vectors / lengths) @ (vectors / lengths).T
        np.fill_diagonal(products, -np.inf)
        return np.argsort(-products, axis=1, kind="stable")[:, :count]

    pairs = zip(nearest(ours), nearest(theirs), strict=True)
    return float(np.mean([len(set(mine) & set(yours)) / count for mine, yours in pairs]))


def _passes(parity: _Parity, agreement: float, limits: Limits) -> bool:
    """Whether the loss is within the limits."""
    return 1 - parity.mean_cosine <= limits.cosine and 1 - agreement <= limits.agreement


def _split_texts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Every second text to calibrate on, the others to measure the loss on."""
    distinct = list(dict.fromkeys(texts))
    if len(distinct) < _FEWEST_TEXTS:
        raise BadInput(
            f"{len(distinct)} different texts are too few to calibrate and to measure on; "
            f"give {_FEWEST_TEXTS} or more with --calibrate"
        )
    return distinct[::2], distinct[1::2]


def _spread(items: Sequence[_Item], count: int) -> list[_Item]:
    """At most `count` of the items, evenly taken from first to last: sources stand one after the other."""
    step = max(1, -(-len(items) // count))
    return list(items[::step])


def calibration_texts(sources: Sequence[str]) -> list[str]:
    """The first texts of each source, as many in all as calibration can use."""
    share = _MOST_TEXTS // max(1, len(sources))
    return [text.text for source in sources for text in islice(read_texts(source), share)]


def _keep_in_turn(worst: Sequence[str]) -> list[list[str]]:
    """How much to keep in float at each try: nothing, the worst twentieth, then twice as much each time, up to half."""
    tries: list[list[str]] = [[]]
    count = max(1, len(worst) // 20)
    while count <= len(worst) // 2:
        tries.append(list(worst[:count]))
        count *= 2
    return tries


try:
    import onnx as onnx
    import onnxruntime as onnxruntime
except ImportError as error:
    raise MissingExtra("export", "export") from error
