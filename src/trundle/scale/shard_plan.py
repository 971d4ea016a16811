"""Finds the duplicates among very many texts and where shards end, without holding texts or hashes in memory.

Workers hash the texts of each file part. The hashes are written to buckets by value, and each bucket is
sorted separately. Memory holds one bit per text: whether it is a duplicate of an earlier one. The result is
that of `trundle.teacher.labelling`, which reads the texts one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.scale.file_parts import _FilePart, _read_part
from trundle.teacher.labelling import SHARD_CHARACTERS

_Bits = NDArray[np.uint8]
_Positions = NDArray[np.int64]

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("part", "<u4"), ("place", "<u4")])
_BUCKET_TEXTS = 1 << 22
"""A bucket takes about 100 MB while it is sorted, and the same again for the order."""
_LONGEST_RANGE = 16
_RANGES_PER_WORKER = 4
"""At least, if there are enough shards: so that no worker is left with a long range at the end."""


@dataclass(frozen=True, kw_only=True)
class _ShardEnd:
    """One shard ends before the text at `end` and keeps this many of the texts since the previous shard."""

    end: int
    kept: int


class _ShardPlanner:
    """Collects the hashes of all file parts in any order, then finds duplicates and shards in text order."""

    def __init__(self, scratch: Path, *, parts: int, rows: int) -> None:
        self._scratch = scratch
        self._buckets = 1 + rows // _BUCKET_TEXTS
        self.counts: _Positions = np.zeros(parts, dtype=np.int64)
        """The number of texts in each part."""

    def add(self, part: int, hashes: bytes, lengths: bytes) -> None:
        """Add the texts of a part: 16 bytes of hash and 4 of length each."""
        found = np.frombuffer(hashes, dtype=_HASH)
        entries = np.empty(len(found), dtype=_ENTRY)
        entries["high"], entries["low"] = found["high"], found["low"]
        entries["part"], entries["place"] = part, np.arange(len(found))
        bucket = (found["high"] % np.uint64(self._buckets)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        ends = np.cumsum(np.bincount(bucket, minlength=self._buckets))
        for number, content in enumerate(np.split(entries[order], ends[:-1])):
            if len(content):
                with self._bucket(number).open("ab") as file:
                    file.write(content.tobytes())
        self._lengths(part).write_bytes(lengths)
        self.counts[part] = len(found)

    @property
    def starts(self) -> _Positions:
        """The position of each part's first text among all texts, and the number of texts at the end."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def duplicates(self) -> _Bits:
        """Return one bit per text, eight per byte: whether it is a duplicate of an earlier one."""
        starts = self.starts
        bits = np.zeros(-(-int(starts[-1]) // 8), dtype=np.uint8)
        for number in range(self._buckets):
            if not self._bucket(number).is_file():
                continue
            entries = np.fromfile(self._bucket(number), dtype=_ENTRY)
            positions = starts[entries["part"]] + entries["place"]
            order = np.lexsort((positions, entries["low"], entries["high"]))
            high, low = entries["high"][order], entries["low"][order]
            again = positions[order][1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
            np.bitwise_or.at(bits, again >> 3, (128 >> (again & 7)).astype(np.uint8))
        return bits

    def shard_ends(self, duplicates: _Bits, shard_size: int) -> Iterator[_ShardEnd]:
        """Yield the end of each shard: it is full of texts or of characters, or the texts end."""
        starts = self.starts
        kept = characters = 0
        for part in range(len(self.counts)):
            there = np.flatnonzero(_bits_between(duplicates, int(starts[part]), int(starts[part + 1])) == 0)
            lengths = np.fromfile(self._lengths(part), dtype="<u4")[there].astype(np.int64)
            at = 0
            while at < len(there):
                total = characters + np.cumsum(lengths[at : at + shard_size - kept])
                taken = min(int(np.searchsorted(total, SHARD_CHARACTERS)) + 1, len(total))
                kept, characters, at = kept + taken, int(total[taken - 1]), at + taken
                if kept == shard_size or characters >= SHARD_CHARACTERS:
                    yield _ShardEnd(end=int(starts[part] + there[at - 1]) + 1, kept=kept)
                    kept = characters = 0
        if kept:
            yield _ShardEnd(end=int(starts[-1]), kept=kept)

    def _bucket(self, number: int) -> Path:
        return self._scratch / f"bucket-{number}"

    def _lengths(self, part: int) -> Path:
        return self._scratch / f"lengths-{part}"


def _bits_between(bits: _Bits, start: int, end: int) -> _Bits:
    return np.unpackbits(bits[start // 8 : -(-end // 8)])[start % 8 : start % 8 + end - start]


class _ShardRange(BaseModel, frozen=True, extra="forbid"):
    """Consecutive shards for one worker, from number `first` on, with the number of texts of each."""

    first: int
    sizes: tuple[int, ...]
    parts: tuple[_FilePart, ...]
    before: int
    """The number of texts of the first part that belong to earlier shards."""
    texts: int
    """The number of texts to read after those, duplicates included."""


def _range_length(shards: int, workers: int) -> int:
    return max(1, min(_LONGEST_RANGE, shards // (_RANGES_PER_WORKER * workers)))


def _split_ranges(
    parts: Sequence[_FilePart], starts: _Positions, ends: Sequence[_ShardEnd], duplicates: _Bits, length: int
) -> Iterator[tuple[_ShardRange, bytes]]:
    """Yield all ranges of `length` shards, each with the duplicate bits of its texts."""
    begin = 0
    for first in range(0, len(ends), length):
        shards = ends[first : first + length]
        end = shards[-1].end
        opening, closing = np.searchsorted(starts, [begin, end - 1], side="right") - 1
        yield (
            _ShardRange(
                first=first,
                sizes=tuple(shard.kept for shard in shards),
                parts=tuple(parts[opening : closing + 1]),
                before=begin - int(starts[opening]),
                texts=end - begin,
            ),
            np.packbits(_bits_between(duplicates, begin, end)).tobytes(),
        )
        begin = end


def _shard_texts(shards: _ShardRange, duplicates: bytes) -> Iterator[list[Text]]:
    everything = chain.from_iterable(map(_read_part, shards.parts))
    left_out = np.unpackbits(np.frombuffer(duplicates, dtype=np.uint8), count=shards.texts).tolist()
    own = islice(everything, shards.before, shards.before + shards.texts)
    kept = (text for text, again in zip(own, left_out, strict=False) if not again)
    for size in shards.sizes:
        texts = list(islice(kept, size))
        if len(texts) < size:
            raise BadInput(f"{shards.parts[-1].path} changed while it was read; build again")
        yield texts
