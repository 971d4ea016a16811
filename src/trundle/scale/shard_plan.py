"""Divides parquet files into parts that workers read independently, and plans the shards of their texts.

A part is some consecutive row groups of one file, local or in object storage (`s3://bucket/folder`,
`gs://bucket/file.parquet::text=body`). All parts in order give the texts that `read_texts` gives for the same
files. Workers hash the texts of each part. The hashes are written to buckets by value, and each bucket is
sorted separately. Memory holds one bit per text: whether it is a duplicate of an earlier one. The result is
that of `trundle.teacher.labelling`, which reads the texts one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs
from pydantic import BaseModel

from trundle.data import texts as reading
from trundle.data.texts import Text
from trundle.errors import BadInput
from trundle.teacher.labelling import SHARD_CHARACTERS

_PART_ROWS = 1 << 17
"""A part ends with the row group that reaches this many rows."""
_METADATA_THREADS = 16
_ENDING = ".parquet"
_Bits = NDArray[np.uint8]
_Positions = NDArray[np.int64]

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("part", "<u4"), ("place", "<u4")])
_BUCKET_TEXTS = 1 << 22
"""A bucket takes about 100 MB while it is sorted, and the same again for the order."""
_LONGEST_RANGE = 16
_RANGES_PER_WORKER = 4
"""At least, if there are enough shards: so that no worker is left with a long range at the end."""


class _FilePart(BaseModel, frozen=True, extra="forbid"):
    """Some row groups of a file."""

    storage: str
    """The URI of the file's storage, or an empty string for the local file system."""
    path: str
    groups: tuple[int, ...]
    before: int
    """The number of rows of the file before this part."""
    rows: int
    columns: dict[str, str]


def _is_remote(source: str) -> bool:
    return "://" in source


def _list_parts(sources: Sequence[str]) -> list[_FilePart]:
    """Return all parts in order; a source that is missing, not parquet or without texts is an error."""
    parts: list[_FilePart] = []
    with ThreadPoolExecutor(_METADATA_THREADS) as pool:
        for files in map(_files, sources):
            found = list(chain.from_iterable(pool.map(lambda file: _parts_of(*file), files)))
            next(_read_part(found[0]), None)  # checks the columns
            parts += found
    return parts


def _read_parts(parts: Iterable[_FilePart]) -> Iterator[Text]:
    """Yield all texts in order; a file without training texts is an error."""
    for (_, path), of_file in groupby(parts, key=attrgetter("storage", "path")):
        found = 0
        for text in chain.from_iterable(map(_read_part, of_file)):
            found += 1
            yield text
        if not found:
            raise reading.no_training_rows(path)


def _read_part(part: _FilePart) -> Iterator[Text]:
    try:
        opened = _storage(part.storage).open_input_file(part.path)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(part.path, error) from error
    with opened:
        needed = reading.needed_columns(part.columns, reading.may_hold_texts)
        rows = reading.parquet_rows(opened, part.path, needed, groups=list(part.groups), before=part.before)
        usable = (reading.training_row(row, part.columns) for row in rows)
        yield from reading.texts_of(row for row in usable if row is not None)


def _files(source: str) -> list[tuple[str, str, dict[str, str]]]:
    """Return the parquet files of a source as storage, path and columns."""
    if not _is_remote(source):
        local = reading.parse_source(source)
        for file in local.files:
            if file.suffix.lower() != _ENDING:
                raise BadInput(f"{file} is not parquet, the only format a cluster reads; convert it first")
        return [("", str(file.resolve()), dict(local.columns)) for file in local.files]
    uri, columns = reading.parse_columns(source)
    storage, path = _resolved(uri)
    try:
        info = storage.get_file_info(path)
        found = [info]
        if info.type == fs.FileType.Directory:
            found = storage.get_file_info(fs.FileSelector(path, recursive=True))
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(uri, error) from error
    paths = [one.path for one in found if one.type == fs.FileType.File and one.path.lower().endswith(_ENDING)]
    paths = [one for one in paths if not any(part.startswith(".") for part in one[len(path) :].split("/"))]
    if not paths:
        raise BadInput(f"{_without_secrets(uri)} holds no parquet files; pass one, or a folder of them")
    return [(uri, one, columns) for one in sorted(paths, key=lambda one: one.split("/"))]


def _parts_of(storage: str, path: str, columns: dict[str, str]) -> list[_FilePart]:
    try:
        with _storage(storage).open_input_file(path) as opened:
            metadata = pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    if not metadata.num_rows:
        raise reading.no_rows(path)
    part = partial(_FilePart, storage=storage, path=path, columns=columns)
    found: list[_FilePart] = []
    first = before = rows = 0
    for number in range(metadata.num_row_groups):
        rows += metadata.row_group(number).num_rows
        if rows >= _PART_ROWS or number + 1 == metadata.num_row_groups:
            found.append(part(groups=tuple(range(first, number + 1)), before=before, rows=rows))
            first, before, rows = number + 1, before + rows, 0
    return found


@cache
def _storage(uri: str) -> Any:
    return _resolved(uri)[0] if uri else fs.LocalFileSystem()


def _resolved(uri: str) -> tuple[Any, str]:
    try:
        storage, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise _unreadable(uri, error) from error
    return storage, path


def _unreadable(place: str, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    where = _without_secrets(place)
    reason = reason.replace(place, where)
    return BadInput(f"{where} can't be read ({reason}); check the address and the right to read it")


def _without_secrets(place: str) -> str:
    """Return a URI without the keys that may be before the host or after a question mark."""
    scheme, separator, rest = place.partition("://")
    return f"{scheme}{separator}{rest.partition('?')[0].rpartition('@')[2]}" if separator else place


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
