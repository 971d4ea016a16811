"""Rows out of files, one at a time, each with the place it came from.

A source is written `PATH` or `PATH::role=column,role=column`. PATH is a file or a folder of files:

    .txt              one text a line, in a column called `text`; blank lines are skipped
    .jsonl, .ndjson   one JSON object a line; a bare JSON string is a row with one column, `text`
    .csv, .tsv        a header line, then rows; quoted fields may hold line breaks
    .parquet          read a few rows at a time
    .gz               after any of the above but .parquet

`role=column` reads `column` as if its name were `role`, and hides every column that is not named. Nothing is
ever read whole, so a file may be larger than memory. Text is UTF-8, with or without a byte order mark.

A table with a column called `split` says which of its rows are for measuring: only those of the split `train` are read.

What this is not: it does not know what a text or an example is; see `texts` and `tuples`.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from trundle.errors import BadInput

_BATCH_ROWS = 64  # texts may be megabytes long
BUFFER_BYTES = 1 << 20
_LONGEST_FIELD = 2**31 - 1  # the largest limit the csv module takes on every platform
_BYTE_ORDER_MARK = "\ufeff"

_SPLIT, _TRAIN = "split", "train"

_Wanted = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One row: where it stands, the columns its table has, and the values that were read."""

    place: str
    columns: tuple[str, ...]
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A source whose files are known to be there; `columns` maps each role to the column that plays it."""

    files: tuple[Path, ...]
    columns: Mapping[str, str]


def parse_source(text: str) -> _Source:
    """Understand one source, and refuse it now if its files are not there or not of a known kind."""
    path, columns = parse_columns(text)
    return _Source(files=_files(Path(path)), columns=columns)


def parse_columns(text: str) -> tuple[str, dict[str, str]]:
    """The place a source names, and its columns by role."""
    path, separator, named = text.rpartition("::")
    if not separator:
        path, named = text, ""
    columns: dict[str, str] = {}
    for part in named.split(",") if separator else ():
        role, equals, column = (piece.strip() for piece in part.partition("="))
        if not (role and equals and column) or role in columns:
            raise BadInput(f"{text!r} is not a data source; write PATH or PATH::role=column,role=column")
        columns[role] = column
    if not path:
        raise BadInput(f"{text!r} names no file; write PATH or PATH::role=column,role=column")
    return path, columns


def _parse_sources(sources: str | Sequence[str]) -> list[_Source]:
    """Understand one source or several."""
    return [parse_source(source) for source in ([sources] if isinstance(sources, str) else sources)]


def _read_rows(source: _Source, wanted: _Wanted = lambda _column: True) -> Iterator[_Row]:
    """Stream the rows of a source.

    `wanted` says which columns the caller could use: where the format lets others be left unread, they are.
    Columns named in the source take its place.
    """
    for file in source.files:
        row, used = None, 0
        for row in _READERS[_suffix(file)](file, needed_columns(source.columns, wanted)):
            if (usable := training_row(row, source.columns)) is not None:
                used += 1
                yield usable
        if row is None:
            raise no_rows(file)
        if not used:
            raise no_training_rows(file)


def needed_columns(columns: Mapping[str, str], wanted: _Wanted) -> _Wanted:
    """Which columns must be read: those named, or else those wanted, and what tells the split."""
    named = frozenset(columns.values())
    return lambda column: column == _SPLIT or (column in named if named else wanted(column))


def training_row(row: _Row, columns: Mapping[str, str]) -> _Row | None:
    """The row with its columns by role, or None if it is not to be learned from."""
    if row.values.get(_SPLIT, _TRAIN) != _TRAIN:
        return None
    return _renamed(row, columns) if columns else row


def no_rows(file: object) -> BadInput:
    """What is said of an empty file."""
    return BadInput(f"{file} has no rows; leave it out, or fill it")


def no_training_rows(file: object) -> BadInput:
    """What is said of a file of which every row is for measuring."""
    return BadInput(f"{file} has no rows of the split {_TRAIN!r}, and the others only measure; leave it out")


def _renamed(row: _Row, columns: Mapping[str, str]) -> _Row:
    for column in columns.values():
        if column not in row.columns:
            raise BadInput(f"{row.place} has no column {column!r}; name one it has: {', '.join(row.columns)}")
    return _Row(
        place=row.place,
        columns=tuple(columns),
        values={role: row.values[column] for role, column in columns.items()},
    )


def _suffix(path: Path) -> str:
    """The part of a file's name that says how to read it, without the `.gz`."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    suffix = plain.suffix.lower()
    return "" if plain != path and suffix == ".parquet" else suffix


