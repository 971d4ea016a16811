"""Read rows from data files as a stream, and texts without labels from them.

A source is written `PATH` or `PATH::role=column,role=column`. PATH is a file or a folder of files:

    .txt              one text per line, in a column called `text`; blank lines are skipped
    .jsonl, .ndjson   one JSON object per line; a bare JSON string is a row with one column, `text`
    .csv, .tsv        a header line, then rows; quoted fields may contain line breaks
    .parquet          read a few rows at a time
    .gz               after any of the above except .parquet

`role=column` reads `column` as if its name were `role` and hides every column that is not named. Text is
UTF-8, with or without a byte order mark. Of a table with a column `split`, only the split `train` is read.

Columns of texts are found by name:

    query, question, anchor                              queries
    positive, passage, document, context, answer,        documents
      response, negative, negatives, negative_1, ...
    definition                                           definitions
    sentence1, sentence2                                 texts of no special kind
    text, sentence, content, body, abstract,             the first one found, if the table has none of the
      description, title                                   above except a query; a document if it has a query

A column `kind` (query, document, definition, or null) overrides what the names imply.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any, Literal, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from trundle.errors import BadInput

_BATCH_ROWS = 64  # texts may be megabytes long
BUFFER_BYTES = 1 << 20
_CALIBRATED_ON = (40, 2000)  # the fewest and the most texts
_LONGEST_FIELD = 2**31 - 1  # the largest limit the csv module accepts on every platform
_BYTE_ORDER_MARK = "\ufeff"

_SPLIT, _TRAIN = "split", "train"

_Wanted = Callable[[str], bool]
Kind = Literal["query", "document", "definition"]

KINDS: tuple[Kind, ...] = get_args(Kind)

_IMPLIED: dict[str, Kind | None] = {
    **dict.fromkeys(("query", "question", "anchor"), "query"),
    **dict.fromkeys(("positive", "passage", "document", "context", "answer", "response"), "document"),
    "definition": "definition",
    "sentence1": None,
    "sentence2": None,
}
_PLAIN = ("text", "sentence", "content", "body", "abstract", "description", "title")

_NEGATIVE = re.compile(r"negative(s|_(?P<number>[0-9]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class _DataRow:
    place: str
    columns: tuple[str, ...]
    """All columns of its table."""
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Source:
    files: tuple[Path, ...]
    columns: Mapping[str, str]
    """The column of each role."""


def parse_source(text: str) -> _Source:
    """Parse a source and check that its files exist and have a known suffix."""
    path, columns = parse_columns(text)
    if "://" in path:
        raise BadInput(f"{path} is an address; download it, and pass the file or folder")
    return _Source(files=_files(Path(path).expanduser()), columns=columns)


def parse_columns(text: str) -> tuple[str, dict[str, str]]:
    """Split a source into its path and its columns by role."""
    path, separator, named = text.rpartition("::") if "::" in text else (text, "", "")
    columns: dict[str, str] = {}
    for part in named.split(",") if separator else ():
        role, equals, column = (piece.strip() for piece in part.partition("="))
        if not (role and equals and column) or role in columns:
            raise BadInput(f"{text!r} is not a data source; write PATH or PATH::role=column,role=column")
        columns[role] = column
    if not path:
        raise BadInput(f"{text!r} names no file; write PATH or PATH::role=column,role=column")
    return path, columns


def _read_rows(source: _Source, wanted: _Wanted = lambda _column: True) -> Iterator[_DataRow]:
    """Stream the rows of a source; columns that it does not name and that are not `wanted` may be skipped."""
    needed = needed_columns(source.columns, wanted)
    for file in source.files:
        row, used = None, 0
        for row in _READERS[_suffix(file)](file, needed):
            if (usable := training_row(row, source.columns)) is not None:
                used += 1
                yield usable
        if row is None:
            raise no_rows(file)
        if not used:
            raise no_training_rows(file)


def needed_columns(columns: Mapping[str, str], wanted: _Wanted) -> _Wanted:
    """Return which columns must be read: those named, or else those wanted, and the split."""
    named = frozenset(columns.values())
    return lambda column: column == _SPLIT or (column in named if named else wanted(column))


def training_row(row: _DataRow, columns: Mapping[str, str]) -> _DataRow | None:
    """Return the row with its columns by role, or None if it is not in the training split."""
    if row.values.get(_SPLIT, _TRAIN) != _TRAIN:
        return None
    if not columns:
        return row
    for column in columns.values():
        if column not in row.columns:
            raise BadInput(f"{row.place} has no column {column!r}; name one it has: {', '.join(row.columns)}")
    values = {role: row.values[column] for role, column in columns.items()}
    return _DataRow(place=row.place, columns=tuple(columns), values=values)


def no_rows(file: object) -> BadInput:
    """Return the error for an empty file."""
    return BadInput(f"{file} has no rows; remove it from the data, or fill it")


def no_training_rows(file: object) -> BadInput:
    """Return the error for a file without rows of the training split."""
    return BadInput(f"{file} has no rows of the split {_TRAIN!r}; remove it from the data, or fill it")


def _suffix(path: Path) -> str:
    """The suffix without `.gz`; empty for zipped parquet, which can't be streamed."""
    plain = path.with_suffix("") if path.suffix.lower() == ".gz" else path
    suffix = plain.suffix.lower()
    return "" if plain != path and suffix == ".parquet" else suffix


