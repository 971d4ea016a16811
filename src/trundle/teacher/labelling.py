"""Compute a teacher's vectors of many texts and store them, one shard at a time.

Duplicate texts are left out. Memory holds a few shards and a table of hashes (at most 48 bytes per text). A
killed run loses at most the call that is encoded and the one that is written: running again checks the
finished shards against the texts and computes only what is missing or damaged. One process writes a folder at
a time; others wait. `trundle.scale` fills one folder with many workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trundle.data.texts import KINDS, Kind, Text
from trundle.embedder import Embedder, Role, Tokens, Vectors, check_vectors
from trundle.errors import BadInput, BadModel, OtherTexts, TrundleError, WriteFailed
from trundle.folders import locked_folder
from trundle.progress import SILENT, Advance, Progress, ahead
from trundle.teacher import shards as store
from trundle.teacher.shards import Manifest, write_shard
from trundle.teacher.targets import Targets, open_targets

SHARD_CHARACTERS = 1 << 25
"""A shard ends early when its texts have this many characters, so that long texts do not fill the memory."""
_TEXTS_PER_CALL = 2048
_QUICK_CALL = 2.0
"""If a call takes fewer seconds, the next one gets twice as many texts, up to what the teacher likes."""
_KEY_BYTES = 16
_KIND_ENDINGS = {kind: f"{kind}\n".encode() for kind in (None, *KINDS)}
_HASHED_TEXTS = 1024
"""Texts that are hashed and looked up at once."""

_LabelItem: TypeAlias = "tuple[Text, Vectors | None]"
"""A text, and its vector if that is known already."""


class _Seen:
    """A set of 16-byte hashes in one flat table: 24 to 48 bytes per key; a Python set takes about 100.

    The first bytes of a key give its slot; if that is taken, the next free slot is used. The table doubles
    when two thirds are full. No key may be all zeros.
    """

    def __init__(self) -> None:
        self._table = np.zeros((1 << 12, 2), dtype="<u8")
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Add keys and return which of them are new; of equal ones only the first is."""
        first = {key: place for place, key in reversed(list(enumerate(keys)))}
        places = np.fromiter(first.values(), np.int64, len(first))
        while 3 * (self._count + len(places)) > 2 * len(self._table):
            old = self._table[self._table.any(axis=1)]
            self._table = np.zeros((2 * len(self._table), 2), dtype="<u8")
            self._insert(old)
        new = np.zeros(len(keys), dtype=np.bool_)
        new[places] = self._insert(np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 2)[places])
        self._count += int(new.sum())
        return new

    def _insert(self, keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Insert distinct keys and return which of them were not there."""
        table, new, left = self._table, np.zeros(len(keys), dtype=np.bool_), np.arange(len(keys))
        slots = (keys[:, 0] & np.uint64(len(table) - 1)).astype(np.int64)
        while len(left):
            wanted, at = keys[left], slots[left]
            free = ~table[at].any(axis=1)
            table[at[free]] = wanted[free]  # of several keys for one slot, one gets it
            placed = (table[at] == wanted).all(axis=1)
            new[left[placed & free]] = True
            left = left[~placed]
            slots[left] = (slots[left] + 1) % len(table)
        return new


def build_targets(
    texts: Iterable[Text],
    teacher: Embedder,
    wanted: Manifest,
    folder: str | Path,
    *,
    keep_tokens: Callable[[Tokens], None] | None = None,
    progress: Progress = SILENT,
) -> Targets:
    """Store the teacher's vector of every distinct text, each encoded in the role of its kind.

    The settings of `wanted` are recorded; they must be the same for the folder to be resumed or reused.
    `keep_tokens` gets the tokens of all texts that are encoded, in their order, if the teacher has them.
    """
    two_steps = teacher.two_steps()

    def prepare(items: list[_LabelItem]) -> tuple[list[Text], Tokens | None]:
        texts = [text for text, _ in items]
        if two_steps is None:
            return texts, None
        roles = [role_of(text.kind) for text in texts]
        return texts, two_steps.tokenise([text.text for text in texts], roles)

    def label(prepared: tuple[list[Text], Tokens | None], advance: Advance) -> Vectors:
        texts, tokens = prepared
        if two_steps is None or tokens is None:
            return encode_by_role(teacher, texts, advance)
        vectors = check_vectors(
            two_steps.encode(tokens), [text.text for text in texts], "the teacher", zeros=False
        )
        if keep_tokens is not None:
            keep_tokens(tokens)
        advance(len(texts))
        return vectors

    total = len(texts) if isinstance(texts, Sized) else None
    items, at_once = ((text, None) for text in texts), teacher.texts_per_call or 0
    return _store(items, label, wanted, folder, prepare, at_once, total=total, progress=progress)


def _store(
    items: Iterable[_LabelItem],
    label: Callable[[Any, Advance], Vectors],
    wanted: Manifest,
    folder: str | Path,
    prepare: Callable[[list[_LabelItem]], Any] = lambda items: items,
    texts_per_call: int = 0,
    *,
    total: int | None = None,
    progress: Progress = SILENT,
) -> Targets:
    """Fill or finish a folder that must match `wanted`; `label` gets what `prepare` makes in a thread.

    It gets several shards at once if they have no more texts than `texts_per_call` and it is quick.
    """
    path = Path(folder)
    with locked_targets(path, progress):
        manifest = store._with_recorded(path, start_or_resume(path, wanted))
        splitter = _Splitter(items=items, shard_size=wanted.shard_size)
        written: Future[Manifest] = Future()
        written.set_result(manifest)
        try:
            with (
                progress.task("teacher vectors", total) as advance,
                ahead(splitter.split(advance), count=max(1, texts_per_call // wanted.shard_size)) as ready,
                ahead(
                    (shards, prepare([item for _, pending in shards for item in pending.items]))
                    for shards in _calls(_missing(path, manifest, ready, progress, advance), texts_per_call)
                ) as calls,
                ThreadPoolExecutor(1) as pool,
            ):
                for shards, prepared in calls:
                    vectors = label(prepared, advance)
                    written.result()  # raises the error of the thread; memory holds three calls
                    written = pool.submit(_add_shards, path, written, shards, vectors)
                manifest = written.result()
        except TrundleError as error:
            there = store.read_manifest(path)
            if there is not None and there.shards and not isinstance(error, OtherTexts):
                progress.say(f"{there.count} texts have their vectors in {path}; run again to resume")
            raise
        if not splitter.shards:
            raise BadInput("there are no texts to train on; pass a source that holds some")
        if splitter.shards < len(manifest.shards):
            raise other_texts_error(path)
        if splitter.repeats:
            progress.say(f"{splitter.repeats} duplicate texts were left out")
        if not manifest.complete:
            manifest.model_copy(update={"complete": True, "repeats": splitter.repeats}).write(path)
        store.drop_records(path)
        return open_targets(path)


def locked_targets(folder: Path, progress: Progress) -> AbstractContextManager[None]:
    """Hold the lock of a folder that is filled, or wait for it."""
    notice = "another process computes the same vectors; this one waits for them"
    return locked_folder(folder, lambda: progress.say(notice))


def encode_by_role(
    teacher: Embedder, texts: Sequence[Text], advance: Advance = lambda _units: None
) -> Vectors:
    """Return the teacher's vectors in the order of the texts; they are encoded by role.

    A teacher that does not say how many texts it likes gets the longest first.
    """
    vectors: Vectors | None = None
    roles = [role_of(text.kind) for text in texts]
    size = teacher.texts_per_call or _TEXTS_PER_CALL
    for role, encode in (("text", teacher.text), ("query", teacher.query), ("document", teacher.document)):
        rows = [row for row, own in enumerate(roles) if own == role]
        if teacher.texts_per_call is None:
            rows.sort(key=lambda row: len(texts[row].text), reverse=True)
        for start in range(0, len(rows), size):
            asked = rows[start : start + size]
            plain = [texts[row].text for row in asked]
            answer = check_vectors(encode(plain), plain, "the teacher", zeros=False)
            if teacher.texts_per_call is not None and len(asked) == len(texts):
                advance(len(asked))
                return answer
            if vectors is None:
                vectors = np.empty((len(texts), answer.shape[1]), dtype=np.float32)
            if answer.shape[1] != vectors.shape[1]:
                raise other_width_error(vectors.shape[1], answer.shape[1])
            vectors[asked] = answer
            advance(len(asked))
    if vectors is None:
        raise BadInput("there are no texts to encode; pass at least one")
    return vectors


def role_of(kind: Kind | None) -> Role:
    """Return the role of a kind: queries and documents have their own, all others are plain texts."""
    return kind if kind == "query" or kind == "document" else "text"


@dataclass(frozen=True, kw_only=True)
class _PendingShard:
    items: Sequence[_LabelItem]
    fingerprint: str


_NumberedShard: TypeAlias = tuple[int, _PendingShard]


@dataclass(kw_only=True)
class _Splitter:
    """Splits a stream into shards of distinct texts, and counts the duplicates."""

    items: Iterable[_LabelItem]
    shard_size: int
    repeats: int = 0
    shards: int = 0

    def split(self, advance: Advance) -> Iterator[_PendingShard]:
        """Yield the shards in order; duplicates are reported to `advance`."""
        seen, stream = _Seen(), enumerate(self.items, 1)
        items: list[_LabelItem] = []
        keys: list[bytes] = []
        characters = 0

        def shard() -> _PendingShard:
            self.shards += 1
            return _PendingShard(items=items, fingerprint=fingerprint(keys, [text for text, _ in items]))

        while chunk := list(islice(stream, _HASHED_TEXTS)):
            hashed = [text_key(item[0], number) for number, item in chunk]
            new = seen.add(hashed).tolist()
            for (_, item), key in compress(zip(chunk, hashed, strict=True), new):
                items.append(item)
                keys.append(key)
                characters += len(item[0].text)
                if len(items) == self.shard_size or characters >= SHARD_CHARACTERS:
                    yield shard()
                    items, keys, characters = [], [], 0
            self.repeats += (repeats := new.count(False))
            advance(repeats)
        if items:
            yield shard()


def text_key(text: Text, number: int) -> bytes:
    """Return the hash of a text in its role; an invalid text is an error that names its `number`."""
    if not isinstance(text.text, str) or not text.text or text.text.isspace():
        raise BadInput(f"text {number} is empty or not a string; leave it out")
    try:
        raw = f"{role_of(text.kind)}\0{text.text}".encode()
    except UnicodeEncodeError as error:
        fix = "clean it with text.encode('utf-8', 'replace').decode()"
        raise BadInput(f"text {number} holds an unpaired surrogate; {fix}") from error
    return blake2b(raw, digest_size=_KEY_BYTES).digest()


def fingerprint(keys: Iterable[bytes], texts: Iterable[Text]) -> str:
    """Return the hash of a shard's texts and kinds; `keys` are those of `text_key`."""
    parts = [key + _KIND_ENDINGS[text.kind] for key, text in zip(keys, texts, strict=True)]
    return blake2b(b"".join(parts), digest_size=_KEY_BYTES).hexdigest()


def start_or_resume(path: Path, wanted: Manifest) -> Manifest:
    """Return the folder's manifest, or write `wanted` to a new folder; any other folder is an error."""
    if wanted.shard_size < 1:
        raise BadInput(f"the shard size is {wanted.shard_size}; pass 1 or more")
    there = store.read_manifest(path)
    if there is None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in path.iterdir() if not entry.name.startswith(".")]
        except OSError as error:
            raise WriteFailed(f"{path} can't be created ({error.strerror}); choose another folder") from error
        if foreign:
            raise BadInput(f"{path} holds other files ({foreign[0]}); choose another folder or delete it")
        wanted.write(path)
        return wanted
    for name in ("teacher", "prompts", "dtype", "shard_size"):
        old, new = getattr(there, name), getattr(wanted, name)
        if old != new:
            how = f"with {name.replace('_', ' ')} {old!r}, not {new!r}"
            if name == "teacher":  # its identity is a checksum, which tells a reader nothing
                how = "by another teacher"
            raise BadInput(f"{path} was made {how}; choose another folder or delete it")
    return there


