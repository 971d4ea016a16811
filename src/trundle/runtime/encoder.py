"""Texts to vectors without torch.

Few texts are one batch on all threads, which is soonest done. Many texts are cut into chunks of like length, and each
thread takes the next chunk, tokenises it and runs it alone: no thread waits for another, and one tokenises while the
others compute.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trundle.embedder import Embedder, Vectors
from trundle.errors import BadInput, BadModel
from trundle.readable import check_texts
from trundle.runtime.batching import batches, chunk_size, in_powers_of_two, rounded_up
from trundle.runtime.describe import Graph, read_description
from trundle.runtime.engines import Run, choose, open_graph, usable_cores
from trundle.runtime.outputs import Output, as_output, check_output, truncated
from trundle.runtime.tokens import Reader, padded

CHUNK_TEXTS = 256
BATCH_TOKENS = 2048
BATCH_TEXTS = 64
STREAMED = 4096
"""Texts a stream reads ahead."""


class Encoder:
    """A model exported by trundle, ready to encode. It may be used from several threads at once."""

    def __init__(self, folder: str | Path, *, graph: str | None = None, threads: int | None = None) -> None:
        """Open `folder`; `graph` asks for an engine or precision (`onnx`, `int8`, `onnx-int8`), fastest by default."""
        self._folder = Path(folder).expanduser()
        if threads is not None and threads < 1:
            raise BadInput(f"{threads} threads can't work; give 1 or more")
        self._description = read_description(self._folder)
        self._graph = choose(
            self._description.graphs, graph, self._folder, lambda line: warnings.warn(line, stacklevel=3)
        )
        self._threads = threads or usable_cores()
        self._reader = Reader(self._folder, self._description)
        self._runs: dict[int, Run] = {}
        self._opening = Lock()
        self._workers = ThreadPoolExecutor(self._threads, thread_name_prefix="trundle")
        self._run_with(self._threads)

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
        return self._description.dimensions

    @property
    def prompts(self) -> dict[str, str]:
        """The model's own prompts by name."""
        return dict(self._description.prompts)

    @property
    def default_prompt(self) -> str | None:
        """The name of the prompt that is used where none is asked for."""
        return self._description.default_prompt

    @property
    def parameters(self) -> int:
        """Weights of the torch model the graph was made from."""
        return self._description.parameters

    @property
    def max_tokens(self) -> int:
        """What is read of a text; the rest is left out."""
        return self._description.max_tokens

    @property
    def graph(self) -> Graph:
        """What is being run."""
        return self._graph

    @property
    def threads(self) -> int:
        """How many threads it may use."""
        return self._threads

    @property
    def folder(self) -> Path:
        """Where the model lies."""
        return self._folder

    def prompt_for(self, role: str | None) -> str:
        """What `encode_query`, `encode_document` and plain `encode` put before a text."""
        return self._description.prompt_for(role)

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts that already carry their prompt: what a server counts and gathers."""
        return self._reader.read(texts)

    def vectors_of(self, rows: Sequence[Sequence[int]], *, together: bool = True) -> Vectors:
        """Full vectors of what `read` gave, none of it empty.

        `together` puts all threads to work on these rows; without it the calling thread works alone, which is
        for callers that have several such threads at work.
        """
        vectors = np.empty((len(rows), self.dimensions), dtype=np.float32)
        run = self._run_with(self._threads if together else 1)
        for group, width in self._shapes([len(row) for row in rows]):
            ids, mask = padded([rows[member] for member in group], width, self._description.pad_id)
            vectors[group] = run(ids, mask)
        return vectors

    def finished(self, vectors: Vectors, *, dimensions: int | None, output: Output) -> NDArray[Any]:
        """Full vectors made shorter and of fewer bits, as `encode` does with `dimensions` and `output`."""
        check_output(output)
        return as_output(truncated(vectors, dimensions, normalise=self._description.normalised), output)

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        output: Output = "float32",
    ) -> NDArray[Any]:
        """One row per text, in the order given; one vector for a single string.

        `prompt` goes before every text; `prompt_name` takes one of the model's own. `dimensions` keeps the first so
        many numbers. A text longer than the model takes is cut at its end.
        """
        return self._encode(texts, self._prompt(prompt, prompt_name, None), dimensions, output)

    def encode_query(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of what is searched for, with the model's own prompt for it."""
        return self._encode(texts, self._prompt(None, None, "query"), dimensions, output)

    def encode_document(
        self, texts: str | Sequence[str], *, dimensions: int | None = None, output: Output = "float32"
    ) -> NDArray[Any]:
        """Vectors of what is searched in, with the model's own prompt for it."""
        return self._encode(texts, self._prompt(None, None, "document"), dimensions, output)

    def stream(
        self,
        texts: Iterable[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        output: Output = "float32",
        ahead: int = STREAMED,
    ) -> Iterator[NDArray[Any]]:
        """One vector after the other for a corpus that need not fit into memory, in the order of the texts."""
        if ahead < 1:
            raise BadInput(f"{ahead} texts can't be read ahead; give 1 or more")
        chosen = self._prompt(prompt, prompt_name, None)
        source = iter(texts)
        while part := list(islice(source, ahead)):
            yield from self._encode(part, chosen, dimensions, output)

    def embedder(self, name: str | None = None) -> Embedder:
        """The three roles as evaluation sees them."""
        return Embedder(
            name=name or str(self._folder),
            text=self.encode,
            query=self.encode_query,
            document=self.encode_document,
        )

    def _prompt(self, prompt: str | None, name: str | None, role: str | None) -> str:
        if prompt is not None:
            return prompt
        if name is None:
            return self._description.prompt_for(role)
        if name not in self._description.prompts:
            known = ", ".join(self._description.prompts) or "none"
            raise BadInput(f"the model has no prompt named {name!r}; give one of: {known}")
        return self._description.prompts[name]

    def _encode(
        self, texts: str | Sequence[str], prompt: str, dimensions: int | None, output: Output
    ) -> NDArray[Any]:
        check_output(output)
        given = [texts] if isinstance(texts, str) else list(texts)
        check_texts(given)
        vectors = self._vectors([prompt + text for text in given] if prompt else given)
        ready = self.finished(vectors, dimensions=dimensions, output=output)
        return ready[0] if isinstance(texts, str) else ready

    def _vectors(self, texts: list[str]) -> Vectors:
        """Vectors of texts that already carry their prompt."""
        vectors = np.empty((len(texts), self.dimensions), dtype=np.float32)
        lengths = [len(text) for text in texts]
        size = chunk_size(sum(lengths), self._threads)
        chunks = batches(lengths, tokens=size, texts=CHUNK_TEXTS)
        if len(chunks) < self._threads or self._threads == 1:
            run = self._run_with(self._threads)
            for chunk in chunks:
                self._fill(vectors, texts, chunk, run)
        else:
            run = self._run_with(1)
            for _ in self._workers.map(lambda chunk: self._fill(vectors, texts, chunk, run), chunks):
                pass
        if not np.isfinite(vectors).all():
            number = int(np.argmin(np.isfinite(vectors).all(axis=1)))
            raise BadModel(
                f"{self._folder} gives a vector with NaN or infinity for text {number + 1} "
                f"({texts[number][:60]!r}); export it again"
            )
        return vectors

    def _fill(self, vectors: Vectors, texts: Sequence[str], places: Sequence[int], run: Run) -> None:
        """Tokenise the texts at `places`, run them in batches of like length, and put the vectors in their rows."""
        rows = self._reader.read([texts[place] for place in places])
        lengths = [len(row) for row in rows]
        if 0 in lengths:
            number = places[lengths.index(0)]
            raise BadInput(f"text {number + 1} ({texts[number][:60]!r}) has nothing to embed; leave it out")
        for group, width in self._shapes(lengths):
            ids, mask = padded([rows[member] for member in group], width, self._description.pad_id)
            vectors[[places[member] for member in group]] = run(ids, mask)

    def _shapes(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Which texts are run together, and how wide.

        openvino prepares itself for each new shape, which takes longer than a run, and in int8 another width rounds
        otherwise. So there it is given few shapes, and a text's width follows from its own length alone.
        """
        if self._graph.engine == "onnx":
            texts = 1 if self._graph.one_by_one else BATCH_TEXTS
            for group in batches(lengths, tokens=BATCH_TOKENS, texts=texts):
                yield group, lengths[group[0]]
            return
        widths = [rounded_up(length, self.max_tokens) for length in lengths]
        for width in sorted(set(widths), reverse=True):
            members = [place for place, each in enumerate(widths) if each == width]
            for group in batches([width] * len(members), tokens=BATCH_TOKENS, texts=BATCH_TEXTS):
                for part in in_powers_of_two(group):
                    yield [members[place] for place in part], width

    def _run_with(self, threads: int) -> Run:
        """The graph opened for so many threads a call, opened once."""
        with self._opening:
            if threads not in self._runs:
                streams = self._threads // threads
                self._runs[threads] = open_graph(self._graph, self._folder, threads=threads, streams=streams)
            return self._runs[threads]
