"""Texts to vectors without torch: prompts, sides and forms of output around one model, or around the two of a pair."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Vectors, check_texts
from trundle.errors import BadInput, BadModel
from trundle.runtime.description import SIDES, Graph, _Side, side_folders
from trundle.runtime.engines import _usable_cores
from trundle.runtime.model import _OneModel

Output = Literal["float32", "int8", "binary"]

_TINY = 1e-12


def _check_output(output: str) -> None:
    """Refuse a kind of vector that there is not."""
    if output not in get_args(Output):
        raise BadInput(f"vectors can't be {output!r}; ask for one of {', '.join(get_args(Output))}")


def _truncated(vectors: Vectors, dimensions: int | None, *, normalise: bool) -> Vectors:
    """The first `dimensions` numbers of each vector, brought back to length 1 where the whole had it."""
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if not 1 <= dimensions < vectors.shape[1]:
        raise BadInput(
            f"{dimensions} dimensions can't be had of {vectors.shape[1]}; give 1 to {vectors.shape[1]}"
        )
    short = np.ascontiguousarray(vectors[:, :dimensions])
    if not normalise:
        return short
    lengths = np.maximum(np.linalg.norm(short, axis=1, keepdims=True), _TINY)
    return np.asarray(short / lengths, dtype=np.float32)


def _as_output(vectors: Vectors, output: Output) -> NDArray[Any]:
    """The vectors in the numbers asked for.

    int8 stretches each vector so that its largest number becomes 127, which leaves every cosine as it is; binary
    keeps signs alone, eight to a byte, in the layout of sentence-transformers' `binary`.
    """
    match output:
        case "int8":
            largest = np.maximum(np.abs(vectors).max(axis=1, keepdims=True), _TINY)
            return np.asarray(np.rint(vectors * (127 / largest)), dtype=np.int8)
        case "binary":
            return (np.packbits(vectors > 0, axis=1).astype(np.int16) - 128).astype(np.int8)
    return vectors


_STREAMED = 4096
"""Texts a stream reads ahead."""


class Encoder:
    """What trundle exported, ready to encode. It may be used from several threads at once.

    Of a pair, queries go to the student, and documents and whatever is not said to be a query to the teacher. What the
    encoder says of itself is then said of the teacher.
    """

    def __init__(self, folder: str | Path, *, graph: str | None = None, threads: int | None = None) -> None:
        """Open `folder`; `graph` asks for an engine or precision (`onnx`, `int8`, `onnx-int8`), fastest by default."""
        self._folder = Path(folder).expanduser()
        if threads is not None and threads < 1:
            raise BadInput(f"{threads} threads can't work; give 1 or more")
        opened: dict[Path, _OneModel] = {}
        places = side_folders(self._folder)
        for place in dict.fromkeys(places.values()):
            opened[place] = _OneModel(
                place,
                graph=graph,
                threads=threads or _usable_cores(),
                say=lambda line: warnings.warn(line, stacklevel=5),
            )
        self._queries, self._documents = (opened[places[side]] for side in SIDES)
        widths = [model.description.dimensions for model in (self._queries, self._documents)]
        if len(set(widths)) > 1:
            raise BadModel(
                f"{self._folder} makes vectors of {widths[0]} numbers for queries and of {widths[1]} for documents; "
                "put together two models of one space"
            )

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self._documents.description.dimensions

    @property
    def prompts(self) -> dict[str, str]:
        """The model's own prompts by name."""
        return dict(self._documents.description.prompts)

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt that is used where none is asked for."""
        return self._documents.description.default_prompt

    @property
    def parameters(self) -> int:
        """Weights of the torch model the graph was made from; of both models in a pair."""
        return sum(model.description.parameters for model in {self._queries, self._documents})

    @property
    def max_tokens(self) -> int:
        """What is read of a text; the rest is left out."""
        return self._documents.description.max_tokens

    @property
    def graph(self) -> Graph:
        """What is being run."""
        return self._documents.graph

    @property
    def threads(self) -> int:
        """How many threads it may use."""
        return self._documents.threads

    @property
    def folder(self) -> Path:
        """Where the model lies."""
        return self._folder

    @property
    def is_pair(self) -> bool:
        """Whether queries go to another model than documents."""
        return self._queries is not self._documents

    def prompt_for(self, role: str | None) -> str:
        """What `encode_query`, `encode_document` and plain `encode` put before a text."""
        return self._model(role).description.prompt_for(role)

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts that already carry their prompt: what a server counts and gathers."""
        return self._documents.read(texts)

    def vectors_of(self, rows: Sequence[Sequence[int]], *, together: bool = True) -> Vectors:
        """Full vectors of what `read` gave, none of it empty.

        `together` puts all threads to work on these rows; without it the calling thread works alone, which is
        for callers that have several such threads at work.
        """
        return self._documents.vectors_of(rows, together=together)

    def finished(self, vectors: Vectors, *, dimensions: int | None, output: Output) -> NDArray[Any]:
        """Full vectors made shorter and of fewer bits, as `encode` does with `dimensions` and `output`."""
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

        `side` says what the texts are: it chooses the model's own prompt and, in a pair, the model. `prompt` goes
        before every text; `prompt_name` takes one of the model's own. `dimensions` keeps the first so many numbers.
        A text longer than the model takes is cut at its end.
        """
        model = self._model(side)
        return _encoded(model, texts, model.prompt(prompt, prompt_name, side), dimensions, output)

    def encode_query(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of what is searched for."""
        return self.encode(texts, side="query", dimensions=dimensions, output=output)

    def encode_document(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of what is searched in."""
        return self.encode(texts, side="document", dimensions=dimensions, output=output)

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
        """One vector after the other for a corpus that need not fit into memory, in the order of the texts."""
        if ahead < 1:
            raise BadInput(f"{ahead} texts can't be read ahead; give 1 or more")
        model = self._model(side)
        chosen = model.prompt(prompt, prompt_name, side)
        source = iter(texts)
        while part := list(islice(source, ahead)):
            yield from _encoded(model, part, chosen, dimensions, output)

    def embedder(self, name: str | None = None) -> Embedder:
        """The three roles as evaluation sees them."""
        return Embedder(
            name=name or str(self._folder),
            text=self.encode,
            query=self.encode_query,
            document=self.encode_document,
        )

    def _model(self, side: str | None) -> _OneModel:
        if side not in (None, *SIDES):
            raise BadInput(f"a text can't be a {side!r}; say query or document, or leave side out")
        return self._queries if side == "query" else self._documents


def _encoded(
    model: _OneModel, texts: str | Sequence[str], prompt: str, dimensions: int | None, output: Output
) -> NDArray[Any]:
    _check_output(output)
    given = [texts] if isinstance(texts, str) else list(texts)
    check_texts(given)
    vectors = model.vectors([prompt + text for text in given] if prompt else given)
    ready = _finished(model, vectors, dimensions, output)
    return ready[0] if isinstance(texts, str) else ready


def _finished(model: _OneModel, vectors: Vectors, dimensions: int | None, output: Output) -> NDArray[Any]:
    _check_output(output)
    return _as_output(_truncated(vectors, dimensions, normalise=model.description.normalised), output)