def _missing(
    path: Path, manifest: Manifest, ready: Iterable[_PendingShard], progress: Progress, advance: Advance
) -> Iterator[_NumberedShard]:
    """Yield the shards that are not stored or damaged, with their numbers; one of other texts is an error."""
    for number, pending in enumerate(ready):
        shard = manifest.shards[number] if number < len(manifest.shards) else None
        if manifest.complete if shard is None else shard.texts_fingerprint != pending.fingerprint:
            raise other_texts_error(path)
        if shard is not None and store.is_intact(path, number, shard):
            advance(len(pending.items))
            continue
        if shard is not None:
            progress.say(f"shard {number} of {path} is damaged and is computed again")
        yield number, pending


def _calls(shards: Iterable[_NumberedShard], texts_per_call: int) -> Iterator[list[_NumberedShard]]:
    """Yield the shards of each call: one at first, and twice as many texts after each quick call."""
    size, call = 1, []
    for shard in shards:
        call.append(shard)
        count = sum(len(pending.items) for _, pending in call)
        if count >= size:
            began = time.monotonic()
            yield call
            if time.monotonic() - began < _QUICK_CALL:
                size = min(2 * count, texts_per_call)
            call = []
    if call:
        yield call


def _add_shards(
    path: Path, before: Future[Manifest], shards: Sequence[_NumberedShard], vectors: Vectors
) -> Manifest:
    """Write shards, whose vectors follow one another, and return the manifest that names them."""
    manifest, width, start = before.result(), vectors.shape[1], 0
    for number, pending in shards:
        if manifest.shards and width != manifest.width:
            raise other_width_error(manifest.width, width)
        texts, end = [text for text, _ in pending.items], start + len(pending.items)
        own, mark = vectors[start:end], pending.fingerprint
        shard = write_shard(path, number, texts, own, dtype=manifest.dtype, fingerprint=mark)
        listed = (*manifest.shards[:number], shard, *manifest.shards[number + 1 :])
        manifest, start = manifest.with_shards(listed, width), end
        manifest.write(path)
    return manifest


def other_texts_error(path: Path) -> OtherTexts:
    """Return the error for a folder that cannot be resumed because its texts are others."""
    return OtherTexts(f"{path} was made from other texts; choose another folder or delete it")


def other_width_error(before: int, now: int) -> BadModel:
    """Return the error for a teacher whose vectors change their width."""
    return BadModel(f"the teacher returned vectors of width {before} before and {now} now; use one teacher")
