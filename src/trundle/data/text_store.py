"""The texts of a source with their hashes, so that they are read, checked and hashed only once.

A large source is read by all cores into a folder of the cache and memory-mapped from there:

    texts.bin    the texts in UTF-8, one after another
    index.npy    for each text: the hash of the text, its number of bytes, and the number of its kind
    store.json   the size of texts.bin and the fingerprint of the hashes and kinds

A small source is read into memory every time.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from io import BytesIO
from itertools import chain, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from threading import Thread
from typing import IO, Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from trundle.cache import cache_entry, file_state, locked
from trundle.data import texts as reading
from trundle.data.texts import Text
from trundle.errors import BadInput, TrundleError, WriteFailed
from trundle.folders import atomic_folder, remove_folder
from trundle.progress import SILENT, Advance, Progress
from trundle.runtime.description import usable_cores

_FORMAT = 1
_LARGE = 8 << 20
"""A source with at least this many bytes is kept in the cache."""
_PIECE_BYTES = 4 << 20
_BATCH = 1024
_TEXTS, _INDEX, _RECORD = "texts.bin", "index.npy", "store.json"
_ENTRY = np.dtype([("key", "<u8", 2), ("length", "<i8"), ("kind", "<i8")])
_KINDS = (None, *reading.KINDS)
_CODES = {kind: code for code, kind in enumerate(_KINDS)}
_WORKER = "from trundle.data.text_store import _work; _work()"

_Index = NDArray[Any]
_Block = tuple[Sequence[bytes], Any]
"""Texts and the numbers of their kinds."""


class TextStore:
    """The texts of one source, in order."""

    def __init__(self, data: bytes | mmap, index: _Index) -> None:
        self._data, self._index = data, index
        self._borders = np.concatenate([[0], np.cumsum(index["length"])])
        content = index["key"].tobytes() + index["kind"].tobytes()
        self.fingerprint = blake2b(content, digest_size=16).hexdigest()

    @classmethod
    def of(cls, texts: Iterable[Text]) -> TextStore:
        """Hold texts in memory."""
        stream = BytesIO()
        index = _write(_blocks(texts), stream)
        return cls(stream.getvalue(), index)

    def __len__(self) -> int:
        return len(self._index)

    def facts(self, source: str) -> Mapping[str, Any]:
        """Return what a lineage records about the source."""
        return {"source": source, "texts": len(self), "fingerprint": self.fingerprint}

    def keys(self, *, kinds: bool = False) -> NDArray[np.uint64]:
        """Return two numbers per text that are equal for equal texts, or for equal texts of the same kind."""
        keys: NDArray[np.uint64] = self._index["key"]
        return keys + self._index["kind"][:, None].astype(np.uint64) if kinds else keys

    def texts(self, positions: NDArray[np.int64]) -> Iterator[Text]:
        """Yield the texts at these positions."""
        for first in range(0, len(positions), _BATCH):
            chosen = positions[first : first + _BATCH]
            spans = zip(self._borders[chosen].tolist(), self._borders[chosen + 1].tolist(), strict=True)
            texts = [str(self._data[start:end], "utf-8", "surrogatepass") for start, end in spans]
            yield from reading._make_texts(
                texts, map(_KINDS.__getitem__, self._index["kind"][chosen].tolist())
            )


def _is_stored(name: str) -> bool:
    return _cached(reading.parse_source(name)).is_dir()


def _read_store(name: str, progress: Progress = SILENT) -> TextStore:
    """Open the texts of a source; those of a large source are first written to the cache."""
    source = reading.parse_source(name)
    if sum(file.stat().st_size for file in source.files) < _LARGE:
        stream, pieces = BytesIO(), list(_pieces(source))
        index = _joined(pieces, (_read_piece(piece, stream) for piece in pieces))
        return TextStore(stream.getvalue(), index)
    entry = _cached(source)
    if (store := _open(entry)) is not None:
        return store
    try:
        with locked(entry, if_taken=None):
            if (store := _open(entry)) is None:
                remove_folder(entry)
                with atomic_folder(entry) as folder:
                    _build(folder, source, progress)
                    if _cached(source) != entry:
                        raise BadInput(f"{name} changed while it was read; run the command again")
                store = _open(entry)
    except (OSError, WriteFailed) as error:
        progress.say(f"the texts of {name} can't be cached ({error}), so the next command reads them again")
        with TemporaryDirectory(prefix="trundle-texts-", ignore_cleanup_errors=True) as own:
            _build(Path(own), source, progress)
            store = _open(Path(own))  # files that are mapped outlive their folder
    assert store is not None
    return store


def _cached(source: reading._Source) -> Path:
    states = [file_state(str(file.resolve())) for file in source.files]
    return cache_entry("texts", _FORMAT, states, list(source.columns.items()))


def _open(folder: Path) -> TextStore | None:
    """Open a folder; None if it does not exist or is damaged."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        index = np.load(folder / _INDEX, mmap_mode="r")
        with (folder / _TEXTS).open("rb") as file:
            data = mmap(file.fileno(), 0, access=ACCESS_READ) if record["bytes"] else b""
        store = TextStore(data, index)
        return store if record == {"bytes": len(data), "fingerprint": store.fingerprint} else None
    except (OSError, ValueError, LookupError, EOFError):
        return None


