"""One model and its graph: texts that carry their prompt, to vectors.

A few texts run on all threads together, which has the lowest latency. Many texts are tokenised by all threads
in waves, divided into batches of similar length, and each thread runs one batch after the other by itself.
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
from tokenizers import Tokenizer

from trundle.embedder import Vectors, check_vectors
from trundle.errors import BadInput, BadModel, EmptyTexts
from trundle.runtime.description import Description, _check_weights, read_description
from trundle.runtime.engines import _choose, _GraphSession, _Ids, _load_graph

_STEPS = ((32, 4), (64, 8))
"""Pairs of a number of tokens and the multiple that shorter texts are padded to."""
_COARSE_STEP = 16
_HEIGHTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_RUN_COST = 32
"""Tokens of padding that take about as long as one more run."""
_WAVE = 2048
"""Texts whose tokens are in memory at once."""
_READ_AT_ONCE = 64
_ALONE_FROM = 4096
"""Characters per thread from which each thread works by itself."""
_BATCH_TOKENS, _BATCH_TEXTS = 2048, 64
_FEWEST_TOKENS, _BATCHES_EACH = 512, 2
"""Batches get smaller if a thread would otherwise have none, but not smaller than this."""


class Reader:
    """A tokenizer with the model's settings. It has no state, so threads can share it."""

    def __init__(self, folder: Path, description: Description) -> None:
        path = folder / description.tokenizer
        if not path.is_file():
            raise BadModel(f"{path} is missing; export the model again")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise BadModel(f"{path} can't be read ({error}); export the model again") from error
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(description.max_tokens)
        self._description = description
        self._end = self._tokenizer.encode(description.after, add_special_tokens=False).ids

    def read(self, texts: Sequence[str]) -> list[list[int]]:
        """The token ids of each text, truncated to the model's limit, special tokens included."""
        about, end = self._description, self._end
        framed = bool(about.before or about.after)
        given = [about.before + text + about.after for text in texts] if framed else list(texts)
        special = about.special_tokens and not framed
        read = self._tokenizer.encode_batch_fast(given, add_special_tokens=special)
        # sentence-transformers keeps the end of the template when it truncates a text.
        return [
            [*each.ids[: -len(end)], *end] if end and len(each.ids) == about.max_tokens else each.ids
            for each in read
        ]


def padded(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[_Ids, _Ids]:
    """Ids and attention mask of rows padded on the right.

    The right side, whatever side the model was trained with: positions then start at 0 for every text, and a
    text's vector does not depend on the length of the others.
    """
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return ids, mask


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))


def _batches(lengths: Sequence[int], *, tokens: int, texts: int) -> list[list[int]]:
    """Groups of similar length with at most `tokens` tokens after padding, unless it is one long text."""
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
    """Parts of a group with the number of rows each runs as; empty rows may cost less than another run."""
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
    return max(height for height in _HEIGHTS if height <= count)


