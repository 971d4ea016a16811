"""How teacher vectors are stored: shards of three files each, and one manifest with their checksums.

    manifest.json        the teacher, its settings, and the size and checksum of every file
    00000.vectors.npy    one row per text, float16 or float32
    00000.texts.bin      the texts one after another, UTF-8
    00000.index.npy      for each text: its end in texts.bin, its number of characters, its kind

Files are written under temporary names and renamed, and the manifest names a shard after its files are
written: a killed run leaves no shard that seems finished.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b, file_digest
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from trundle.data.texts import Kind, Text
from trundle.embedder import Vectors
from trundle.errors import BadInput, WriteFailed
from trundle.folders import write_atomic
from trundle.teacher import MANIFEST

SHARD_SIZE = 8192
_DIGEST_BYTES = 16
_FORMAT = 1
_SCRATCH = ".part"
_RECORD = ".shard.json"
_UNIT_TOLERANCE = 5e-3
"""How far from 1 the length of a normalised vector may be: half precision rounds."""

_INDEX = np.dtype([("end", "<u8"), ("length", "<u4"), ("kind", "u1")])
_KIND_CODES: tuple[Kind | None, ...] = (None, "query", "document", "definition")
_CODE_OF_KIND = {kind: code for code, kind in enumerate(_KIND_CODES)}

Dtype = Literal["float16", "float32"]
_Part = Literal["vectors", "texts", "index"]
_ENDINGS: dict[_Part, str] = {"vectors": "vectors.npy", "texts": "texts.bin", "index": "index.npy"}


class _StoredFile(BaseModel, frozen=True, extra="forbid", strict=True):
    size: int
    checksum: str


class _Shard(BaseModel, frozen=True, extra="forbid", strict=True):
    count: int
    kinds: dict[str, int]
    texts_fingerprint: str
    normalised: bool
    vectors: _StoredFile
    texts: _StoredFile
    index: _StoredFile

    @property
    def files(self) -> dict[_Part, _StoredFile]:
        return {"vectors": self.vectors, "texts": self.texts, "index": self.index}


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """The content of a folder of teacher vectors, and the teacher and settings that made it."""

    format: int = _FORMAT
    teacher: str
    prompts: dict[str, str] | None = None
    dtype: Dtype = "float16"
    shard_size: int = SHARD_SIZE
    default_prompt: str | None = None
    """The name of the prompt that the teacher puts before texts without a role, if it has one."""
    width: int = 0
    normalised: bool = False
    complete: bool = False
    repeats: int = 0
    shards: tuple[_Shard, ...] = ()

    @property
    def count(self) -> int:
        """The number of texts with a stored vector."""
        return sum(shard.count for shard in self.shards)

    @property
    def kinds(self) -> dict[str, int]:
        """The number of texts of each kind; those without a kind under `none`."""
        return dict(sum((Counter(shard.kinds) for shard in self.shards), Counter()))

    def with_shards(self, shards: Sequence[_Shard], width: int) -> Manifest:
        """Return the manifest with these shards, whose vectors have this width."""
        normalised = bool(shards) and all(shard.normalised for shard in shards)
        return self.model_copy(update={"shards": tuple(shards), "width": width, "normalised": normalised})

    def write(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        write_atomic(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a folder, or None if it has none."""
    path = folder / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadInput(f"{path} is damaged; choose another folder or delete it") from error
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); choose another folder") from error
    if manifest.format != _FORMAT:
        raise BadInput(f"{path} is of another version of trundle; choose another folder or delete it")
    return manifest


def write_shard(
    folder: Path, number: int, texts: Sequence[Text], vectors: Vectors, *, dtype: Dtype, fingerprint: str
) -> _Shard:
    """Write the shard's files and return its entry for the manifest."""
    encoded = [text.text.encode("utf-8") for text in texts]
    index = np.empty(len(texts), dtype=_INDEX)
    index["end"] = np.cumsum([len(raw) for raw in encoded])
    index["length"] = [len(text.text) for text in texts]
    index["kind"] = [_CODE_OF_KIND[text.kind] for text in texts]
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    with np.errstate(over="ignore", under="ignore"):
        stored = vectors.astype(dtype)
    lost = ~np.isfinite(stored).all(axis=1) | ~stored.any(axis=1)
    if lost.any():
        text = texts[int(lost.argmax())].text
        raise BadInput(f"the teacher's vector for {text[:60]!r} does not fit into {dtype}; store float32")
    return _Shard(
        count=len(texts),
        kinds={str(kind or "none"): number for kind, number in Counter(text.kind for text in texts).items()},
        texts_fingerprint=fingerprint,
        normalised=bool((abs(norms - 1) <= _UNIT_TOLERANCE).all()),
        texts=_write(_part_path(folder, number, "texts"), b"".join(encoded)),
        index=_write(_part_path(folder, number, "index"), _npy(index)),
        vectors=_write(_part_path(folder, number, "vectors"), _npy(stored)),
    )