def _build(folder: Path, source: reading._Source, progress: Progress) -> None:
    pieces = list(_pieces(source))
    workers = min(len(pieces), usable_cores())
    total = sum(piece.megabytes for piece in pieces)
    with (folder / _TEXTS).open("wb") as stream, progress.task("reading megabytes of text", total) as advance:
        alone = (_read_piece(piece, stream) for piece in pieces)
        together = _read_in_processes(pieces, workers, folder, stream)
        index = _joined(pieces, together if workers > 1 else alone, advance)
        size = stream.tell()
    np.save(folder / _INDEX, index)
    record = {"bytes": size, "fingerprint": TextStore(b"", index).fingerprint}
    (folder / _RECORD).write_text(json.dumps(record), encoding="utf-8")


class _Piece(NamedTuple):
    """A file, or some row groups of a parquet file that follow `before` other rows."""

    file: Path
    columns: Mapping[str, str]
    megabytes: int
    groups: range | None = None
    before: int = 0

    def rows(self) -> Iterator[reading._DataRow]:
        if self.groups is None:
            return reading._read_rows(
                reading._Source(files=(self.file,), columns=self.columns), reading.may_hold_texts
            )
        needed = reading.needed_columns(self.columns, reading.may_hold_texts)
        rows = reading.parquet_rows(self.file, str(self.file), needed, groups=self.groups, before=self.before)
        return (row for each in rows if (row := reading.training_row(each, self.columns)) is not None)


