"""Write shards of teacher vectors: a complete store in one process, or one range as a worker of a cluster.

A worker returns errors as results, so that the driver can report them in one sentence and Ray does not
restart it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from trundle import errors
from trundle.data.corpus import ENVIRONMENT, as_texts
from trundle.data.environment import environment_pairs
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput, BadModel, MissingExtra, TrundleError
from trundle.progress import SILENT, Progress
from trundle.scale import shard_plan
from trundle.teacher import shards as store
from trundle.teacher import teacher_kind
from trundle.teacher.labelling import build_targets, encode_by_role, fingerprint, other_texts_error, text_key
from trundle.teacher.targets import Targets
from trundle.teacher.teacher import Teacher, graph_teacher, open_teacher

_MAX_FAILURES = 10
_STARTED, _ENDED = ".begun", ".ended"


class TeacherSpec(BaseModel, frozen=True, extra="forbid"):
    """Which model to open, and how; small enough to send to every worker."""

    model: str
    runtime: bool = False
    """Run the exported graph on the CPU."""
    threads: int | None = None
    trust_remote_code: bool = False


def _open_teacher(spec: TeacherSpec) -> Teacher:
    if teacher_kind(spec.model) != "model":
        raise BadInput(f"{spec.model} is not a model; pass a model folder or hub name")
    if spec.runtime:
        return graph_teacher(spec.model, threads=spec.threads)
    return open_teacher(spec.model, trust_remote_code=spec.trust_remote_code)


def build_local(
    sources: Sequence[str],
    spec: TeacherSpec,
    folder: str | Path,
    *,
    dtype: store.Dtype = "float16",
    shard_size: int = store.SHARD_SIZE,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every text of `sources`; an interrupted build resumes."""
    # Every source is checked before the model is loaded.
    streams = [_texts(source, progress) for source in sources]
    teacher = _open_teacher(spec)
    assert teacher.embedder is not None
    texts, wanted = chain.from_iterable(streams), teacher.manifest(dtype, shard_size)
    targets = build_targets(texts, teacher.embedder, wanted, folder, progress=progress)
    _reset_failures(targets.folder)
    return targets


def _texts(source: str, progress: Progress) -> Iterator[Text]:
    if source == ENVIRONMENT:
        return as_texts(environment_pairs(progress=progress))
    if shard_plan._is_remote(source):
        return shard_plan._read_parts(shard_plan._list_parts([source]))
    return read_texts(source)


@contextmanager
def _count_failures(folder: Path, what: str, *, at_once: int = 1) -> Iterator[None]:
    """Run the block unless its process died too often; `at_once` workers may run it at the same time.

    Each start and each end appends a byte to a file, so the difference is the number of deaths.
    """
    started, ended = (folder / f".{what}{ending}" for ending in (_STARTED, _ENDED))
    failures = _append(started) - (ended.stat().st_size if ended.is_file() else 0) - at_once
    if failures >= _MAX_FAILURES:
        raise BadInput(f"{failures} workers died one after the other; check their memory, then run again")
    yield
    _append(ended)


def _append(path: Path) -> int:
    with path.open("ab") as file:
        file.write(b".")
        return file.tell()


def _reset_failures(folder: Path) -> None:
    for ending in (_STARTED, _ENDED):
        for path in folder.glob(f".*{ending}"):
            path.unlink(missing_ok=True)


class _WorkerSettings(BaseModel, frozen=True, extra="forbid"):
    teacher: TeacherSpec
    identity: str
    folder: str
    dtype: store.Dtype
    workers: int = 1


class _WorkerResult(BaseModel, frozen=True, extra="forbid"):
    texts: int = 0
    labelled: int = 0
    error: str | None = None
    message: str = ""

    def checked(self) -> _WorkerResult:
        """Return the result, or raise the worker's error."""
        if self.error is not None:
            raise getattr(errors, self.error, TrundleError)(self.message)
        return self


def _failed(error: Exception, doing: str) -> _WorkerResult:
    """Return an error as a result; a `TrundleError` keeps its class and sentence."""
    node = socket.gethostname()
    if isinstance(error, TrundleError) and not isinstance(error, MissingExtra):
        return _WorkerResult(error=type(error).__name__, message=f"a worker on {node} {doing}: {error}")
    reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    message = f"a worker on {node} {doing} ({reason}); fix that node, or leave it out"
    return _WorkerResult(error="BadModel", message=message)


def _hash_texts(part: shard_plan._FilePart) -> tuple[bytes, bytes]:
    keys, lengths = bytearray(), []
    for number, text in enumerate(shard_plan._read_part(part), 1):
        keys += text_key(text, number)
        lengths.append(len(text.text))
    return bytes(keys), np.asarray(lengths, dtype="<u4").tobytes()


def _check_range(folder: Path, shards: shard_plan._ShardRange, duplicates: bytes) -> _WorkerResult:
    """Check that the finished shards of a range are of these texts; nothing is written."""
    try:
        for number, texts in enumerate(shard_plan._shard_texts(shards, duplicates), shards.first):
            record = store.read_record(folder, number)
            if record is not None and record.shard.texts_fingerprint != _fingerprint(texts):
                raise other_texts_error(folder)
    except Exception as error:
        return _failed(error, f"can't resume at shard {shards.first}")
    return _WorkerResult(texts=shards.texts)


def _fingerprint(texts: Sequence[Text]) -> str:
    return fingerprint((text_key(text, number) for number, text in enumerate(texts, 1)), texts)


class _ShardWriter:
    """Writes shards with a teacher; an error while opening it is returned with the first result."""

    def __init__(self, settings: _WorkerSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._broken: _WorkerResult | None = None
        try:
            self._teacher = self._open()
        except Exception as error:
            self._broken = _failed(error, f"can't open {settings.teacher.model}")

    def write(self, shards: shard_plan._ShardRange, duplicates: bytes) -> _WorkerResult:
        """Write the missing shards of a range; each is recorded as soon as its files are written."""
        if self._broken is not None:
            return self._broken
        labelled = 0
        try:
            with _count_failures(self._folder, f"{shards.first:05d}"):
                for number, texts in enumerate(shard_plan._shard_texts(shards, duplicates), shards.first):
                    labelled += self._write(number, texts)
        except Exception as error:
            return _failed(error, f"can't write the shards from {shards.first} on")
        return _WorkerResult(texts=shards.texts, labelled=labelled)

    def _open(self) -> Teacher:
        manifest = store.read_manifest(self._folder)
        if manifest is None or manifest.teacher != self._settings.identity:
            raise BadInput(f"it does not see {self._folder}; put the store on a disk that all nodes share")
        with _count_failures(self._folder, "opening", at_once=self._settings.workers):
            teacher = _open_teacher(self._settings.teacher)
        if teacher.identity() != self._settings.identity:
            raise BadModel("it holds another model under that name; copy the same files to all nodes")
        return teacher

    def _write(self, number: int, texts: list[Text]) -> int:
        """Return the number of texts that had to be encoded: all or none."""
        texts_fingerprint = _fingerprint(texts)
        record = store.read_record(self._folder, number)
        if record is not None:
            if record.shard.texts_fingerprint != texts_fingerprint:
                raise other_texts_error(self._folder)
            if store.is_intact(self._folder, number, record.shard):
                return 0
        assert self._teacher.embedder is not None
        vectors = encode_by_role(self._teacher.embedder, texts)
        dtype = self._settings.dtype
        shard = store.write_shard(
            self._folder, number, texts, vectors, dtype=dtype, fingerprint=texts_fingerprint
        )
        store.write_record(self._folder, number, store.Record(width=vectors.shape[1], shard=shard))
        return len(texts)