def _rounded_up(length: int, limit: int) -> int:
    """The padded width for texts of this length; it does not exceed `limit` unless the length does."""
    step = next((step for most, step in _STEPS if length <= most), _COARSE_STEP)
    return max(length, min(limit, -(-length // step) * step))


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Rows that run together, padded to `width` tokens and, with copies of the first, to `height` rows."""

    members: Sequence[int]
    width: int
    height: int


def _grouped(batches: Iterable[_Batch]) -> Iterator[list[_Batch]]:
    """Small batches collected until they are worth handing to a thread."""
    group: list[_Batch] = []
    for batch in batches:
        group.append(batch)
        if sum(each.width * each.height for each in group) >= _FEWEST_TOKENS:
            yield group
            group = []
    if group:
        yield group


class _OneModel:
    """A folder with graphs, one of them loaded. Several threads may use it at once."""

    def __init__(self, folder: Path, *, graph: str | None, threads: int, warn: Callable[[str], None]) -> None:
        self.folder, self.threads = folder, threads
        self.description = read_description(folder)
        self.graph = _choose(self.description.graphs, graph, folder, warn)
        self.reader = Reader(folder, self.description)
        _check_weights(folder, self.description)
        self._sessions: dict[int, _GraphSession] = {}
        self._loading = Lock()
        self._workers = ThreadPoolExecutor(threads, thread_name_prefix="trundle")
        self._session(threads)

    def vectors_of(self, rows: Sequence[Sequence[int]], *, together: bool) -> Vectors:
        """Full vectors of token ids, by all threads `together` or by the calling thread alone."""
        vectors = np.empty((len(rows), self.description.dimensions), dtype=np.float32)
        session = self._session(self.threads if together else 1)
        self._fill(vectors, range(len(rows)), rows, session, self._shapes([len(row) for row in rows]))
        return vectors

    def prompt(self, prompt: str | None, name: str | None, side: str | None) -> str:
        """The given prompt, the named one, or the model's own for the side."""
        if prompt is not None:
            return prompt
        if name is None:
            return self.description.prompt_for(side)
        if name not in self.description.prompts:
            known = ", ".join(self.description.prompts) or "none"
            raise BadInput(f"the model has no prompt named {name!r}; choose one of: {known}")
        return self.description.prompts[name]

    def vectors(self, texts: Sequence[str]) -> Vectors:
        """Vectors of texts that already carry their prompt."""
        vectors = np.empty((len(texts), self.description.dimensions), dtype=np.float32)
        lengths = [len(text) for text in texts]
        order = _longest_first(lengths)
        waves = [order[start : start + _WAVE] for start in range(0, len(order), _WAVE)]
        if self.threads == 1 or sum(lengths) < _ALONE_FROM * self.threads:
            session = self._session(self.threads)
            for wave in waves:
                rows = self._rows(texts, wave)
                self._fill(vectors, wave, rows, session, self._shapes([len(row) for row in rows]))
        else:
            self._fill_in_parallel(vectors, texts, waves)
        return check_vectors(vectors, texts, str(self.folder))

    def _fill_in_parallel(
        self, vectors: Vectors, texts: Sequence[str], waves: Sequence[Sequence[int]]
    ) -> None:
        # A wave is tokenised while the last batches of the wave before still run, so that no thread waits.
        session = self._session(1)
        running: list[Future[None]] = []
        try:
            for wave in waves:
                size = max(_READ_AT_ONCE, -(-len(wave) // self.threads))
                pieces = [wave[start : start + size] for start in range(0, len(wave), size)]
                rows = list(chain.from_iterable(self._workers.map(partial(self._rows, texts), pieces)))
                most = max(_FEWEST_TOKENS, sum(map(len, rows)) // (self.threads * _BATCHES_EACH))
                running += [
                    self._workers.submit(self._fill, vectors, wave, rows, session, batches)
                    for batches in _grouped(self._shapes([len(row) for row in rows], most=most))
                ]
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()

    def _rows(self, texts: Sequence[str], places: Sequence[int]) -> list[list[int]]:
        rows = self.reader.read([texts[place] for place in places])
        if empty := [place for place, row in zip(places, rows, strict=True) if not row]:
            raise EmptyTexts(empty, texts[empty[0]])
        return rows

    def _fill(
        self,
        vectors: Vectors,
        places: Sequence[int],
        rows: Sequence[Sequence[int]],
        session: _GraphSession,
        batches: Iterable[_Batch],
    ) -> None:
        for batch in batches:
            given = [rows[member] for member in batch.members]
            copies = [given[0]] * (batch.height - len(given))
            ids, mask = padded([*given, *copies], batch.width, self.description.pad_id)
            found = session(ids, mask)
            if found.shape[1:] != vectors.shape[1:]:
                widths = f"vectors of shape {found.shape[1:]}, and encoder.json says {vectors.shape[1:]}"
                raise BadModel(f"{self.folder / self.graph.path} gives {widths}; export the model again")
            vectors[[places[member] for member in batch.members]] = found[: len(given)]

    def _shapes(self, lengths: Sequence[int], *, most: int = _BATCH_TOKENS) -> Iterator[_Batch]:
        """Divide texts into batches of at most `most` tokens.

        OpenVINO prepares itself for each new shape, which takes longer than a run, and in int8 another width
        rounds differently. So it gets few shapes, and a text's width follows from its own length alone.
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

    def _session(self, threads: int) -> _GraphSession:
        """The graph loaded for calls of so many threads; each is loaded once."""
        with self._loading:
            if threads not in self._sessions:
                streams = self.threads // threads
                self._sessions[threads] = _load_graph(self.graph, self.folder, threads, streams)
            return self._sessions[threads]
