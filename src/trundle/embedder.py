"""A model as evaluation sees it: texts in, array out.

Torch, ONNX, OpenVINO, an endpoint or a table of vectors: everything that provides these three functions is
scored, compared and imitated by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from trundle.errors import BadInput, BadModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Role = Literal["text", "query", "document"]
Similarity = Literal["cosine", "inner product", "l2"]
"""How the vectors of an index are compared."""
Vectors: TypeAlias = "NDArray[np.float32]"
Encode: TypeAlias = "Callable[[Sequence[str]], Vectors]"
Tokens: TypeAlias = "tuple[NDArray[np.int32], NDArray[np.int64]]"
"""The tokens of several texts in one array, and how many each text has."""

LONGEST = 512
"""Training and measuring truncate texts to this many tokens, if the model does not take fewer."""


@dataclass(frozen=True, kw_only=True)
class TwoSteps:
    """The same vectors in two steps, so that some texts are tokenised while others are encoded."""

    tokenise: Callable[[Sequence[str], Sequence[Role]], Tokens]
    """From texts and the role of each."""
    encode: Callable[[Tokens], Vectors]


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """One model in its three roles; each role adds the model's own prompt for it, if it has one."""

    name: str
    text: Encode
    query: Encode
    document: Encode
    texts_per_call: int | None = None
    """How many texts it needs at once to be fast; None if a few of similar length are enough."""
    two_steps: Callable[[], TwoSteps | None] = lambda: None
    similarity: Similarity = "cosine"
    """How its vectors are compared in a search."""
    width: int | None = None
    """The number of dimensions, if it is known without encoding a text."""

    def through(self, wrap: Callable[[Encode], Encode], name: str | None = None) -> Embedder:
        """The same model with each of its three functions wrapped."""
        text, query, document = map(wrap, (self.text, self.query, self.document))
        return replace(
            self, name=name or self.name, text=text, query=query, document=document, two_steps=lambda: None
        )


def asymmetric(queries: Embedder, documents: Embedder) -> Embedder:
    """Queries encoded by one model, documents by another: a small query encoder on an existing index."""
    return Embedder(
        name=f"{queries.name} → {documents.name}",
        text=queries.text,
        query=queries.query,
        document=documents.document,
    )


def _plain(name: str, encode: Encode) -> Embedder:
    """A model without prompts: one function for all three roles."""
    return Embedder(name=name, text=encode, query=encode, document=encode)


def check_texts(texts: Sequence[str]) -> None:
    """Reject texts that no tokenizer can read."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise BadInput(f"text {number} has the type {type(text).__name__}, not str; convert it first")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadInput(
                    f"text {number} holds an unpaired surrogate; clean it with "
                    "text.encode('utf-8', 'replace').decode()"
                ) from error


def is_sound(array: Vectors) -> bool:
    """Return whether certainly all rows are finite and none is zero, faster than the exact checks."""
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        squares = np.einsum("ij,ij->i", array, array)
    return bool(squares.all() and np.isfinite(squares).all())


def check_vectors(vectors: object, texts: Sequence[str], name: str, *, zeros: bool = True) -> Vectors:
    """A model's answer as float32, checked: one finite row per text.

    `name` names the model in errors. Without `zeros`, a row of zeros is rejected too.
    """
    import numpy as np

    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2 or len(array) != len(texts) or array.shape[1] == 0:
        raise BadModel(
            f"{name} gave an array of shape {array.shape} for {len(texts)} texts; "
            "it must give one row per text"
        )
    if is_sound(array):
        return array
    finite = np.isfinite(array).all(axis=1)
    if not finite.all():
        number = int(finite.argmin())
        raise BadModel(
            f"{name} gave NaN or infinity for text {number + 1} ({texts[number][:60]!r}); "
            "load it in float32, or build it again if its weights are damaged"
        )
    if not zeros and not (some := array.any(axis=1)).all():
        raise BadModel(
            f"{name} gave nothing but zeros for {texts[int(some.argmin())][:60]!r}; leave the text out"
        )
    return array


def top_agreement(truth: NDArray[np.int64], found: NDArray[np.int64]) -> float:
    """Mean share of each row of `truth` that is in the same row of `found`: agreement@k of two rankings."""
    return float((truth[:, :, None] == found[:, None, :]).any(axis=2).mean())
