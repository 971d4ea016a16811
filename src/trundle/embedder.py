"""What evaluation sees of a model: texts in, array out.

Torch, ONNX, OpenVINO, an endpoint or a cached table of vectors: whoever can fill in these three functions can be
scored, compared and imitated by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from trundle.errors import BadInput

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Vectors: TypeAlias = "NDArray[np.float32]"
Encode: TypeAlias = "Callable[[Sequence[str]], Vectors]"


@dataclass(frozen=True, kw_only=True)
class Embedder:
    """One model in its three roles; each role adds the model's own prompt for it, if it has one."""

    name: str
    text: Encode
    query: Encode
    document: Encode


def asymmetric(queries: Embedder, documents: Embedder) -> Embedder:
    """Queries by one model, documents by another: a small query encoder on an index that is already there."""
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
    """Refuse what no tokenizer can read."""
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise BadInput(f"text {number} is a {type(text).__name__}, not a string; convert it first")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise BadInput(
                    f"text {number} holds half of a character pair (a lone surrogate); clean it with "
                    "text.encode('utf-8', 'replace').decode()"
                ) from error
