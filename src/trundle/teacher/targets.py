"""Teacher vectors: stored ones, read from disk by position, and those of measured texts, kept in memory.

Of a store, memory holds 13 bytes per text. The files are not memory-mapped: kernels that cache files in large
pages count up to 2 MB to the process for each row read; reading by position is also faster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import blake2b
from itertools import repeat
from pathlib import Path
from weakref import WeakSet

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trundle.cache import cache_key
from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Encode, Vectors, check_vectors
from trundle.errors import BadInput, BadModel
from trundle.progress import SILENT, Progress
from trundle.teacher import shards as store
from trundle.teacher.shards import Manifest, is_intact

_FEWEST_TEXTS_AT_ONCE, _TEXTS_AT_ONCE = 32, 512
_SECONDS_AT_ONCE = 4.0
"""Where progress is shown, texts are encoded in slices that start small and grow while they are quick."""
_SHOWING: WeakSet[Encode] = WeakSet()
"""Functions that show their progress; a memory around one of them shows none."""


class Targets:
    """A finished folder of texts and their teacher vectors, numbered from 0.

    Holds no open file, so threads, and processes that inherit or unpickle it, may use it at the same time.
    `is_share` is set if other processes hold the rest.
    """

    def __init__(self, folder: Path, manifest: Manifest, shards: range | None = None) -> None:
        """Open all shards or a range of them; positions count from the first text of the first one."""
        self.folder = folder
        self.manifest = manifest
        self.is_share = False
        shards = range(len(manifest.shards)) if shards is None else shards
        self._index = np.concatenate([np.load(store._part_path(folder, shard, "index")) for shard in shards])
        self._paths: dict[store._Part, list[Path]] = {
            part: [store._part_path(folder, shard, part) for shard in shards] for part in ("texts", "vectors")
        }
        self._opened = manifest.shards[shards.start : shards.stop]
        self._starts = np.cumsum([0, *(shard.count for shard in self._opened)])

    def __len__(self) -> int:
        return len(self._index)

    def identity(self) -> str:
        """Return what distinguishes these texts from others, whichever teacher's vectors they have."""
        shards = [shard.texts_fingerprint for shard in self._opened]
        positions = blake2b(self._checked(np.arange(len(self))).tobytes(), digest_size=16)
        return cache_key(shards, positions.hexdigest())

    @property
    def width(self) -> int:
        """The number of dimensions."""
        return self.manifest.width

    @property
    def normalised(self) -> bool:
        """Whether all vectors have length 1."""
        return self.manifest.normalised

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """The number of characters of each text."""
        return np.asarray(self._index["length"][self._checked(np.arange(len(self)))])

    def of_kind(self, kind: Kind | None) -> NDArray[np.bool_]:
        """Return whether each text is of this kind."""
        codes = self._index["kind"][self._checked(np.arange(len(self)))]
        return np.asarray(codes == store._KIND_CODES.index(kind))

    def texts(self, positions: ArrayLike) -> list[str]:
        """Return texts in the order of the positions."""
        wanted = self._checked(positions)
        first = wanted == self._starts[self._shards(wanted)]
        starts = np.where(first, 0, self._index["end"][wanted - 1])
        sizes = self._index["end"][wanted] - starts
        ranges = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        found = [""] * len(ranges)
        for shard, places in self._by_shard(wanted):
            read = store._read_ranges(self._paths["texts"][shard], [ranges[place] for place in places])
            for place, content in zip(places, read, strict=True):
                found[place] = content.decode("utf-8")
        return found

    def kinds(self, positions: ArrayLike) -> list[Kind | None]:
        """Return kinds in the order of the positions."""
        return [store._KIND_CODES[code] for code in self._index["kind"][self._checked(positions)]]

    def vectors(self, positions: ArrayLike) -> Vectors:
        """Return vectors in the order of the positions, one row each."""
        return self._rows(self._checked(positions)).astype(np.float32)

    def rows(self, start: int, stop: int) -> NDArray[np.floating]:
        """Return the vectors of consecutive positions in the precision they are stored in."""
        return self._rows(self._checked(np.arange(start, stop)))

    def _rows(self, wanted: NDArray[np.int64]) -> NDArray[np.floating]:
        """Each shard's file is opened once, and read at once if at least half of what is read is wanted."""
        found = np.empty((len(wanted), self.width), dtype=self.manifest.dtype)
        for shard, places in self._by_shard(wanted):
            header = self._opened[shard].vectors.size - self._opened[shard].count * found.strides[0]
            rows = wanted[places] - self._starts[shard]
            store._read_rows(self._paths["vectors"][shard], header, rows, found, places)
        return found

    def chosen(self, positions: ArrayLike) -> list[Text]:
        """Return texts with their kinds, in the order of the positions."""
        pairs = zip(self.texts(positions), self.kinds(positions), strict=True)
        return [Text(text=text, kind=kind) for text, kind in pairs]

    def part(self, positions: ArrayLike) -> Targets:
        """Return the texts at these positions, numbered from 0."""
        return _TargetsPart(self, np.asarray(positions, dtype=np.int64))

    def split(self, held_out: int, *, seed: int) -> tuple[Targets, Targets | None]:
        """Return a training and a validation part; the latter has `held_out` texts, at most a tenth."""
        count = min(held_out, len(self) // 10)
        if not count:
            return self, None
        order = np.random.default_rng(seed).permutation(len(self))
        return self.part(np.sort(order[count:])), self.part(np.sort(order[:count]))

    def _checked(self, positions: ArrayLike) -> NDArray[np.int64]:
        wanted = np.asarray(positions, dtype=np.int64).reshape(-1)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"positions run from 0 to {len(self) - 1}")
        return wanted

    def _shards(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._starts, wanted, side="right") - 1

    def _by_shard(self, wanted: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield each shard that holds some of the positions, and their places among those wanted."""
        shards = self._shards(wanted)
        order = np.argsort(shards, kind="stable")
        ends = np.flatnonzero(np.diff(shards[order], append=-1)) + 1
        for places in np.split(order, ends[:-1]) if len(order) else ():
            yield int(shards[places[0]]), places


class _TargetsPart(Targets):
    """Some texts of a folder, numbered from 0."""

    def __init__(self, targets: Targets, positions: NDArray[np.int64], *, is_share: bool = False) -> None:
        self.__dict__.update(targets.__dict__)
        self._positions = targets._checked(positions)
        self.is_share = is_share or targets.is_share

    def __len__(self) -> int:
        return len(self._positions)

    def _checked(self, positions: ArrayLike) -> NDArray[np.int64]:
        return self._positions[super()._checked(positions)]


def find_targets(folder: str | Path) -> Targets | None:
    """Open a finished folder, or return None if it is not finished or a checksum does not match."""
    path = Path(folder)
    manifest = store.read_manifest(path)
    if manifest is None or not manifest.complete:
        return None
    return Targets(path, manifest) if _is_verified(path, _state(path)) else None


def _state(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when a file of the folder does: names, sizes and times."""
    files = ((entry.name, entry.stat()) for entry in os.scandir(folder) if not entry.name.startswith("."))
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in files))


