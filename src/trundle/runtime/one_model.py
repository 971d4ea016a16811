"""One model and its graph: texts that carry their prompt, to vectors.

Few texts are one batch on all threads, which is soonest done. Many texts are cut into chunks of like length, and each
thread takes the next chunk, tokenises it and runs it alone: no thread waits for another, and one tokenises while the
others compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import numpy as np

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel
from trundle.runtime.batching import batches, chunk_size, in_powers_of_two, rounded_up
from trundle.runtime.describe import read_description
from trundle.runtime.engines import Run, choose, open_graph
from trundle.runtime.tokens import Reader, padded

CHUNK_TEXTS = 256
BATCH_TOKENS = 2048
BATCH_TEXTS = 64


class OneModel:
    """A folder with graphs, one of them opened. Several threads may use it at once."""

    def __init__(self, folder: Path, *, graph: str | None, threads: int, say: Callable[[str], None]) -> None:
        """Open `folder`; `say` is told where another graph is run than the one that should be."""
        self.folder, self.threads = folder, threads
        self.description = read_description(folder)
        self.graph = choose(self.description.graphs, graph, folder, say)
        self._reader = Reader(folder, self.description)
        self._runs: dict[int, Run] = {}
        self._opening = Lock()
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="trundle")
        self._run_with(threads)

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of texts that already carry their prompt."""
        return self._reader.read(texts)

    def vectors_of(self, rows: Sequence[Sequence[int]], *, together: bool) -> Vectors:
        """Full vectors of what `read` gave; by all threads `together`, or by the calling thread alone."""
        vectors = np.empty((len(rows), self.description.dimensions), dtype=np.float32)
        run = self._run_with(self.threads if together else 1)
        for group, width in self._shapes([len(row) for row in rows]):
            ids, mask = padded([rows[member] for member in group], width, self.description.pad_id)
            vectors[group] = run(ids, mask)
        return vectors

    def prompt(self, prompt: str | None, name: str | None, side: str | None) -> str:
        """What goes before a text: the prompt given, the one named, or the model's own for the side."""
        if prompt is not None:
            return prompt
        if name is None:
            return self.description.prompt_for(side)
        if name not in self.description.prompts:
            known = ", ".join(self.description.prompts) or "none"
            raise BadInput(f"the model has no prompt named {name!r}; give one of: {known}")
        return self.description.prompts[name]

    def vectors(self, texts: list[str]) -> Vectors:
        """Vectors of texts that already carry their prompt."""
        vectors = np.empty((len(texts), self.description.dimensions), dtype=np.float32)
        lengths = [len(text) for text in texts]
        size = chunk_size(sum(lengths), self.threads)
        chunks = batches(lengths, tokens=size, texts=CHUNK_TEXTS)
        if len(chunks) < self.threads or self.threads == 1:
            run = self._run_with(self.threads)
            for chunk in chunks:
                self._fill(vectors, texts, chunk, run)
        else:
            run = self._run_with(1)
            for _ in self._workers.map(lambda chunk: self._fill(vectors, texts, chunk, run), chunks):
                pass
        if not np.isfinite(vectors).all():
            number = int(np.argmin(np.isfinite(vectors).all(axis=1)))
            raise BadModel(
                f"{self.folder} gives a vector with NaN or infinity for text {number + 1} "
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
            ids, mask = padded([rows[member] for member in group], width, self.description.pad_id)
            vectors[[places[member] for member in group]] = run(ids, mask)

    def _shapes(self, lengths: Sequence[int]) -> Iterator[tuple[list[int], int]]:
        """Which texts are run together, and how wide.

        openvino prepares itself for each new shape, which takes longer than a run, and in int8 another width rounds
        otherwise. So there it is given few shapes, and a text's width follows from its own length alone.
        """
        if self.graph.engine == "onnx":
            texts = 1 if self.graph.one_by_one else BATCH_TEXTS
            for group in batches(lengths, tokens=BATCH_TOKENS, texts=texts):
                yield group, lengths[group[0]]
            return
        widths = [rounded_up(length, self.description.max_tokens) for length in lengths]
        for width in sorted(set(widths), reverse=True):
            members = [place for place, each in enumerate(widths) if each == width]
            for group in batches([width] * len(members), tokens=BATCH_TOKENS, texts=BATCH_TEXTS):
                for part in in_powers_of_two(group):
                    yield [members[place] for place in part], width

    def _run_with(self, threads: int) -> Run:
        """The graph opened for so many threads a call, opened once."""
        with self._opening:
            if threads not in self._runs:
                streams = self.threads // threads
                self._runs[threads] = open_graph(self.graph, self.folder, threads=threads, streams=streams)
            return self._runs[threads]
