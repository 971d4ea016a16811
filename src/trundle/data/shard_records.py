"""Shards that are finished before the manifest names them: whoever wrote one leaves a small record beside it.

A manifest lists shards in order and is written by one process. Workers of a cluster finish shards in any order and may
die, as may the process they work for; their records are what the next run goes on from.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from trundle.artifact import write_whole
from trundle.data.shards import SCRATCH, Manifest, Shard

ENDING = ".shard.json"


class Record(BaseModel):
    """One finished shard, and the width of its vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int
    shard: Shard


def write_record(folder: Path, number: int, record: Record) -> None:
    """Vouch for a shard whose files are there."""
    write_whole(_place(folder, number), record.model_dump_json() + "\n")


def read_record(folder: Path, number: int) -> Record | None:
    """What is known of a shard; a damaged record counts for nothing."""
    try:
        return Record.model_validate_json(_place(folder, number).read_bytes())
    except (OSError, ValidationError):
        return None


def recorded(folder: Path) -> list[int]:
    """The numbers of all shards that have a record."""
    return sorted(int(path.name.removesuffix(ENDING)[1:]) for path in folder.glob(f".*{ENDING}"))


def adopted(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with the recorded shards that follow on its own."""
    shards, width = list(manifest.shards), manifest.width
    if not manifest.complete:
        while (record := read_record(folder, len(shards))) is not None and width in (0, record.width):
            shards.append(record.shard)
            width = record.width
    return manifest.model_copy(
        update={
            "shards": tuple(shards),
            "width": width,
            "normalised": bool(shards) and all(shard.normalised for shard in shards),
        }
    )


def drop_records(folder: Path) -> None:
    """Tidy up behind a finished manifest: records, and what kills have left half written."""
    for pattern in (f".*{ENDING}", f".*{SCRATCH}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _place(folder: Path, number: int) -> Path:
    return folder / f".{number:05d}{ENDING}"