def _files(path: Path) -> tuple[Path, ...]:
    """The file itself, or all known files below a folder in an order that is the same everywhere."""
    if path.is_dir():
        below = sorted(
            (file.relative_to(path).parts, file) for file in path.rglob("*") if _suffix(file) in _READERS
        )
        files = tuple(
            file
            for parts, file in below
            if file.is_file() and not any(part.startswith(".") for part in parts)
        )
        if not files:
            raise BadInput(f"{path} holds no data files; put some there that end in {_known()}")
        return files
    if not path.exists():
        raise BadInput(f"{path} does not exist; give a file that ends in {_known()}, or a folder of them")
    if _suffix(path) not in _READERS:
        raise BadInput(f"{path} is not a kind of file trundle reads; give one that ends in {_known()}")
    return (path,)


def _known() -> str:
    return f"{', '.join(_READERS)} (or .gz of the text formats)"


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file with their line ends; only a line feed ends a line."""
    zipped = path.suffix.lower() == ".gz"
    try:
        with cast("IO[bytes]", gzip.open(path, "rb")) if zipped else path.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    byte = f"byte 0x{raw[error.start]:02x}"
                    raise BadInput(
                        f"{path}:{number} is not UTF-8 text ({byte}); save the file as UTF-8"
                    ) from error
                yield line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path} is not whole gzip data ({error}); make or fetch it again") from error
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror or error}); check the file") from error


def _read_text(path: Path, _wanted: _Wanted) -> Iterator[_Row]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            text = line.removesuffix("\n").removesuffix("\r")
            yield _Row(place=f"{path}:{number}", columns=("text",), values={"text": text})


def _read_json_lines(path: Path, _wanted: _Wanted) -> Iterator[_Row]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error
            raise BadInput(f"{place} is not JSON ({reason}); write one JSON object on each line") from error
        if isinstance(value, str):
            value = {"text": value}
        if not isinstance(value, dict):
            raise BadInput(f'{place} is not a JSON object; write a line such as {{"text": "..."}}')
        yield _Row(place=place, columns=tuple(value), values=value)


def _read_separated(path: Path, separator: str) -> Iterator[_Row]:
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.reader(_lines(path), delimiter=separator, strict=True)
    columns: tuple[str, ...] = ()
    start = 1
    try:
        for fields in reader:
            place, start = f"{path}:{start}", reader.line_num + 1
            if not fields:
                continue
            if not columns:
                columns = _without_repeats(path, tuple(fields))
                continue
            if len(fields) != len(columns):
                raise BadInput(
                    f"{place} has {len(fields)} fields where the header has {len(columns)}; "
                    "quote a field that holds a separator or a line break"
                )
            yield _Row(place=place, columns=columns, values=dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise BadInput(
            f"{path}:{start} is not a row ({error}); double the quotes inside a quoted field"
        ) from error


def _read_csv(path: Path, _wanted: _Wanted) -> Iterator[_Row]:
    return _read_separated(path, ",")


def _read_tsv(path: Path, _wanted: _Wanted) -> Iterator[_Row]:
    return _read_separated(path, "\t")


def _read_parquet(path: Path, wanted: _Wanted) -> Iterator[_Row]:
    try:
        empty = path.stat().st_size == 0
    except OSError as error:
        raise _not_parquet(path, error) from error
    if not empty:
        yield from parquet_rows(path, str(path), wanted)


def parquet_rows(
    opened: Any, name: str, wanted: _Wanted, *, groups: Sequence[int] | None = None, before: int = 0
) -> Iterator[_Row]:
    """The rows of a parquet file, or of some of its row groups, `before` which so many others stand."""
    number = before
    try:
        with pq.ParquetFile(opened, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            columns = _without_repeats(name, tuple(file.schema_arrow.names))
            used = [column for column in columns if wanted(column)]
            batches = file.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=groups, columns=used, use_threads=False
            )
            for batch in batches:
                for values in _values(batch):
                    number += 1
                    yield _Row(place=f"{name} row {number}", columns=columns, values=values)
    except UnicodeDecodeError as error:
        place = f"{name} row {number + 1}"
        raise BadInput(
            f"{place} is not UTF-8 text ({error.reason}); write the file again from clean text"
        ) from error
    except (pa.ArrowException, OSError) as error:
        raise _not_parquet(name, error) from error


def _not_parquet(name: object, error: Exception) -> BadInput:
    reason = str(error).splitlines()[0]
    return BadInput(f"{name} is damaged or not parquet ({reason}); make or fetch it again")


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch; one that can't be decoded is met only after the good ones before it."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            yield from batch.slice(index, 1).to_pylist()


def _without_repeats(path: object, columns: tuple[str, ...]) -> tuple[str, ...]:
    for column in columns:
        if columns.count(column) > 1:
            raise BadInput(f"{path} has two columns called {column!r}; rename one of them")
    return columns


_READERS: dict[str, Callable[[Path, _Wanted], Iterator[_Row]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".parquet": _read_parquet,
}
