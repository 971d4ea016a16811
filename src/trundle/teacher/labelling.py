"""Asking a teacher for the vectors of many texts, so that no text is ever asked for twice.

Texts stream in, repeats are left out, and every full shard is encoded and stored before the next one fills:
memory is that of one shard and a table of hashes (at most 48 bytes a text), and a kill costs one shard at
most. Running again reads the texts again, checks the finished shards against them and by checksum, and asks
the teacher only for what is missing or damaged.

One process writes a folder at a time: another that asks for the same vectors waits, and finds them. How the workers of a cluster
fill one folder together is in the room `scale`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Generic, Literal, TypeAlias, TypeVar

import numpy as np
from filelock import FileLock, Timeout

from trundle.data.texts import Kind, Text
from trundle.embedder import Embedder, Encode, Vectors, check_vectors
from trundle.errors import BadInput, BadModel, OtherTexts, TrundleError, WriteFailed
from trundle.progress import SILENT, Advance, Progress
from trundle.teacher.shards import (
    Dtype,
    Manifest,
    _adopted,
    drop_records,
    is_whole,
    read_manifest,
    write_shard,
)
from trundle.teacher.targets import Targets, open_targets

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Item(Generic[_T]):
    value: _T


@dataclass(frozen=True)
class _End:
    error: BaseException | None = None


@contextmanager
def _ahead(items: Iterable[_T], *, count: int = 1) -> Iterator[Iterator[_T]]:
    """The same items, up to `count` of them made in advance; an error comes where its item would have."""
    waiting: queue.Queue[_Item[_T] | _End] = queue.Queue(maxsize=count)
    stopped = threading.Event()

    def put(entry: _Item[_T] | _End) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                waiting.put(entry, timeout=0.1)
                return

    def make() -> None:
        end = _End()
        try:
            for item in items:
                put(_Item(item))
                if stopped.is_set():
                    return
        except BaseException as error:
            end = _End(error)
        put(end)

    def take() -> Iterator[_T]:
        while not isinstance(entry := waiting.get(), _End):
            yield entry.value
        if entry.error is not None:
            raise entry.error

    thread = threading.Thread(target=make, name="reading ahead", daemon=True)
    thread.start()
    try:
        yield take()
    finally:
        stopped.set()
        thread.join()


KEY_BYTES = 16
_FIRST_SLOTS = 1 << 12
_EMPTY = bytes(KEY_BYTES)


class _Seen:
    """A set of 16-byte hashes in one flat table: 24 to 48 bytes a key, where a Python set takes about 100.

    A key's first bytes say where it stands; if another key is there, it goes to the next free slot. The table
    doubles when two thirds are taken. Keys must be hashes: evenly spread, and never all zero.
    """

    def __init__(self) -> None:
        self._slots = _FIRST_SLOTS
        self._table = bytearray(KEY_BYTES * _FIRST_SLOTS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> bool:
        """Remember `key`; whether it is new."""
        at = self._place(key)
        if self._table[at : at + KEY_BYTES] == key:
            return False
        self._table[at : at + KEY_BYTES] = key
        self._count += 1
        if 3 * self._count > 2 * self._slots:
            self._grow()
        return True

    def _place(self, key: bytes) -> int:
        """Where `key` stands, or the free slot it should take."""
        table, size = self._table, len(self._table)
        at = (int.from_bytes(key[:8], "little") & (self._slots - 1)) * KEY_BYTES
        while (there := table[at : at + KEY_BYTES]) != key and there != _EMPTY:
            at = (at + KEY_BYTES) % size
        return at

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(KEY_BYTES * self._slots)
        for start in range(0, len(old), KEY_BYTES):
            key = bytes(old[start : start + KEY_BYTES])
            if key != _EMPTY:
                at = self._place(key)
                self._table[at : at + KEY_BYTES] = key


SHARD_SIZE = 8192
SHARD_CHARACTERS = 1 << 25
"""A shard of very long texts ends early, so that they don't fill the memory."""

_TEXTS_PER_CALL = 2048
_LOCK = ".lock"

_Role = Literal["text", "query", "document"]
_LabelItem: TypeAlias = "tuple[Text, Vectors | None]"
"""A text, and its vector where that is known already."""

_Label: TypeAlias = "Callable[[Sequence[_LabelItem], Advance], Vectors]"


