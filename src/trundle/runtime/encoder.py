"""Texts to vectors without torch: prompts, sides and output types, for one model or for a pair."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Vectors, check_texts
from trundle.errors import BadInput, BadModel
from trundle.runtime.description import SIDES, _Side, side_folders, usable_cores
from trundle.runtime.model import _OneModel

Output = Literal["float32", "int8", "binary"]

_TINY = 1e-12
_ONE_TEXT = "documents are a list of texts; pass [text] for a single one"
_STREAMED = 4096
"""Texts that a stream reads ahead."""


class Encoder:
    """An exported model, ready to encode. Several threads may use it at once.

    In a pair, queries go to the student, and all other texts to the teacher.

    Attributes (of the teacher, in a pair): `folder`; `graph`, the graph that runs; `threads`; `dimensions`;
    `max_tokens`, after which a text is truncated; `prompts` by name; `default_prompt`, its name; `parameters`
    of the torch model, of both in a pair; `is_pair`; `identity`, a digest of the model, empty if not known.
    """

    def __init__(self, folder: str | Path, *, graph: str | None = None, threads: int | None = None) -> None:
        """Load the model in `folder`.

        `graph` chooses an engine, a precision or both (`onnx`, `int8`, `onnx-int8`); by default the fastest
        graph runs. `threads` defaults to all cores this process may use.
        """
        self.folder = Path(folder).expanduser()
        if threads is not None and threads < 1:
            raise BadInput(f"threads is {threads}; pass 1 or more")
        places = side_folders(self.folder)
        loaded: dict[Path, _OneModel] = {}
        for place in dict.fromkeys(places.values()):
            warn = partial(warnings.warn, stacklevel=4)
            loaded[place] = _OneModel(place, graph=graph, threads=threads or usable_cores(), warn=warn)
        self._queries, self._documents = (loaded[places[side]] for side in SIDES)
        widths = [model.description.dimensions for model in (self._queries, self._documents)]
        if len(set(widths)) > 1:
            found = f"{widths[0]} dimensions for queries and {widths[1]} for documents"
            raise BadModel(f"{self.folder} has {found}; pair two models of one vector space")
        description = self._documents.description
        self.graph, self.threads = self._documents.graph, self._documents.threads
        self.dimensions, self.max_tokens = description.dimensions, description.max_tokens
        self.prompts, self.default_prompt = dict(description.prompts), description.default_prompt
        self.parameters = sum(model.description.parameters for model in {self._queries, self._documents})
        self.identity = description.identity
        self.is_pair = self._queries is not self._documents

    def prompt_for(self, role: str | None) -> str:
        """The prompt that `encode_query`, `encode_document` and plain `encode` put before a text."""
        return self._model(role).description.prompt_for(role)

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts that already carry their prompt."""
        return self._documents.reader.read(texts)

    def vectors_of(self, rows: Sequence[Sequence[int]], *, together: bool = True) -> Vectors:
        """Full vectors of the token ids that `read` returned; no row may be empty.

        `together` uses all threads for these rows. Without it only the calling thread works, for callers that
        run several such threads.
        """
        return self._documents.vectors_of(rows, together=together)

    def finished(self, vectors: Vectors, *, dimensions: int | None, output: Output) -> NDArray[Any]:
        """Full vectors truncated and quantised, as `encode` does with `dimensions` and `output`."""
        return _finished(self._documents, vectors, dimensions, output)

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        side: _Side | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        output: Output = "float32",
    ) -> NDArray[Any]:
        """One row per text, in the order given; one vector for a single string.

        `side` says what the texts are: it chooses the model's own prompt and, in a pair, the model. `prompt`
        is put before every text; `prompt_name` chooses one of the model's own. `dimensions` keeps the first
        dimensions. A text longer than the model's limit is truncated.
        """
        model = self._model(side)
        return _encoded(model, texts, model.prompt(prompt, prompt_name, side), dimensions, output)

    def encode_query(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of queries."""
        return self.encode(texts, side="query", dimensions=dimensions, output=output)

    def encode_document(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of documents."""
        return self.encode(texts, side="document", dimensions=dimensions, output=output)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query, as LangChain and other frameworks call it."""
        if not isinstance(text, str):
            raise BadInput(f"a query is one str, not a {type(text).__name__}; call it once for each query")
        check_texts([text])
        vector: list[float] = self.encode_query(text).tolist()
        return vector

    def embed_documents(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the vectors of documents, as LangChain and other frameworks call it."""
        if isinstance(texts, str):
            raise BadInput(_ONE_TEXT)
        vectors: list[list[float]] = self.encode_document(list(texts)).tolist() if len(texts) else []
        return vectors

    def stream(
        self,
        texts: Iterable[str],
        *,
        side: _Side | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        output: Output = "float32",
        ahead: int = _STREAMED,
    ) -> Iterator[NDArray[Any]]:
        """One vector after the other, in the order of the texts, for a corpus larger than memory."""
        if isinstance(texts, str):
            raise BadInput(_ONE_TEXT)
        if ahead < 1:
            raise BadInput(f"ahead is {ahead}; pass 1 or more")
        model = self._model(side)
        chosen = model.prompt(prompt, prompt_name, side)
        source = iter(texts)
        while part := list(islice(source, ahead)):
            yield from _encoded(model, part, chosen, dimensions, output)

    def embedder(self, name: str | None = None) -> Embedder:
        """The three roles as evaluation sees them."""
        name = name or str(self.folder)
        return Embedder(name=name, text=self.encode, query=self.encode_query, document=self.encode_document)

    def _model(self, side: str | None) -> _OneModel:
        if side not in (None, *SIDES):
            raise BadInput(f"side is {side!r}; pass query, document or None")
        return self._queries if side == "query" else self._documents


def _encoded(
    model: _OneModel, texts: str | Sequence[str], prompt: str, dimensions: int | None, output: Output
) -> NDArray[Any]:
    _check_output(output)
    if not isinstance(texts, Iterable):
        raise BadInput(f"texts have the type {type(texts).__name__}; pass a str or a list of them")
    given = [texts] if isinstance(texts, str) else list(texts)
    check_texts(given)
    vectors = model.vectors([prompt + text for text in given] if prompt else given)
    ready = _finished(model, vectors, dimensions, output)
    return ready[0] if isinstance(texts, str) else ready


def _finished(model: _OneModel, vectors: Vectors, dimensions: int | None, output: Output) -> NDArray[Any]:
    """Vectors truncated, and quantised as `output` says.

    int8 scales each vector so that its largest value becomes 127, which keeps every cosine; binary keeps the
    signs, eight per byte, in the layout of sentence-transformers' `binary`.
    """
    _check_output(output)
    short = vectors
    if dimensions is not None and dimensions != vectors.shape[1]:
        if not 1 <= dimensions < vectors.shape[1]:
            raise BadInput(f"dimensions is {dimensions}; choose 1 to {vectors.shape[1]}")
        short = np.ascontiguousarray(vectors[:, :dimensions])
        if model.description.normalised:
            lengths = np.linalg.norm(short, axis=1, keepdims=True)
            short = np.asarray(short / np.maximum(lengths, _TINY), dtype=np.float32)
    if output == "int8":
        largest = np.maximum(np.abs(short).max(axis=1, keepdims=True), _TINY)
        return np.asarray(np.rint(short * (127 / largest)), dtype=np.int8)
    if output == "binary":
        return (np.packbits(short > 0, axis=1).astype(np.int16) - 128).astype(np.int8)
    return short


def _check_output(output: str) -> None:
    if output not in get_args(Output):
        raise BadInput(f"vectors can't be {output!r}; choose one of {', '.join(get_args(Output))}")
