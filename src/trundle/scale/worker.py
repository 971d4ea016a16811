"""What a worker does, on whatever node it runs: hash the texts of a piece, or label the shards of a stretch.

It knows no cluster. An error comes back as an answer, so that the driver can say it in one sentence, instead of a
cluster's trace, and is not taken for a worker that was lost and must be started again.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict

from trundle import errors
from trundle.data.texts import Text
from trundle.errors import BadInput, BadModel, MissingExtra, TrundleError
from trundle.scale.local import Asked, _counted, _open_teacher, _Opened
from trundle.scale.pieces import _Piece, _read_piece
from trundle.scale.survey import _shard_texts, _Stretch
from trundle.teacher.labelling import KEY_BYTES, encode_by_role, fingerprinted, other_texts, text_key
from trundle.teacher.shards import (
    Dtype,
    Record,
    is_whole,
    read_manifest,
    read_record,
    write_record,
    write_shard,
)


class _Job(BaseModel):
    """What all workers of a build have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asked: Asked
    identity: str
    folder: str
    dtype: Dtype
    workers: int = 1


class _Answer(BaseModel):
    """What came of one stretch, or why nothing did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: int = 0
    labelled: int = 0
    error: str | None = None
    says: str = ""

    def checked(self) -> _Answer:
        """The answer, or the worker's error raised here."""
        if self.error is not None:
            raise getattr(errors, self.error, TrundleError)(self.says)
        return self


def _failed(error: Exception, doing: str) -> _Answer:
    """An error as an answer; one of our own keeps its class and sentence."""
    node = socket.gethostname()
    if isinstance(error, TrundleError) and not isinstance(error, MissingExtra):
        return _Answer(error=type(error).__name__, says=f"a worker on {node} {doing}: {error}")
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return _Answer(
        error="BadModel", says=f"a worker on {node} {doing} ({reason}); mend that node, or leave it out"
    )


def _survey_piece(piece: _Piece) -> tuple[bytes, bytes]:
    """The hash and the length of every text."""
    keys, lengths = bytearray(), []
    for number, text in enumerate(_read_piece(piece), 1):
        keys += text_key(text, number)
        lengths.append(len(text.text))
    return bytes(keys), np.asarray(lengths, dtype="<u4").tobytes()


def _check_stretch(folder: Path, stretch: _Stretch, repeats: bytes) -> _Answer:
    """Whether the finished shards of a stretch are of these texts; nothing is written before that is known of all."""
    try:
        for number, texts in enumerate(_shard_texts(stretch, repeats), stretch.first):
            record = read_record(folder, number)
            if record is not None and record.shard.texts_fingerprint != _fingerprint_of(texts):
                raise other_texts(folder)
    except Exception as error:
        return _failed(error, f"can't go on with shard {stretch.first}")
    return _Answer(texts=stretch.texts)


def _fingerprint_of(texts: Sequence[Text]) -> str:
    """The fingerprint a shard of these texts has."""
    whole = blake2b(digest_size=KEY_BYTES)
    for place, text in enumerate(texts, 1):
        whole.update(fingerprinted(text_key(text, place), text))
    return whole.hexdigest()


class _ShardWriter:
    """A teacher at work on one store; opening it may fail, which is told with the first answer."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._folder = Path(job.folder)
        self._broken: _Answer | None = None
        try:
            self._teacher = self._opened()
        except Exception as error:
            self._broken = _failed(error, f"can't open {job.asked.model}")

    def write(self, stretch: _Stretch, repeats: bytes) -> _Answer:
        """Make the shards that are not there yet; each is vouched for as soon as its files are."""
        if self._broken is not None:
            return self._broken
        labelled = 0
        try:
            with _counted(self._folder, f"{stretch.first:05d}"):
                for number, texts in enumerate(_shard_texts(stretch, repeats), stretch.first):
                    labelled += self._write(number, texts)
        except Exception as error:
            return _failed(error, f"can't go on with shard {stretch.first}")
        return _Answer(texts=stretch.texts, labelled=labelled)

    def _opened(self) -> _Opened:
        manifest = read_manifest(self._folder)
        if manifest is None or manifest.teacher != self._job.identity:
            raise BadInput(f"it does not see {self._folder}; put the store on a disk that all nodes share")
        with _counted(self._folder, "opening", at_once=self._job.workers):
            teacher = _open_teacher(self._job.asked)
        if teacher.identity != self._job.identity:
            raise BadModel("it holds another model under that name; give all nodes the same files")
        return teacher

    def _write(self, number: int, texts: list[Text]) -> int:
        """How many texts had to be labelled: all or none."""
        fingerprint = _fingerprint_of(texts)
        record = read_record(self._folder, number)
        if record is not None:
            if record.shard.texts_fingerprint != fingerprint:
                raise other_texts(self._folder)
            if is_whole(self._folder, number, record.shard):
                return 0
        vectors = encode_by_role(self._teacher.embedder, texts)
        shard = write_shard(
            self._folder,
            number,
            texts,
            vectors,
            dtype=self._job.dtype,
            fingerprint=fingerprint,
        )
        write_record(self._folder, number, Record(width=vectors.shape[1], shard=shard))
        return len(texts)
