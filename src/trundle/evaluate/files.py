"""Task files: which columns they need, and which rows belong to a split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from trundle.errors import BadInput

WHOLE = "all"


def read_columns(path: Path, needed: Sequence[str], optional: Sequence[str] = ()) -> pa.Table:
    """The named columns of a parquet file; optional ones where they are there."""
    try:
        present = pq.read_schema(path).names
        missing = [column for column in needed if column not in present]
        if missing:
            raise BadInput(
                f"{path} has no column {', '.join(missing)} (it has {', '.join(present)}); rename its columns"
            )
        return pq.read_table(path, columns=[*needed, *(column for column in optional if column in present)])
    except FileNotFoundError as error:
        raise BadInput(f"{path} is not there; a task of this kind needs it") from error
    except (pa.ArrowInvalid, OSError) as error:
        raise BadInput(f"{path} is not a whole parquet file ({error}); write it again") from error


def choose_split(table: pa.Table, split: str, path: Path) -> tuple[pa.Table, str, str]:
    """The rows of a split, the split they are of, and a note where that is not the one asked for.

    A file without a split column is used whole. A file without a test part is judged on its dev part.
    """
    if "split" not in table.column_names:
        return table, WHOLE, ""
    there = sorted(str(name) for name in pc.unique(table["split"]).to_pylist())
    used = "dev" if split == "test" and "test" not in there and "dev" in there else split
    rows = table.filter(pc.equal(table["split"], used))
    if rows.num_rows == 0:
        raise BadInput(
            f"{path} has no rows of the split {split!r}; it has {', '.join(there) or 'none at all'}"
        )
    return rows, used, "" if used == split else f"no {split} split, {used} is used"


def texts_of(table: pa.Table, column: str, path: Path) -> list[str]:
    """A column as strings; an empty cell is refused by its row."""
    values = table[column].cast(pa.string()).to_pylist()
    for row, value in enumerate(values):
        if value is None:
            raise BadInput(
                f"{path} has no {column} in row {row} of the split; fill it in or leave the row out"
            )
    return [str(value) for value in values]


def numbers_of(table: pa.Table, column: str, path: Path) -> list[float]:
    """A column as finite numbers."""
    try:
        values = table[column].cast(pa.float64())
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path} has a {column} that is not a number ({error}); mend the column") from error
    if not pc.all(pc.is_finite(values.fill_null(float("nan")))).as_py():
        raise BadInput(
            f"{path} has a {column} that is empty or not finite; mend those rows or leave them out"
        )
    return [float(value) for value in values.to_pylist()]
