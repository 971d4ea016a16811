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
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from trundle.artifact import write_whole
from trundle.data.digest import DIGEST_BYTES, content_digest
from trundle.data.texts import Kind, Text
from trundle.embedder import Vectors
from trundle.errors import BadInput, WriteFailed

FORMAT = 1
MANIFEST = "manifest.json"
SCRATCH = ".part"
UNIT_TOLERANCE = 5e-3  # what half precision can do to a vector of length 1

INDEX = np.dtype([("end", "<u8"), ("length", "<u4"), ("kind", "u1")])
KIND_CODES: tuple[Kind | None, ...] = (None, "query", "document", "definition")

Dtype = Literal["float16", "float32"]
Part = Literal["vectors", "texts", "index"]
ENDINGS: dict[Part, str] = {"vectors": "vectors.npy", "texts": "texts.bin", "index": "index.npy"}


class Stored(BaseModel):
    """What a file must be."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    size: int
    checksum: str


class Shard(BaseModel):
    """One finished shard."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    count: int
    kinds: dict[str, int]
    texts_fingerprint: str
    normalised: bool
    vectors: Stored
    texts: Stored
    index: Stored

    @property
    def files(self) -> dict[Part, Stored]:
        """All files of the shard."""
        return {"vectors": self.vectors, "texts": self.texts, "index": self.index}


class Manifest(BaseModel):
    """What is in a folder of teacher vectors, and what made it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
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
    shards: tuple[Shard, ...] = ()

    @property
    def count(self) -> int:
        """How many texts have their vector."""
        return sum(shard.count for shard in self.shards)

    @property
    def kinds(self) -> dict[str, int]:
        """How many texts there are of each kind; those of no kind under `none`."""
        return dict(sum((Counter(shard.kinds) for shard in self.shards), Counter()))

    def placed(self, number: int, shard: Shard, width: int) -> Manifest:
        """The manifest with `shard` in its place."""
        shards = (*self.shards[:number], shard, *self.shards[number + 1 :])
        normalised = all(shard.normalised for shard in shards)
        return self.model_copy(update={"shards": shards, "width": width, "normalised": normalised})

    def write(self, folder: Path) -> None:
        """Put the manifest into `folder`."""
        write_whole(folder / MANIFEST, self.model_dump_json(indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is none."""
    path = folder / MANIFEST
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
    if manifest.format != FORMAT:
        raise BadInput(
            f"{path} was written by another version of trundle; choose another folder or delete it"
        )
    return manifest


def part_path(folder: Path, number: int, part: Part) -> Path:
    """Where a part of a shard lies."""
    return folder / f"{number:05d}.{ENDINGS[part]}"


def write_shard(
    folder: Path, number: int, texts: Sequence[Text], vectors: Vectors, *, dtype: Dtype, fingerprint: str
) -> Shard:
    """Store the shard's files; the caller then puts the record into the manifest."""
    encoded = [text.text.encode("utf-8") for text in texts]
    index = np.empty(len(texts), dtype=INDEX)
    index["end"] = np.cumsum([len(raw) for raw in encoded])
    index["length"] = [len(text.text) for text in texts]
    index["kind"] = [KIND_CODES.index(text.kind) for text in texts]
    norms = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    stored = _narrowed(vectors, dtype, texts)
    return Shard(
        count=len(texts),
        kinds=Counter(text.kind or "none" for text in texts),
        texts_fingerprint=fingerprint,
        normalised=bool((abs(norms - 1) <= UNIT_TOLERANCE).all()),
        texts=_write(part_path(folder, number, "texts"), b"".join(encoded)),
        index=_write(part_path(folder, number, "index"), _npy(index)),
        vectors=_write(part_path(folder, number, "vectors"), _npy(stored)),
    )


def is_whole(folder: Path, number: int, shard: Shard) -> bool:
    """Whether all files of a shard are there and have the content they were written with."""
    for part, stored in shard.files.items():
        path = part_path(folder, number, part)
        if not has_size(path, stored) or content_digest(path) != stored.checksum:
            return False
    return True


def has_size(path: Path, stored: Stored) -> bool:
    """Whether a file is there in full length: the check that costs nothing."""
    return path.is_file() and path.stat().st_size == stored.size


def read_pieces(path: Path, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
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


def _write(path: Path, content: bytes) -> Stored:
    scratch = path.with_name(f".{path.name}.{os.getpid()}{SCRATCH}")
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
    return Stored(size=len(content), checksum=blake2b(content, digest_size=DIGEST_BYTES).hexdigest())