def _files(path: Path) -> tuple[Path, ...]:
    known = f"{', '.join(_READERS)} (or .gz of the text formats)"
    if (path / "modules.json").is_file():
        raise BadInput(f"{path} is a model, not texts; pass a file that ends in {known}, or a folder of them")
    if path.is_dir():
        below = sorted((file.relative_to(path).parts, file) for file in path.rglob("*"))
        visible = (file for parts, file in below if not any(part.startswith(".") for part in parts))
        files = tuple(file for file in visible if _suffix(file) in _READERS and file.is_file())
        if not files:
            raise BadInput(f"{path} contains no data files; add files that end in {known}")
        return files
    if not path.exists():
        raise BadInput(f"{path} does not exist; pass a file that ends in {known}, or a folder of them")
    if _suffix(path) not in _READERS:
        raise BadInput(f"{path} is not a kind of file trundle reads; pass one that ends in {known}")
    return (path,)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a text file with their line ends; only a line feed ends a line."""
    zipped = path.suffix.lower() == ".gz"
    try:
        with cast("IO[bytes]", gzip.open(path, "rb")) if zipped else path.open("rb") as stream:
            for number, raw in enumerate(stream, 1):
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    what = f"{path}:{number} is not UTF-8 text (byte 0x{raw[error.start]:02x})"
                    raise BadInput(f"{what}; save the file as UTF-8") from error
                yield line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInput(f"{path} is damaged or not gzip ({error}); create or download it again") from error
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror or error}); check the file") from error


def _read_text(path: Path, _wanted: _Wanted) -> Iterator[_DataRow]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            text = line.removesuffix("\n").removesuffix("\r")
            yield _DataRow(place=f"{path}:{number}", columns=("text",), values={"text": text})


def _read_json_lines(path: Path, _wanted: _Wanted) -> Iterator[_DataRow]:
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
        yield _DataRow(place=place, columns=tuple(value), values=value)


def _read_separated(path: Path, _wanted: _Wanted, separator: str) -> Iterator[_DataRow]:
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
                columns = _check_unique(path, tuple(fields))
                continue
            if len(fields) != len(columns):
                what = f"{place} has {len(fields)} fields but the header has {len(columns)}"
                raise BadInput(f"{what}; quote a field that contains a separator or a line break")
            yield _DataRow(place=place, columns=columns, values=dict(zip(columns, fields, strict=True)))
    except csv.Error as error:
        raise BadInput(
            f"{path}:{start} is not a row ({error}); double the quotes in quoted fields"
        ) from error


def _read_parquet(path: Path, wanted: _Wanted) -> Iterator[_DataRow]:
    # An empty file has no rows, but pyarrow would call it damaged.
    return parquet_rows(path, str(path), wanted) if path.stat().st_size else iter(())


def parquet_rows(
    opened: Any, name: str, wanted: _Wanted, *, groups: Sequence[int] | None = None, before: int = 0
) -> Iterator[_DataRow]:
    """Stream the rows of a parquet file, or of some of its row `groups` that follow `before` other rows."""
    number = before
    try:
        with pq.ParquetFile(opened, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
            columns = _check_unique(name, tuple(file.schema_arrow.names))
            used = [column for column in columns if wanted(column)]
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=groups, columns=used, use_threads=False):
                for values in _values(batch):
                    number += 1
                    yield _DataRow(place=f"{name} row {number}", columns=columns, values=values)
    except UnicodeDecodeError as error:
        what = f"{name} row {number + 1} is not UTF-8 text ({error.reason})"
        raise BadInput(f"{what}; save the file as UTF-8") from error
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name} is damaged or not parquet ({reason}); create or download it again") from error


def _values(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch. A row that can't be decoded raises only after the good rows before it."""
    try:
        yield from batch.to_pylist()
    except UnicodeDecodeError:
        for index in range(batch.num_rows):
            yield from batch.slice(index, 1).to_pylist()


def _check_unique(path: object, columns: tuple[str, ...]) -> tuple[str, ...]:
    for column in columns:
        if columns.count(column) > 1:
            raise BadInput(f"{path} has two columns called {column!r}; rename one of them")
    return columns