def build_targets(
    texts: Iterable[Text],
    teacher: Embedder,
    *,
    teacher_id: str,
    folder: str | Path,
    dtype: Dtype = "float16",
    shard_size: int = SHARD_SIZE,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every distinct text, each in the role its kind asks for.

    `teacher_id` (see the file of that name) and `prompts` are recorded; for the folder to be used again they
    must be the same.
    """
    wanted = Manifest(
        teacher=teacher_id,
        prompts=None if prompts is None else dict(prompts),
        dtype=dtype,
        shard_size=shard_size,
        default_prompt=default_prompt,
    )

    def label(items: Sequence[_LabelItem], advance: Advance) -> Vectors:
        return encode_by_role(teacher, [text for text, _ in items], advance)

    total = len(texts) if isinstance(texts, Sized) else None
    return _store(((text, None) for text in texts), label, wanted, folder, total=total, progress=progress)


def _store(
    items: Iterable[_LabelItem],
    label: _Label,
    wanted: Manifest,
    folder: str | Path,
    *,
    total: int | None = None,
    progress: Progress = SILENT,
) -> Targets:
    """Fill a folder, or finish it, or find it finished; `wanted` says what it must hold."""
    path = Path(folder)
    with _alone_in(path, progress):
        return _filled(items, label, wanted, path, total=total, progress=progress)


@contextmanager
def _alone_in(folder: Path, progress: Progress) -> Iterator[None]:
    """Keep others out. Who is killed lets them in, too, and they go on from the last finished shard.

    Where nothing can be written there is nobody to keep out, and what is finished can be read.
    """
    claim, new = FileLock(folder / _LOCK), not folder.exists()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            claim.acquire(timeout=0)
        except Timeout:
            progress.say("another process computes the same vectors; this one waits for them")
            claim.acquire()
    try:
        yield
    finally:
        if claim.is_locked:
            (folder / _LOCK).unlink(missing_ok=True)  # while it is held: who opened it by then looks again
            claim.release()
        if new:
            with suppress(OSError):  # it is not empty, unless what was asked is refused
                folder.rmdir()


def _filled(
    items: Iterable[_LabelItem],
    label: _Label,
    wanted: Manifest,
    path: Path,
    *,
    total: int | None,
    progress: Progress,
) -> Targets:
    manifest = _adopted(path, begun(path, wanted))
    chunks = _Chunks(items, wanted.shard_size)
    number = -1
    try:
        with progress.task("teacher vectors", total) as advance, _ahead(chunks.cut(advance)) as ready:
            for number, chunk in enumerate(ready):
                if _finished(path, manifest, number, chunk, progress):
                    advance(len(chunk.items))
                else:
                    manifest = _labelled(path, manifest, number, chunk, label(chunk.items, advance))
    except OtherTexts:
        raise
    except TrundleError:
        if manifest.shards:
            progress.say(
                f"{manifest.count} texts have their vectors in {path}; running again goes on from there"
            )
        raise
    if number < 0:
        raise BadInput("there are no texts to learn from; give a source that holds some")
    if number + 1 < len(manifest.shards):
        raise other_texts(path)
    if chunks.repeats:
        progress.say(f"{chunks.repeats} repeated texts were left out")
    if not manifest.complete:
        manifest.model_copy(update={"complete": True, "repeats": chunks.repeats}).write(path)
    drop_records(path)
    return open_targets(path)


def encode_by_role(
    teacher: Embedder, texts: Sequence[Text], advance: Advance = lambda _units: None
) -> Vectors:
    """The teacher's vectors in the order of the texts; it is asked in order of length, role by role."""
    vectors: Vectors | None = None
    encoders: dict[_Role, Encode] = {
        "text": teacher.text,
        "query": teacher.query,
        "document": teacher.document,
    }
    for role, encode in encoders.items():
        rows = [row for row, text in enumerate(texts) if role_of(text.kind) == role]
        rows.sort(key=lambda row: len(texts[row].text), reverse=True)
        for start in range(0, len(rows), _TEXTS_PER_CALL):
            asked = rows[start : start + _TEXTS_PER_CALL]
            plain = [texts[row].text for row in asked]
            answer = check_vectors(encode(plain), plain, "the teacher", zeros=False)
            if vectors is None:
                vectors = np.empty((len(texts), answer.shape[1]), dtype=np.float32)
            if answer.shape[1] != vectors.shape[1]:
                raise other_width(vectors.shape[1], answer.shape[1])
            vectors[asked] = answer
            advance(len(asked))
    if vectors is None:
        raise BadInput("no texts were given; give at least one")
    return vectors


def role_of(kind: Kind | None) -> _Role:
    """Queries and documents have roles of their own; all else is encoded without a prompt for a role."""
    return kind if kind == "query" or kind == "document" else "text"


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """The texts of one shard, and the hash that tells whether they are the same as last time."""

    items: Sequence[_LabelItem]
    fingerprint: str


class _Chunks:
    """Cuts a stream into shards of distinct texts, and counts the repeats."""

    def __init__(self, items: Iterable[_LabelItem], shard_size: int) -> None:
        self._items = items
        self._shard_size = shard_size
        self.repeats = 0

    def cut(self, advance: Advance) -> Iterator[_Chunk]:
        """The shards in order; repeats are told to `advance`, the others are for who labels them."""
        seen = _Seen()
        items: list[_LabelItem] = []
        characters = 0
        whole = blake2b(digest_size=KEY_BYTES)
        for number, item in enumerate(self._items, 1):
            text = item[0]
            key = text_key(text, number)
            if not seen.add(key):
                self.repeats += 1
                advance(1)
                continue
            whole.update(fingerprinted(key, text))
            items.append(item)
            characters += len(text.text)
            if len(items) == self._shard_size or characters >= SHARD_CHARACTERS:
                yield _Chunk(items=items, fingerprint=whole.hexdigest())
                items, characters, whole = [], 0, blake2b(digest_size=KEY_BYTES)
        if items:
            yield _Chunk(items=items, fingerprint=whole.hexdigest())


def text_key(text: Text, number: int) -> bytes:
    """The hash of a text in its role; what can't be embedded is refused here, before it costs anything."""
    if not isinstance(text.text, str) or not text.text.strip():
        raise BadInput(f"text {number} is empty or not a string; leave it out")
    try:
        raw = f"{role_of(text.kind)}\0{text.text}".encode()
    except UnicodeEncodeError as error:
        mend = "clean it with text.encode('utf-8', 'replace').decode()"
        raise BadInput(f"text {number} holds half of a character pair (a lone surrogate); {mend}") from error
    return blake2b(raw, digest_size=KEY_BYTES).digest()


def fingerprinted(key: bytes, text: Text) -> bytes:
    """What a text adds to the fingerprint of its shard."""
    return key + str(text.kind).encode() + b"\n"


def begun(path: Path, wanted: Manifest) -> Manifest:
    """The manifest to go on from; a folder that holds anything else is refused."""
    if wanted.shard_size < 1:
        raise BadInput(f"a shard of {wanted.shard_size} texts can't be; give 1 or more")
    there = read_manifest(path)
    if there is None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise WriteFailed(f"{path} can't be made ({error.strerror}); choose another place") from error
        if foreign:
            raise BadInput(f"{path} holds other files ({foreign[0]}); choose another folder or delete it")
        wanted.write(path)
        return wanted
    for name in ("teacher", "prompts", "dtype", "shard_size"):
        old, new = getattr(there, name), getattr(wanted, name)
        if old != new:
            # A teacher is known by its checksum, which tells a reader nothing.
            how = f"with {name.replace('_', ' ')} {old!r}, not {new!r}"
            what = f"{path} was made {'by another teacher' if name == 'teacher' else how}"
            raise BadInput(f"{what}; choose another folder or delete it")
    return there


def _finished(path: Path, manifest: Manifest, number: int, chunk: _Chunk, progress: Progress) -> bool:
    """Whether a shard is there, of these very texts, and undamaged."""
    if number >= len(manifest.shards):
        if manifest.complete:
            raise other_texts(path)
        return False
    shard = manifest.shards[number]
    if shard.texts_fingerprint != chunk.fingerprint:
        raise other_texts(path)
    if is_whole(path, number, shard):
        return True
    progress.say(f"shard {number} of {path} is damaged and is made again")
    return False


def _labelled(path: Path, manifest: Manifest, number: int, chunk: _Chunk, vectors: Vectors) -> Manifest:
    """Store a shard, then vouch for it."""
    width = vectors.shape[1]
    if manifest.shards and width != manifest.width:
        raise other_width(manifest.width, width)
    texts = [text for text, _ in chunk.items]
    shard = write_shard(path, number, texts, vectors, dtype=manifest.dtype, fingerprint=chunk.fingerprint)
    manifest = manifest.placed(number, shard, width)
    manifest.write(path)
    return manifest


def other_texts(path: Path) -> OtherTexts:
    """What is said where a folder can't be gone on with."""
    return OtherTexts(f"{path} was made from other texts; choose another folder or delete it")


def other_width(before: int, now: int) -> BadModel:
    """What is said where two shards don't fit together."""
    return BadModel(
        f"the teacher gave vectors of {before} numbers before and of {now} now; use one teacher throughout"
    )
