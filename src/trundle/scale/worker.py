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

import trundle.errors as errors
from trundle.data.labelling import encode_by_role, fingerprinted, other_texts, text_key
from trundle.data.pieces import Piece, read_piece
from trundle.data.seen import KEY_BYTES
from trundle.data.shard_records import Record, read_record, write_record
from trundle.data.shards import Dtype, is_whole, read_manifest, write_shard
from trundle.data.texts import Text
from trundle.errors import BadInput, BadModel, TrundleError
from trundle.scale.deaths import counted
from trundle.scale.stretches import Stretch, shard_texts
from trundle.scale.teachers import Asked, Opened, open_teacher


class Job(BaseModel):
    """What all workers of a build have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    asked: Asked
    identity: str
    folder: str
    dtype: Dtype
    workers: int = 1


class Answer(BaseModel):
    """What came of one stretch, or why nothing did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: int = 0
    labelled: int = 0
    error: str | None = None
    says: str = ""

    def checked(self) -> Answer:
        """The answer, or the worker's error raised here."""
        if self.error is not None:
            raise getattr(errors, self.error, TrundleError)(self.says)
        return self


def failed(error: Exception, doing: str) -> Answer:
    """An error as an answer; one of our own keeps its class and sentence."""
    node = socket.gethostname()
    if isinstance(error, TrundleError) and not isinstance(error, errors.MissingExtra):
        return Answer(error=type(error).__name__, says=f"a worker on {node} {doing}: {error}")
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Answer(
        error="BadModel", says=f"a worker on {node} {doing} ({reason}); mend that node, or leave it out"
    )


def survey_piece(piece: Piece) -> tuple[bytes, bytes]:
    """The hash and the length of every text."""
    keys, lengths = bytearray(), []
    for number, text in enumerate(read_piece(piece), 1):
        keys += text_key(text, number)
        lengths.append(len(text.text))
    return bytes(keys), np.asarray(lengths, dtype="<u4").tobytes()


def check_stretch(folder: Path, stretch: Stretch, repeats: bytes) -> Answer:
    """Whether the finished shards of a stretch are of these texts; nothing is written before that is known of all."""
    try:
        for number, texts in enumerate(shard_texts(stretch, repeats), stretch.first):
            record = read_record(folder, number)
            if record is not None and record.shard.texts_fingerprint != fingerprint_of(texts):
                raise other_texts(folder)
    except Exception as error:
        return failed(error, f"can't go on with shard {stretch.first}")
    return Answer(texts=stretch.texts)


def fingerprint_of(texts: Sequence[Text]) -> str:
    """The fingerprint a shard of these texts has."""
    whole = blake2b(digest_size=KEY_BYTES)
    for place, text in enumerate(texts, 1):
        whole.update(fingerprinted(text_key(text, place), text))
    return whole.hexdigest()


class ShardWriter:
    """A teacher at work on one store; opening it may fail, which is told with the first answer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Path(job.folder)
        self._broken: Answer | None = None
        try:
            self._teacher = self._opened()
        except Exception as error:
            self._broken = failed(error, f"can't open {job.asked.model}")

    def write(self, stretch: Stretch, repeats: bytes) -> Answer:
        """Make the shards that are not there yet; each is vouched for as soon as its files are."""
        if self._broken is not None:
            return self._broken
        labelled = 0
        try:
            with counted(self._folder, f"{stretch.first:05d}"):
                for number, texts in enumerate(shard_texts(stretch, repeats), stretch.first):
                    labelled += self._write(number, texts)
        except Exception as error:
            return failed(error, f"can't go on with shard {stretch.first}")
        return Answer(texts=stretch.texts, labelled=labelled)

    def _opened(self) -> Opened:
        manifest = read_manifest(self._folder)
        if manifest is None or manifest.teacher != self._job.identity:
            raise BadInput(f"it does not see {self._folder}; put the store on a disk that all nodes share")
        with counted(self._folder, "opening", at_once=self._job.workers):
            teacher = open_teacher(self._job.asked)
        if teacher.identity != self._job.identity:
            raise BadModel("it holds another model under that name; give all nodes the same files")
        return teacher

    def _write(self, number: int, texts: list[Text]) -> int:
        """How many texts had to be labelled: all or none."""
        fingerprint = fingerprint_of(texts)
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