def _pieces(source: reading._Source) -> Iterator[_Piece]:
    for file in source.files:
        size, rows = file.stat().st_size, []
        if file.suffix.lower() == ".parquet":
            try:
                metadata = pq.read_metadata(file)
                rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
            except (pa.ArrowException, OSError):
                pass  # the reader of the complete file explains what is wrong
        if not sum(rows):
            yield _Piece(file, source.columns, 1 + size // 2**20)
            continue
        step = max(1, len(rows) * _PIECE_BYTES // size)
        for first in range(0, len(rows), step):
            groups, megabytes = range(len(rows))[first : first + step], 1 + size * step // len(rows) // 2**20
            yield _Piece(file, source.columns, megabytes, groups, sum(rows[:first]))


def _joined(pieces: Sequence[_Piece], read: Iterable[_Index], advance: Advance = lambda _: None) -> _Index:
    parts: list[_Index] = []
    for piece, part in zip(pieces, read, strict=True):
        if not (len(part) or piece.before):
            next(piece._replace(groups=None).rows(), None)  # raises the error of a file without rows to read
        parts.append(part)
        advance(piece.megabytes)
    return np.concatenate(parts)


def _read_piece(piece: _Piece, stream: IO[bytes]) -> _Index:
    """Write the texts of a piece to a stream, and return their index."""
    start = stream.tell()
    if piece.groups is not None:
        try:
            return _write(_whole_columns(piece), stream)
        except (BadInput, LookupError, OSError, TypeError, ValueError, pa.ArrowException):
            stream.seek(start)
            stream.truncate()
    return _write(_blocks(reading.texts_of(piece.rows())), stream)


def _write(blocks: Iterable[_Block], stream: IO[bytes]) -> _Index:
    parts = [np.empty(0, _ENTRY)]
    for texts, kinds in blocks:
        part = np.empty(len(texts), _ENTRY)
        hashes = b"".join([blake2b(text, digest_size=16).digest() for text in texts])
        part["key"] = np.frombuffer(hashes, "<u8").reshape(-1, 2)
        part["length"] = [*map(len, texts)]
        part["kind"] = kinds
        stream.write(b"".join(texts))
        parts.append(part)
    return np.concatenate(parts)


def _blocks(texts: Iterable[Text]) -> Iterator[_Block]:
    remaining = iter(texts)
    while some := list(islice(remaining, _BATCH)):
        raw = [text.text.encode("utf-8", "surrogatepass") for text in some]
        yield raw, [_CODES[text.kind] for text in some]


def _whole_columns(piece: _Piece) -> Iterator[_Block]:
    """The texts of a piece, by column. After any error the row reader must read it, to explain the error."""
    needed = reading.needed_columns(piece.columns, reading.may_hold_texts)
    with pq.ParquetFile(piece.file, buffer_size=reading.BUFFER_BYTES, pre_buffer=False) as file:
        names = reading._check_unique(piece.file, tuple(file.schema_arrow.names))
        used = [name for name in names if needed(name)]
        column_of = piece.columns or {name: name for name in names}
        kinds = reading._text_columns(reading._DataRow(place="", columns=tuple(column_of), values={}))
        types = {str(file.schema_arrow.field(name).type) for name in used}
        if not types <= {"string", "large_string"} or any(map(reading._NEGATIVE.fullmatch, kinds)):
            raise ValueError("only columns of texts that can't be empty are read without a look at the rows")
        implied = np.array([_CODES[kind] for kind in kinds.values()])
        for batch in file.iter_batches(_BATCH, row_groups=piece.groups, columns=used, use_threads=False):
            if reading._SPLIT in used:
                batch = batch.filter(pc.equal(batch.column(reading._SPLIT), reading._TRAIN))
            texts = [batch.column(column_of[role]).cast(pa.large_binary()).to_pylist() for role in kinds]
            if not all(map(str.strip, map(bytes.decode, chain.from_iterable(texts)))):
                raise ValueError("a text is empty")
            codes = np.tile(implied, (batch.num_rows, 1))
            if "kind" in column_of:
                column = batch.column(column_of["kind"]).fill_null("").dictionary_encode()
                stated = np.array([_CODES[kind or None] for kind in column.dictionary.to_pylist()], np.int64)
                codes = np.where(stated[column.indices][:, None], stated[column.indices][:, None], codes)
            by_row = texts[0] if len(texts) == 1 else [*chain.from_iterable(zip(*texts, strict=True))]
            yield by_row, codes.ravel()


def _read_in_processes(
    pieces: Sequence[_Piece], workers: int, folder: Path, stream: IO[bytes]
) -> Iterator[_Index]:
    """Yield the index of each piece in order, and write its texts; the first error in order is raised.

    The workers are commands: fork is not safe beside CUDA and threads, and multiprocessing's other ways to
    start a process import the caller's main module again.
    """
    work: list[list[int]] = [[] for _ in range(workers)]
    for number in sorted(range(len(pieces)), key=lambda number: -pieces[number].megabytes):
        min(work, key=lambda numbers: sum(pieces[each].megabytes for each in numbers)).append(number)
    command = [sys.executable, "-P", "-c", _WORKER]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    replies: dict[int, Any] = {}
    with ExitStack() as stack:
        for numbers in work:
            worker = Popen(command, stdin=PIPE, stdout=PIPE, env=environment, process_group=0)
            stack.enter_context(worker)
            stack.callback(worker.kill)
            tasks = cast("IO[bytes]", worker.stdin)  # stays open: a worker ends with its parent
            pickle.dump([(pieces[number], folder / f"{number}") for number in sorted(numbers)], tasks)
            tasks.flush()
            replies |= dict.fromkeys(numbers, worker.stdout)
        for number in range(len(pieces)):
            try:
                error = pickle.load(replies[number])
            except EOFError:
                error = TrundleError("a process that reads texts was killed; free some memory and run again")
            if error is not None:
                raise error
            with (folder / f"{number}").open("rb") as part:
                shutil.copyfileobj(part, stream, 2**20)
            yield np.load(folder / f"{number}.npy")
            for done in (folder / f"{number}", folder / f"{number}.npy"):
                done.unlink()


def _work() -> None:
    """Read the pieces that standard input names; each reply is an error or None."""
    work = pickle.load(sys.stdin.buffer)
    # Without a buffer, which the interpreter could not lock at its end while this thread waits for it.
    Thread(target=lambda: os._exit(1) if not os.read(0, 1) else None, daemon=True).start()
    for piece, path in work:
        error = None
        try:
            with path.open("wb") as part:
                np.save(f"{path}.npy", _read_piece(piece, part))
        except Exception as raised:
            error = raised
        pickle.dump(error, sys.stdout.buffer)
        sys.stdout.buffer.flush()
