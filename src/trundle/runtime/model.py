"""One model and its graph: texts that carry their prompt, to vectors.

Few texts are run on all threads together, which is soonest done. Many texts are read by all threads, a wave at a time, and
cut into batches of like length, and each thread takes the next batch and runs it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock

import numpy as np

from trundle.embedder import Vectors
from trundle.errors import BadInput, BadModel
from trundle.runtime.description import read_description
from trundle.runtime.engines import _choose, _open_graph, _Run
from trundle.runtime.tokens import Reader, padded

_STEPS = ((32, 4), (64, 8))
"""Up to so many tokens, widths go in steps of so many."""
_COARSE_STEP = 16
_HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_RUN_COST = 32
"""Tokens of padding that take about as long as a run of its own."""


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """The order in which neighbours have nearly the same length and the heaviest work comes first."""
    return sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))


def _batches(lengths: Sequence[int], *, tokens: int, texts: int) -> list[list[int]]:
    """Groups of places whose texts padded to their longest hold at most `tokens` tokens and `texts` texts.

    Texts of nearly one length meet in one group, so little is computed on padding. A text that is longer than
    `tokens` gets a group of its own.
    """
    groups: list[list[int]] = []
    width = 0
    for place in _longest_first(lengths):
        group = groups[-1] if groups else None
        if group is None or len(group) == texts or width * (len(group) + 1) > tokens:
            groups.append([place])
            width = max(1, lengths[place])
        else:
            group.append(place)
    return groups


def _in_few_heights(group: Sequence[int], width: int) -> list[tuple[list[int], int]]:
    """A group cut into parts, each with the number of rows it is run as, which is one of `HEIGHTS`.

    A part may have fewer members than rows, where the empty rows cost less than another run would.
    """
    parts, start = [], 0
    while start < len(group):
        left = len(group) - start
        lower = _largest_height(left)
        upper = min((height for height in _HEIGHTS if height >= left), default=lower)
        height = upper if (upper - left) * width <= _RUN_COST else lower
        parts.append((list(group[start : start + height]), height))
        start += height
    return parts


def _largest_height(count: int) -> int:
    """The most rows a run of so many texts can have without an empty one."""
    return max(height for height in _HEIGHTS if height <= count)


def _rounded_up(length: int, limit: int) -> int:
    """A width for texts of this length out of few: in steps of 4 for short texts, of 16 for long ones.

    It is not above `limit` unless the length itself is.
    """
    step = next((step for most, step in _STEPS if length <= most), _COARSE_STEP)
    return max(length, min(limit, -(-length // step) * step))


_WAVE = 2048
"""Texts whose tokens are held at once."""
_READ_AT_ONCE = 64
_ALONE_FROM = 4096
"""Characters for each thread from which it is better that each works alone."""
_BATCH_TOKENS, _BATCH_TEXTS = 2048, 64
_FEWEST_TOKENS, _BATCHES_EACH = 512, 2
"""Batches are smaller where otherwise some thread would get none, but not smaller than this."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Rows that are run together, padded to so many tokens; and with rows that nobody asked for, up to so many."""

    members: Sequence[int]
    width: int
    height: int


def _worth_a_turn(some: Iterable[_Batch]) -> Iterator[list[_Batch]]:
    """Small batches gathered until they are worth being handed to a thread."""
    gathered: list[_Batch] = []
    for batch in some:
        gathered.append(batch)
        if sum(each.width * each.height for each in gathered) >= _FEWEST_TOKENS:
            yield gathered
            gathered = []
    if gathered:
        yield gathered