@lru_cache(maxsize=8)
def _is_verified(folder: Path, state: object) -> bool:  # noqa: ARG001
    """Whether all checksums match; a folder is read once per process, unless its `state` changes."""
    shards = _finished_manifest(folder).shards
    with ThreadPoolExecutor() as pool:
        return all(pool.map(is_intact, repeat(folder), range(len(shards)), shards))


def wait_for_targets(folder: str | Path, *, seconds: float = 0.5) -> Targets:
    """Wait until another process has finished a folder, and open it."""
    while (found := find_targets(folder)) is None:
        time.sleep(seconds)
    return found


def open_targets(folder: str | Path) -> Targets:
    """Open a finished folder after checking the sizes of its files."""
    path = Path(folder)
    manifest = _finished_manifest(path)
    _check_sizes(path, manifest, range(len(manifest.shards)))
    return Targets(path, manifest)


def open_share(folder: str | Path, *, rank: int, processes: int) -> Targets:
    """Open one process's part of a finished folder; only the shards of its texts must exist."""
    path = Path(folder)
    manifest = _finished_manifest(path)
    begin, end = (manifest.count * number // processes for number in (rank, rank + 1))
    if begin == end:
        raise BadInput(f"{path} has fewer texts than there are processes; start fewer processes")
    starts = np.cumsum([0, *(shard.count for shard in manifest.shards)])
    first, last = (int(shard) for shard in np.searchsorted(starts, [begin, end - 1], side="right") - 1)
    shards = range(first, last + 1)
    _check_sizes(path, manifest, shards)
    opened = Targets(path, manifest, shards)
    return _TargetsPart(opened, np.arange(begin, end) - starts[first], is_share=True)


def _check_sizes(path: Path, manifest: Manifest, shards: range) -> None:
    for number in shards:
        for part, stored in manifest.shards[number].files.items():
            file = store._part_path(path, number, part)
            if not store._has_size(file, stored):
                raise BadInput(f"{file} is missing or truncated; build the folder again")


def _finished_manifest(folder: Path) -> Manifest:
    manifest = store.read_manifest(folder)
    if manifest is None:
        raise BadInput(f"{folder} holds no teacher vectors; build them with trundle targets build")
    if not manifest.complete:
        raise BadInput(f"{folder} is not finished ({manifest.count} texts); run the same build to resume")
    return manifest


class HeldOutVectors:
    """The vectors of one run, by encoding function and text; each is computed once."""

    def __init__(self, progress: Progress = SILENT) -> None:
        self._progress = progress
        self._tables: dict[Encode, dict[str, Vectors]] = {}

    def remember(self, embedder: Embedder, label: str) -> Embedder:
        """Return the same embedder, which encodes only new texts; `label` names its progress bar."""
        return embedder.through(lambda encode: self._through(embedder.name, encode, label))

    def known(self, encode: Encode) -> Vectors | None:
        """Return all vectors so far from one function of a model."""
        table = self._tables.get(encode)
        return np.stack(list(table.values())) if table else None

    def _through(self, name: str, encode: Encode, label: str) -> Encode:
        progress = SILENT if encode in _SHOWING else self._progress

        def remembered(texts: Sequence[str]) -> Vectors:
            if len(texts) == 0:
                raise BadInput(f"{label} has no texts to encode; add at least one")
            for text in texts:
                if not isinstance(text, str):
                    raise BadInput(f"{label} holds a {type(text).__name__} among its texts; convert it first")
            table = self._tables.setdefault(encode, {})
            # Longest first, as in sentence-transformers, so that slices need no more padding.
            new = sorted({text for text in texts if text not in table}, key=lambda text: (-len(text), text))
            start, count = 0, _TEXTS_AT_ONCE if progress is SILENT else _FEWEST_TEXTS_AT_ONCE
            with progress.task(label, len(new)) as advance:
                while part := new[start : start + count]:
                    began = time.monotonic()
                    table.update(zip(part, check_vectors(encode(part), part, name), strict=True))
                    advance(len(part))
                    start += len(part)
                    if time.monotonic() - began < _SECONDS_AT_ONCE:
                        count = min(2 * count, _TEXTS_AT_ONCE)
            rows = [table[text] for text in texts]
            if len({len(row) for row in rows}) > 1:
                raise BadModel(f"{name} gave vectors of differing widths; check its last module")
            return np.stack(rows)

        if progress is not SILENT:
            _SHOWING.add(remembered)
        return remembered
