"""Which of very many texts are repeats, and where shards end, found without holding texts or hashes in memory.

Workers hash the texts of each piece. The hashes go to disk in buckets by their own value, so that equal ones meet in
one bucket, and a bucket is sorted alone. What stays in memory is one bit a text: is it a repeat of an earlier one? The
answers are those of `labelling`, which goes through the texts one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.scale.pieces import _Piece, _read_piece
from trundle.teacher.labelling import SHARD_CHARACTERS

_Bits = NDArray[np.uint8]
_Positions = NDArray[np.int64]

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("piece", "<u4"), ("place", "<u4")])
_BUCKET_TEXTS = 1 << 22
"""About 100 MB a bucket while it is sorted, and as much again for the order."""


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """One shard: it ends before the text at `end`, and keeps so many of the texts since the shard before."""

    end: int
    kept: int


class _Survey:
    """Collects what workers say of the pieces, in any order, then answers for all of them in order."""

    def __init__(self, scratch: Path, *, pieces: int, rows: int) -> None:
        self._scratch = scratch
        self._buckets = 1 + rows // _BUCKET_TEXTS
        self._counts = np.zeros(pieces, dtype=np.int64)

    def add(self, piece: int, hashes: bytes, lengths: bytes) -> None:
        """Note a piece's texts: 16 bytes of hash and 4 of length each."""
        found = np.frombuffer(hashes, dtype=_HASH)
        entries = np.empty(len(found), dtype=_ENTRY)
        entries["high"], entries["low"] = found["high"], found["low"]
        entries["piece"], entries["place"] = piece, np.arange(len(found))
        bucket = (found["high"] % np.uint64(self._buckets)).astype(np.int64)
        order = np.argsort(bucket, kind="stable")
        ends = np.cumsum(np.bincount(bucket, minlength=self._buckets))
        for number, part in enumerate(np.split(entries[order], ends[:-1])):
            if len(part):
                with self._bucket(number).open("ab") as file:
                    file.write(part.tobytes())
        self._lengths(piece).write_bytes(lengths)
        self._counts[piece] = len(found)

    @property
    def counts(self) -> _Positions:
        """Texts in each piece."""
        return self._counts

    @property
    def starts(self) -> _Positions:
        """The position of each piece's first text among all texts, and at the end how many there are."""
        return np.concatenate([[0], np.cumsum(self._counts)])

    def repeats(self) -> _Bits:
        """A bit for each text that was met before, eight to a byte."""
        starts = self.starts
        bits = np.zeros(-(-int(starts[-1]) // 8), dtype=np.uint8)
        for number in range(self._buckets):
            if not self._bucket(number).is_file():
                continue
            entries = np.fromfile(self._bucket(number), dtype=_ENTRY)
            positions = starts[entries["piece"]] + entries["place"]
            order = np.lexsort((positions, entries["low"], entries["high"]))
            high, low = entries["high"][order], entries["low"][order]
            again = positions[order][1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
            np.bitwise_or.at(bits, again >> 3, (128 >> (again & 7)).astype(np.uint8))
        return bits

    def cuts(self, repeats: _Bits, shard_size: int) -> Iterator[_Cut]:
        """Where shards end: when they are full of texts or of characters, and with the last text."""
        starts = self.starts
        kept = characters = 0
        for piece in range(len(self._counts)):
            there = np.flatnonzero(_bits_between(repeats, int(starts[piece]), int(starts[piece + 1])) == 0)
            lengths = np.fromfile(self._lengths(piece), dtype="<u4")[there].astype(np.int64)
            at = 0
            while at < len(there):
                total = characters + np.cumsum(lengths[at : at + shard_size - kept])
                taken = min(int(np.searchsorted(total, SHARD_CHARACTERS)) + 1, len(total))
                kept, characters, at = kept + taken, int(total[taken - 1]), at + taken
                if kept == shard_size or characters >= SHARD_CHARACTERS:
                    yield _Cut(end=int(starts[piece] + there[at - 1]) + 1, kept=kept)
                    kept = characters = 0
        if kept:
            yield _Cut(end=int(starts[-1]), kept=kept)

    def _bucket(self, number: int) -> Path:
        return self._scratch / f"bucket-{number}"

    def _lengths(self, piece: int) -> Path:
        return self._scratch / f"lengths-{piece}"


def _bits_between(bits: _Bits, start: int, end: int) -> _Bits:
    """Some bits, a byte each."""
    return np.unpackbits(bits[start // 8 : -(-end // 8)])[start % 8 : start % 8 + end - start]


_LONGEST = 16
"""Shards in a stretch, at most."""
_ROUNDS = 4
"""Stretches for each worker, at least, where there are shards enough: so that none is long alone at the end."""


class _Stretch(BaseModel):
    """Shards from number `first` on, with so many texts each."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int
    sizes: tuple[int, ...]
    pieces: tuple[_Piece, ...]
    before: int
    """Texts of the first piece that belong to shards before."""
    texts: int
    """Texts to read after those, repeats included."""


def _stretch_length(shards: int, workers: int) -> int:
    """How many shards to put into a stretch."""
    return max(1, min(_LONGEST, shards // (_ROUNDS * workers)))


def _cut_stretches(
    pieces: Sequence[_Piece], starts: _Positions, cuts: Sequence[_Cut], repeats: _Bits, length: int
) -> Iterator[tuple[_Stretch, bytes]]:
    """All stretches, each with the bits of its texts that are repeats."""
    begin = 0
    for first in range(0, len(cuts), length):
        part = cuts[first : first + length]
        end = part[-1].end
        opening, closing = np.searchsorted(starts, [begin, end - 1], side="right") - 1
        yield (
            _Stretch(
                first=first,
                sizes=tuple(cut.kept for cut in part),
                pieces=tuple(pieces[opening : closing + 1]),
                before=begin - int(starts[opening]),
                texts=end - begin,
            ),
            np.packbits(_bits_between(repeats, begin, end)).tobytes(),
        )
        begin = end


def _shard_texts(stretch: _Stretch, repeats: bytes) -> Iterator[list[Text]]:
    """The texts of each shard of a stretch."""
    everything: Iterable[Text] = chain.from_iterable(map(_read_piece, stretch.pieces))
    left_out = np.unpackbits(np.frombuffer(repeats, dtype=np.uint8), count=stretch.texts).tolist()
    asked = islice(everything, stretch.before, stretch.before + stretch.texts)
    kept = (text for text, again in zip(asked, left_out, strict=False) if not again)
    for size in stretch.sizes:
        texts = list(islice(kept, size))
        if len(texts) < size:
            raise BadInput(
                f"{stretch.pieces[-1].path} changed while it was read; build again when it is still"
            )
        yield texts