class _OneModel:
    """A folder with graphs, one of them opened. Several threads may use it at once."""

    def __init__(self, folder: Path, *, graph: str | None, threads: int, say: Callable[[str], None]) -> None:
        """Open `folder`; `say` is told where another graph is run than the one that should be."""
        self.folder, self.threads = folder, threads
        self.description = read_description(folder)
        self.graph = _choose(self.description.graphs, graph, folder, say)
        self._reader = Reader(folder, self.description)
        self._runs: dict[int, _Run] = {}
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
        self._fill(vectors, range(len(rows)), rows, run, self._shapes([len(row) for row in rows]))
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

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts that already carry their prompt."""
        vectors = np.empty((len(texts), self.description.dimensions), dtype=np.float32)
        lengths = [len(text) for text in texts]
        order = _longest_first(lengths)
        waves = [order[start : start + _WAVE] for start in range(0, len(order), _WAVE)]
        if self.threads == 1 or sum(lengths) < _ALONE_FROM * self.threads:
            run = self._run_with(self.threads)
            for wave in waves:
                rows = self._rows(texts, wave)
                self._fill(vectors, wave, rows, run, self._shapes([len(row) for row in rows]))
        else:
            self._fill_in_turns(vectors, texts, waves)
        if not np.isfinite(vectors).all():
            number = int(np.argmin(np.isfinite(vectors).all(axis=1)))
            raise BadModel(
                f"{self.folder} gives a vector with NaN or infinity for text {number + 1} "
                f"({texts[number][:60]!r}); export it again"
            )
        return vectors

    def _fill_in_turns(self, vectors: Vectors, texts: Sequence[str], waves: Sequence[Sequence[int]]) -> None:
        """Each thread takes the next piece of work, to read some texts or to run a batch.

        A wave is read by all threads after they have begun the last batches of the wave before, so nobody waits, and
        no more than two waves of tokens are held.
        """
        run = self._run_with(1)
        running: list[Future[None]] = []
        try:
            for wave in waves:
                size = max(_READ_AT_ONCE, -(-len(wave) // self.threads))
                pieces = [wave[start : start + size] for start in range(0, len(wave), size)]
                rows = list(chain.from_iterable(self._workers.map(partial(self._rows, texts), pieces)))
                most = max(_FEWEST_TOKENS, sum(map(len, rows)) // (self.threads * _BATCHES_EACH))
                running += [
                    self._workers.submit(self._fill, vectors, wave, rows, run, some)
                    for some in _worth_a_turn(self._shapes([len(row) for row in rows], most=most))
                ]
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()

    def _rows(self, texts: Sequence[str], places: Sequence[int]) -> list[list[int]]:
        """The tokens of the texts at `places`; a text without any is refused."""
        rows = self._reader.read([texts[place] for place in places])
        for place, row in zip(places, rows, strict=True):
            if not row:
                raise BadInput(f"text {place + 1} ({texts[place][:60]!r}) has nothing to embed; leave it out")
        return rows

    def _fill(
        self,
        vectors: Vectors,
        places: Sequence[int],
        rows: Sequence[Sequence[int]],
        run: _Run,
        some: Iterable[_Batch],
    ) -> None:
        """Run some batches of the rows and put each vector in its place."""
        for batch in some:
            given = [rows[member] for member in batch.members]
            empty = [given[0]] * (batch.height - len(given))
            ids, mask = padded([*given, *empty], batch.width, self.description.pad_id)
            vectors[[places[member] for member in batch.members]] = run(ids, mask)[: len(given)]

    def _shapes(self, lengths: Sequence[int], *, most: int = _BATCH_TOKENS) -> Iterator[_Batch]:
        """Which texts are run together, in batches of at most so many tokens.

        openvino prepares itself for each new shape, which takes longer than a run, and in int8 another width rounds
        otherwise. So there it is given few shapes, and a text's width follows from its own length alone.
        """
        most = min(most, _BATCH_TOKENS)
        if self.graph.engine == "onnx":
            texts = 1 if self.graph.one_by_one else _BATCH_TEXTS
            for group in _batches(lengths, tokens=most, texts=texts):
                yield _Batch(members=group, width=lengths[group[0]], height=len(group))
            return
        widths = [_rounded_up(length, self.description.max_tokens) for length in lengths]
        for width in sorted(set(widths), reverse=True):
            members = [place for place, each in enumerate(widths) if each == width]
            texts = _largest_height(max(1, min(_BATCH_TEXTS, most // width)))
            for start in range(0, len(members), texts):
                for part, height in _in_few_heights(members[start : start + texts], width):
                    yield _Batch(members=part, width=width, height=height)

    def _run_with(self, threads: int) -> _Run:
        """The graph opened for so many threads a call, opened once."""
        with self._opening:
            if threads not in self._runs:
                streams = self.threads // threads
                self._runs[threads] = _open_graph(self.graph, self.folder, threads=threads, streams=streams)
            return self._runs[threads]