_READERS: dict[str, Callable[[Path, _Wanted], Iterator[_DataRow]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": partial(_read_separated, separator=","),
    ".tsv": partial(_read_separated, separator="\t"),
    ".parquet": _read_parquet,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One text and the role whose prompt it gets; no kind means no prompt."""

    text: str
    kind: Kind | None = None


def _make_texts(texts: Sequence[str], kinds: Iterable[Kind | None]) -> list[Text]:
    """Construct many texts; calling the class, whose fields are frozen, takes several times as long."""
    fields: Any = Text
    made: list[Text] = list(map(object.__new__, repeat(fields, len(texts))))
    deque(map(fields.text.__set__, made, texts), maxlen=0)
    deque(map(fields.kind.__set__, made, kinds), maxlen=0)
    return made


def read_texts(sources: str | Sequence[str]) -> Iterator[Text]:
    """Stream all texts of one or several sources in order; a missing source is rejected at once."""
    parsed = [parse_source(source) for source in ([sources] if isinstance(sources, str) else sources)]
    return texts_of(row for source in parsed for row in _read_rows(source, may_hold_texts))


def calibration_texts(sources: Sequence[str]) -> list[str]:
    """Return the first texts of each source, 2,000 in total: calibration can't use more."""
    share = _CALIBRATED_ON[1] // max(1, len(sources))
    return enough_texts(text.text for source in sources for text in islice(read_texts(source), share))


def enough_texts(texts: Iterable[str]) -> list[str]:
    """Return the different texts; rejects too few to calibrate on."""
    distinct, fewest = list(dict.fromkeys(texts)), _CALIBRATED_ON[0]
    if len(distinct) < fewest:
        raise BadInput(f"{len(distinct)} different texts are too few; pass {fewest} or more with --data")
    return distinct


def checked_text(value: Any, column: str, place: str) -> str:
    """Return the value if it is a text that a tokenizer accepts; otherwise raise an error with its place."""
    if not isinstance(value, str) or not value.strip():
        empty = value is None or isinstance(value, str)
        what = "has no text" if empty else f"holds {type(value).__name__} instead of text"
        raise BadInput(f"{place} {what} in column {column!r}; fill it in or delete the row")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        what = f"{place} holds an unpaired surrogate, \\u{ord(value[error.start]):04x}, in column {column!r}"
        fix = "clean it with text.encode('utf-8', 'replace').decode('utf-8')"
        raise BadInput(f"{what}; {fix}") from error
    return value


def _negative_columns(columns: Sequence[str]) -> list[str]:
    matches = [match for match in map(_NEGATIVE.fullmatch, columns) if match]
    return [match.string for match in sorted(matches, key=lambda match: int(match["number"] or -1))]


def _checked_negatives(value: Any, column: str, place: str) -> tuple[str, ...]:
    if value is None or value == "":
        return ()
    items = value if isinstance(value, list) else [value]
    return tuple(checked_text(item, column, place) for item in items)


def texts_of(rows: Iterable[_DataRow]) -> Iterator[Text]:
    """Yield the texts of rows that may come from several tables."""
    kinds_of: dict[tuple[str, ...], dict[str, Kind | None]] = {}
    for row in rows:
        if row.columns not in kinds_of:
            kinds_of[row.columns] = _text_columns(row)
        yield from _row_texts(row, kinds_of[row.columns])


def may_hold_texts(column: str) -> bool:
    """Return whether a column of this name is read."""
    return column in (*_IMPLIED, *_PLAIN, "kind") or _NEGATIVE.fullmatch(column) is not None


def _text_columns(row: _DataRow) -> dict[str, Kind | None]:
    found = {column: kind for column, kind in _IMPLIED.items() if column in row.columns}
    found.update(dict.fromkeys(_negative_columns(row.columns), "document"))
    if all(kind == "query" for kind in found.values()):
        plain = next((column for column in _PLAIN if column in row.columns), None)
        found.update({plain: "document" if found else None} if plain else {})
    if not found:
        what = f"has no column known to hold texts (columns: {', '.join(row.columns) or 'none'})"
        raise BadInput(f"{row.place} {what}; name the column, as in FILE::text=COLUMN")
    return found


def _row_texts(row: _DataRow, kinds: dict[str, Kind | None]) -> Iterator[Text]:
    stated = row.values.get("kind") or None
    if stated is not None and stated not in KINDS:
        fix = f"write one of {', '.join(KINDS)}, or name only the text column, as in FILE::text=COLUMN"
        raise BadInput(f"{row.place} has the kind {stated!r}; {fix}")
    for column, implied in kinds.items():
        value = row.values[column]
        if _NEGATIVE.fullmatch(column):
            texts = _checked_negatives(value, column, row.place)
        else:
            texts = (checked_text(value, column, row.place),)
        yield from (Text(text=text, kind=stated or implied) for text in texts)
