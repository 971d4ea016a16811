"""Teacher vectors, computed once and read from disk ever after.

Nothing is held in memory but 4 bytes a text: vectors and texts are seen through memory maps. Pages that were
touched count as the process's own until they are let go, so the maps are dropped every so often: reading a
million texts in random order takes no more memory than reading a thousand.

What this is not: it makes no vectors; see `labelling` for models and endpoints, `vector_table` for parquet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trundle.data.shards import INDEX, KIND_CODES, Manifest, Part, has_size, mapped, part_path, read_manifest
from trundle.data.texts import Kind, Text
from trundle.embedder import Vectors
from trundle.errors import BadInput

ROWS_BEFORE_RELEASE = 1024
"""Reading a row maps at most about 64 kB around it, in each of three files."""


class Targets:
    """A finished folder of texts and their teacher vectors, numbered from 0."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._starts = np.cumsum([0, *(shard.count for shard in manifest.shards)])
        self._maps: dict[tuple[int, Part], NDArray[Any]] = {}
        self._rows_read = 0
        self._lengths: NDArray[np.uint32] = np.concatenate(
            [self._index(number)["length"] for number in range(len(manifest.shards))]
        )
        self._maps.clear()

    def __len__(self) -> int:
        return self.manifest.count

    @property
    def width(self) -> int:
        """How many numbers a vector has."""
        return self.manifest.width

    @property
    def normalised(self) -> bool:
        """Whether all vectors have length 1."""
        return self.manifest.normalised

    @property
    def lengths(self) -> NDArray[np.uint32]:
        """Characters of each text, to put texts of like length into one batch."""
        return self._lengths

    def text(self, position: int) -> str:
        """One text."""
        return self.texts([position])[0]

    def kind(self, position: int) -> Kind | None:
        """The kind of one text."""
        return self.kinds([position])[0]

    def texts(self, positions: ArrayLike) -> list[str]:
        """Texts in the order asked for."""
        return [self._text(shard, row) for shard, row in self._places(positions)]

    def kinds(self, positions: ArrayLike) -> list[Kind | None]:
        """Kinds in the order asked for."""
        return [KIND_CODES[self._index(shard)["kind"][row]] for shard, row in self._places(positions)]

    def vectors(self, positions: ArrayLike) -> Vectors:
        """Vectors in the order asked for, one row each."""
        places = self._places(positions)
        rows = np.empty((len(places), self.width), dtype=np.float32)
        for at, (shard, row) in enumerate(places):
            rows[at] = self._vectors(shard)[row]
        return rows

    def shards(self) -> Iterator[tuple[list[Text], Vectors]]:
        """Everything in order, one shard at a time."""
        for shard, start in enumerate(self._starts[:-1]):
            positions = np.arange(start, self._starts[shard + 1])
            texts = zip(self.texts(positions), self.kinds(positions), strict=True)
            yield (
                [Text(text=text, kind=kind) for text, kind in texts],
                self._vectors(shard).astype(np.float32),
            )
            self._maps.clear()

    def _places(self, positions: ArrayLike) -> list[tuple[int, int]]:
        """Shard and row of each position; also lets old maps go when enough was read through them."""
        wanted = np.asarray(positions, dtype=np.int64).reshape(-1)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < len(self)):
            raise IndexError(f"positions run from 0 to {len(self) - 1}")
        self._rows_read += wanted.size
        if self._rows_read > ROWS_BEFORE_RELEASE:
            self._maps.clear()
            self._rows_read = 0
        shards = np.searchsorted(self._starts, wanted, side="right") - 1
        return list(zip(shards.tolist(), (wanted - self._starts[shards]).tolist(), strict=True))

    def _text(self, shard: int, row: int) -> str:
        ends = self._index(shard)["end"]
        start = int(ends[row - 1]) if row else 0
        return self._bytes(shard)[start : int(ends[row])].tobytes().decode("utf-8")

    def _index(self, shard: int) -> NDArray[Any]:
        return self._mapped(shard, "index", INDEX, (self.manifest.shards[shard].count,))

    def _bytes(self, shard: int) -> NDArray[np.uint8]:
        stored = self.manifest.shards[shard].files["texts"]
        return self._mapped(shard, "texts", np.dtype(np.uint8), (stored.size,))

    def _vectors(self, shard: int) -> NDArray[Any]:
        shape = (self.manifest.shards[shard].count, self.width)
        return self._mapped(shard, "vectors", np.dtype(self.manifest.dtype), shape)

    def _mapped(self, shard: int, part: Part, dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
        if (shard, part) not in self._maps:
            self._maps[shard, part] = mapped(part_path(self.folder, shard, part), dtype, tuple(shape))
        return self._maps[shard, part]


def open_targets(folder: str | Path) -> Targets:
    """Open a finished folder; the sizes of its files are checked, their content was when it was built."""
    path = Path(folder)
    manifest = read_manifest(path)
    if manifest is None:
        raise BadInput(f"{path} holds no teacher vectors; build them first")
    if not manifest.complete:
        done = f"{manifest.count} texts are done"
        raise BadInput(
            f"{path} is not finished ({done}); build it again with the same teacher and texts to go on"
        )
    for number, shard in enumerate(manifest.shards):
        for part, stored in shard.files.items():
            file = part_path(path, number, part)
            if not has_size(file, stored):
                raise BadInput(f"{file} is missing or cut short; build the folder again to mend it")
    return Targets(path, manifest)