def is_intact(folder: Path, number: int, shard: _Shard) -> bool:
    """Return whether all files of a shard exist and match their checksums."""
    files = ((_part_path(folder, number, part), stored) for part, stored in shard.files.items())
    return all(_has_size(path, stored) and _content_digest(path) == stored.checksum for path, stored in files)


def _part_path(folder: Path, number: int, part: _Part) -> Path:
    return folder / f"{number:05d}.{_ENDINGS[part]}"


def _has_size(path: Path, stored: _StoredFile) -> bool:
    return path.is_file() and path.stat().st_size == stored.size


def _content_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=_DIGEST_BYTES)).hexdigest()


def _read_ranges(path: Path, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    """Return byte ranges of a file, each given as (start, size); adjacent ranges are read at once."""
    first, ends = ranges[0][0], [start + size for start, size in ranges]
    adjacent = all(start == end for (start, _), end in zip(ranges[1:], ends, strict=False))
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); build the folder again") from error
    try:
        if adjacent:
            content = os.pread(file, ends[-1] - first, first)
            found = [content[start - first : start - first + size] for start, size in ranges]
        else:
            found = [os.pread(file, size, start) for start, size in ranges]
    finally:
        os.close(file)
    if any(len(part) != size for part, (_, size) in zip(found, ranges, strict=True)):
        raise BadInput(f"{path} is truncated; build the folder again")
    return found


def _read_rows(
    path: Path, header: int, rows: NDArray[np.int64], found: NDArray[Any], places: NDArray[np.int64]
) -> None:
    """Copy rows of a file, which follow its header, to places in an array."""
    low, count, size = int(rows.min()), int(rows.max() - rows.min()) + 1, found.strides[0]
    if count > 2 * len(rows):
        ranges = [(header + row * size, size) for row in rows.tolist()]
        content = np.frombuffer(b"".join(_read_ranges(path, ranges)), dtype=found.dtype)
        found[places] = content.reshape(len(rows), -1)
        return
    try:
        content = np.fromfile(
            path, dtype=found.dtype, count=count * found.shape[1], offset=header + low * size
        )
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); build the folder again") from error
    if content.size != count * found.shape[1]:
        raise BadInput(f"{path} is truncated; build the folder again")
    found[places] = content.reshape(count, -1)[rows - low]


def _npy(array: NDArray[Any]) -> bytes:
    stream = BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _write(path: Path, content: bytes) -> _StoredFile:
    scratch = path.with_name(f".{path.name}.{os.getpid()}{_SCRATCH}")
    try:
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise WriteFailed(f"{path} can't be written ({error.strerror}); free space, run again") from error
    return _StoredFile(size=len(content), checksum=blake2b(content, digest_size=_DIGEST_BYTES).hexdigest())


class Record(BaseModel, frozen=True, extra="forbid", strict=True):
    """One finished shard that is not in the manifest yet, and the width of its vectors."""

    width: int
    shard: _Shard


def write_record(folder: Path, number: int, record: Record) -> None:
    """Record a shard whose files are written."""
    write_atomic(_record_path(folder, number), record.model_dump_json() + "\n")


def read_record(folder: Path, number: int) -> Record | None:
    """Return the record of a shard, or None if it is missing or damaged."""
    try:
        return Record.model_validate_json(_record_path(folder, number).read_bytes())
    except (OSError, ValidationError):
        return None


def recorded(folder: Path) -> list[int]:
    """Return the numbers of all shards that have a record."""
    return sorted(int(path.name.removesuffix(_RECORD)[1:]) for path in folder.glob(f".*{_RECORD}"))


def _with_recorded(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest with the recorded shards that follow its own."""
    shards, width = list(manifest.shards), manifest.width
    if not manifest.complete:
        while (record := read_record(folder, len(shards))) is not None and width in (0, record.width):
            shards.append(record.shard)
            width = record.width
    return manifest.with_shards(shards, width)


def drop_records(folder: Path) -> None:
    """Remove the records of a finished folder, and what killed runs left in it."""
    for pattern in (f".*{_RECORD}", f".*{_SCRATCH}"):
        for path in folder.glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _record_path(folder: Path, number: int) -> Path:
    return folder / f".{number:05d}{_RECORD}"
