"""How teacher vectors lie on disk: shards of three files each, and one manifest that vouches for them.

    manifest.json        who made the vectors and how; size and checksum of every file
    00000.vectors.npy    one row a text, float16 or float32
    00000.texts.bin      the texts one after another, UTF-8
    00000.index.npy      for each text: where it ends in texts.bin, its characters, its kind

Each file is written beside its place and renamed, and the manifest names a shard only once its files are
there. What a kill leaves behind is never taken for finished, and is gone when the folder is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b, file_digest
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from trundle.data.texts import Kind, Text
from trundle.embedder import Vectors
from trundle.errors import BadInput, WriteFailed
from trundle.folders import write_whole

DIGEST_BYTES = 16


def content_digest(path: Path) -> str:
    """The hash of a file's content, read in small pieces."""
    with path.open("rb") as stream:
        return file_digest(stream, lambda: blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def _table_id(path: str | Path) -> str:
    """Who a teacher is that exists only as a file of vectors."""
    try:
        return f"table {content_digest(Path(path))}"
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); check the file") from error


_FORMAT = 1
_MANIFEST = "manifest.json"
_SCRATCH = ".part"
_UNIT_TOLERANCE = 5e-3  # what half precision can do to a vector of length 1

_INDEX = np.dtype([("end", "<u8"), ("length", "<u4"), ("kind", "u1")])
_KIND_CODES: tuple[Kind | None, ...] = (None, "query", "document", "definition")

Dtype = Literal["float16", "float32"]
_Part = Literal["vectors", "texts", "index"]
_ENDINGS: dict[_Part, str] = {"vectors": "vectors.npy", "texts": "texts.bin", "index": "index.npy"}


class _Stored(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int
    checksum: str


class _Shard(BaseModel):
    """One finished shard."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    count: int
    kinds: dict[str, int]
    texts_fingerprint: str
    normalised: bool
    vectors: _Stored
    texts: _Stored
    index: _Stored

    @property
    def files(self) -> dict[_Part, _Stored]:
        """All files of the shard."""
        return {"vectors": self.vectors, "texts": self.texts, "index": self.index}


class Manifest(BaseModel):
    """What is in a folder of teacher vectors, and what made it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = _FORMAT
    teacher: str
    prompts: dict[str, str] | None
    dtype: Dtype
    shard_size: int
    default_prompt: str | None = None
    """The name of the prompt the teacher puts before texts of no role, if it has one."""
    width: int = 0
    normalised: bool = False
    complete: bool = False
    repeats: int = 0
    shards: tuple[_Shard, ...] = ()

    @property
    def count(self) -> int:
        """How many texts have their vector."""
        return sum(shard.count for shard in self.shards)

    @property
    def kinds(self) -> dict[str, int]:
        """How many texts there are of each kind; those of no kind under `none`."""
        return dict(sum((Counter(shard.kinds) for shard in self.shards), Counter()))

    def placed(self, number: int, shard: _Shard, width: int) -> Manifest:
        """The manifest with `shard` in its place."""
        shards = (*self.shards[:number], shard, *self.shards[number + 1 :])
        normalised = all(shard.normalised for shard in shards)
        return self.model_copy(update={"shards": shards, "width": width, "normalised": normalised})

    def write(self, folder: Path) -> None:
        """Put the manifest into `folder`."""
        write_whole(folder / _MANIFEST, self.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / _MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError as error:
        raise BadInput(
            f"{path} is damaged or not of teacher vectors; choose another folder or delete it"
        ) from error
    except OSError as error:
        raise BadInput(f"{path} can't be read ({error.strerror}); choose another folder") from error
    if manifest.format != _FORMAT:
        raise BadInput(
            f"{path} was written by another version of trundle; choose another folder or delete it"
        )
    return manifest


def _part_path(folder: Path, number: int, part: _Part) -> Path:
    """Where a part of a shard lies."""
    return folder / f"{number:05d}.{_ENDINGS[part]}"


def write_shard(
    folder: Path, number: int, texts: Sequence[Text], vectors: Vectors, *, dtype: Dtype, fingerprint: str
) -> _Shard:
    """Store the shard's files; the caller then puts the record into the manifest."""
    encoded = [text.text.encode("utf-8") for text in texts]
    index = np.empty(len(texts), dtype=_INDEX)
    index["end"] = np.cumsum([len(raw) for raw in encoded])
    index["length"] = [len(text.text) for text in texts]
    index["kind"] = [_KIND_CODES.index(text.kind) for text in texts]
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    stored = _narrowed(vectors, dtype, texts)
    return _Shard(
        count=len(texts),
        kinds=Counter(text.kind or "none" for text in texts),
        texts_fingerprint=fingerprint,
        normalised=bool((abs(norms - 1) <= _UNIT_TOLERANCE).all()),
        texts=_write(_part_path(folder, number, "texts"), b"".join(encoded)),
        index=_write(_part_path(folder, number, "index"), _npy(index)),
        vectors=_write(_part_path(folder, number, "vectors"), _npy(stored)),
    )


def is_whole(folder: Path, number: int, shard: _Shard) -> bool:
    """Whether all files of a shard are there and have the content they were written with."""
    for part, stored in shard.files.items():
        path = _part_path(folder, number, part)
        if not _has_size(path, stored) or content_digest(path) != stored.checksum:
            return False
    return True


def _has_size(path: Path, stored: _Stored) -> bool:
    """Whether a file is there in full length: the check that costs nothing."""
    return path.is_file() and path.stat().st_size == stored.size


def _read_pieces(path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    """Some bytes of a file, given as (start, size)."""
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise BadInput(
            f"{path} can't be read ({error.strerror}); build the folder again to mend it"
        ) from error
    try:
        found = _neighbours(file, pieces) or [os.pread(file, size, start) for start, size in pieces]
    finally:
        os.close(file)
    if any(len(piece) != size for piece, (_, size) in zip(found, pieces, strict=True)):
        raise BadInput(f"{path} is cut short; build the folder again to mend it")
    return found


def _neighbours(file: int, pieces: Sequence[tuple[int, int]]) -> list[bytes] | None:
    """Pieces that lie one after the other, read at once; None if they don't."""
    ends = [start + size for start, size in pieces]
    if any(start != end for (start, _), end in zip(pieces[1:], ends, strict=False)):
        return None
    first = pieces[0][0]
    whole = os.pread(file, ends[-1] - first, first)
    return [whole[start - first : start - first + size] for start, size in pieces]


def _narrowed(vectors: Vectors, dtype: Dtype, texts: Sequence[Text]) -> NDArray[Any]:
    """The vectors as they are stored, unless that would turn one into infinity or nothing."""
    with np.errstate(over="ignore", under="ignore"):
        stored = vectors.astype(dtype)
    lost = ~np.isfinite(stored).all(axis=1) | ~stored.any(axis=1)
    if lost.any():
        text = texts[int(lost.argmax())].text
        raise BadInput(f"the teacher's vector for {text[:60]!r} does not fit into {dtype}; store float32")
    return stored


def _npy(array: NDArray[Any]) -> bytes:
    stream = BytesIO()
    np.lib.format.write_array(stream, array, version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def _write(path: Path, content: bytes) -> _Stored:
    scratch = path.with_name(f".{path.name}.{os.getpid()}{_SCRATCH}")
    try:
        with scratch.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise WriteFailed(
            f"{path} could not be written ({error.strerror}); free some space and run again"
        ) from error
    return _Stored(size=len(content), checksum=blake2b(content, digest_size=DIGEST_BYTES).hexdigest())


_ENDING = ".shard.json"


class Record(BaseModel):
    """One finished shard, and the width of its vectors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    width: int
    shard: _Shard


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
    return sorted(int(path.name.removesuffix(_ENDING)[1:]) for path in folder.glob(f".*{_ENDING}"))


def _adopted(folder: Path, manifest: Manifest) -> Manifest:
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
    for pattern in (f".*{_ENDING}", f".*{_SCRATCH}"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


def _place(folder: Path, number: int) -> Path:
    return folder / f".{number:05d}{_ENDING}"
