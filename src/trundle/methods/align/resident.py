"""A student's training data in the memory of a GPU: the tokens of all texts and the teacher's vectors.

Texts are tokenised once per tokenizer, on all cores, and their tokens are kept in the cache. A student whose
tokenizer splits texts like the teacher's or the original's gets their tokens with other ids; only texts that
lost a token are tokenised again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer
from torch import Tensor

from trundle.cache import cache_entry
from trundle.embedder import Tokens
from trundle.folders import atomic_folder
from trundle.methods.contract import Context
from trundle.model.heads import prompts_by_role
from trundle.model.save import tokenizer_text
from trundle.model.tokens import ShortCut, find_short_cut
from trundle.progress import SILENT, Progress
from trundle.teacher.labelling import role_of
from trundle.teacher.targets import Targets
from trundle.train.batches import Indices

_CHUNK = 16_384
"""Texts tokenised at once: enough for all cores."""
_COMPARED = 2048
"""Texts tokenised twice to see whether the original's tokens are those of the student."""
_TOKENS_PER_TEXT = 512
"""No text is expected to have more tokens than this when its memory is estimated."""
_SHARE_OF_FREE_MEMORY = 0.25
_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_TOKENS, _LENGTHS, _NAMES = "tokens.npy", "lengths.npy", "names.json"
_SPECIAL = ("cls_token", "sep_token", "pad_token", "unk_token", "mask_token", "bos_token", "eos_token")

Batch = tuple[dict[str, Any], Tensor]
"""The model's input and the teacher's vectors."""


class _Names(BaseModel):
    """The tokens of a tokenizer by name, to find the same ones in another."""

    ids: dict[str, int]
    special: dict[str, str]


@dataclass(frozen=True)
class _Resident:
    """All texts of a store, tokenised once, and their vectors, in the memory of a device."""

    short_cut: ShortCut
    tokens: Tensor
    lengths: Tensor
    starts: Tensor
    vectors: Tensor

    def gather(self, positions: Tensor, width: int) -> Batch:
        """Makes the batch of these positions, padded or cut to `width`, without a wait for the device."""
        features = self.short_cut.features(
            self.tokens, self.starts[positions], self.lengths[positions], width
        )
        return features, self.vectors[positions].float()

    def load(self, positions: Indices) -> Batch:
        """Makes the batch of these positions, padded to the longest."""
        rows = torch.from_numpy(positions).to(self.vectors.device)
        return self.gather(rows, int(self.lengths[rows].max()))


def _resident_on(
    device: torch.device, student: SentenceTransformer, targets: Targets, context: Context
) -> _Resident | None:
    """Copies a store to a GPU; returns None if it does not fit or its tokens can't be made fast."""
    if device.type != "cuda" or not _fits(targets, torch.cuda.mem_get_info(device)[0]):
        return None
    return _make_resident(student, targets, device, context)


def _fits(targets: Targets, free_bytes: int) -> bool:
    """Whether a store certainly fits into memory, by an estimate of at most one token per character."""
    characters = np.minimum(targets.lengths, _TOKENS_PER_TEXT)
    value_bytes = np.dtype(targets.manifest.dtype).itemsize
    needed = 4 * int(characters.sum()) + value_bytes * targets.width * len(targets)
    return needed < _SHARE_OF_FREE_MEMORY * free_bytes


def _make_resident(
    student: SentenceTransformer, targets: Targets, device: torch.device, context: Context
) -> _Resident | None:
    short_cut = find_short_cut(student)
    if short_cut is None:
        return None
    tokens, counts = _tokens_of(student, targets, short_cut, context)
    key = f"vectors {targets.folder} {targets.identity()} {device}"
    if key not in context.opened:
        context.opened[key] = _vectors_on(device, targets, context.progress)
    vectors, lengths = context.opened[key], torch.from_numpy(counts).to(device)
    return _Resident(
        short_cut, torch.from_numpy(tokens).to(device), lengths, lengths.cumsum(0) - lengths, vectors
    )


def _vectors_on(device: torch.device, targets: Targets, progress: Progress) -> Tensor:
    dtype = np.dtype(targets.manifest.dtype)
    vectors = torch.empty((len(targets), targets.width), dtype=_DTYPES[dtype.name], device=device)
    with progress.task("copying the teacher's vectors", len(targets)) as advance:
        for start in range(0, len(targets), _CHUNK):
            stop = min(start + _CHUNK, len(targets))
            vectors[start:stop] = torch.from_numpy(targets.rows(start, stop)).to(device)
            advance(stop - start)
    return vectors


def _tokens_of(
    student: SentenceTransformer, targets: Targets, short_cut: ShortCut, context: Context
) -> Tokens:
    """The student's tokens of all texts: kept ones, or another tokenizer's with other ids, or new ones."""
    place = _cached_at(student, targets, context.cache)
    if (found := _read(place)) is not None:
        return found
    tokens = None
    if (teachers := _read_teachers(student, targets, context.cache)) is not None:
        tokens = _mapped(*teachers, student, targets, short_cut)
    if tokens is None and tokenizer_text(context.original) != tokenizer_text(student):
        originals = _originals(student, targets, context)
        tokens = None if originals is None else _mapped(*originals, student, targets, short_cut)
    if tokens is None:
        tokens = _tokenised(student, targets, np.arange(len(targets)), short_cut, context.progress)
    _write(place, tokens)
    return tokens


def _write(place: Path, tokens: Tokens, names: _Names | None = None) -> None:
    with atomic_folder(place, replace=True, marks=(_TOKENS, _LENGTHS)) as scratch:
        np.save(scratch / _TOKENS, tokens[0])
        np.save(scratch / _LENGTHS, tokens[1])
        if names is not None:
            (scratch / _NAMES).write_text(names.model_dump_json(), encoding="utf-8")


def _cached_at(
    model: SentenceTransformer, targets: Targets, cache: Path, prompts: Mapping[Any, str] | None = None
) -> Path:
    """Where the tokens of a store's texts are kept; `prompts` replace the model's own."""
    digest = blake2b(tokenizer_text(model).encode(), digest_size=16).hexdigest()
    settings = [prompts or prompts_by_role(model), model.max_seq_length]
    return cache_entry("tokens", targets.identity(), digest, settings, root=cache)


def _read(place: Path) -> Tokens | None:
    """Reads kept tokens; None if there are none, or they were written by something else."""
    try:
        tokens, counts = np.load(place / _TOKENS), np.load(place / _LENGTHS)
    except (OSError, ValueError, EOFError):
        return None
    matches = tokens.dtype == np.int32 and counts.dtype == np.int64 and counts.sum() == len(tokens)
    return (tokens, counts) if matches else None


def _teachers_place(model: SentenceTransformer, targets: Targets, cache: Path) -> Path:
    """Where a teacher's tokens are kept for students with the same prompts and the same longest text."""
    settings = [prompts_by_role(model), model.max_seq_length]
    return cache_entry("tokens", targets.identity(), "teacher", settings, root=cache)


def _keep_teachers_tokens(
    teacher: SentenceTransformer, targets: Targets, parts: Sequence[Tokens], cache: Path
) -> None:
    """Keeps the tokens that a teacher read, unless those of some texts are missing."""
    if sum(len(counts) for _, counts in parts) != len(targets) or targets.is_share:
        return
    tokens, counts = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    _write(_teachers_place(teacher, targets, cache), (tokens, counts), _names_of(teacher.tokenizer))


def _read_teachers(
    student: SentenceTransformer, targets: Targets, cache: Path
) -> tuple[Tokens, _Names] | None:
    place = _teachers_place(student, targets, cache)
    try:
        names = _Names.model_validate_json((place / _NAMES).read_bytes())
    except (OSError, ValueError):
        return None
    tokens = _read(place)
    return None if tokens is None else (tokens, names)


def _originals(
    student: SentenceTransformer, targets: Targets, context: Context
) -> tuple[Tokens, _Names] | None:
    """The tokens of the model that the run started from; kept, because other students are cut from it too."""
    original = context.original
    own_length, original.max_seq_length = original.max_seq_length, student.max_seq_length
    try:
        place = _cached_at(original, targets, context.cache, prompts_by_role(student))
        if (known := _read(place)) is None:
            if (own := find_short_cut(original)) is None:
                return None
            known = _tokenised(student, targets, np.arange(len(targets)), own, context.progress)
            _write(place, known)
    finally:
        original.max_seq_length = own_length
    return known, _names_of(original.tokenizer)


def _tokenised(
    student: SentenceTransformer,
    targets: Targets,
    positions: Indices,
    short_cut: ShortCut,
    progress: Progress,
) -> Tokens:
    prompts, tokens, counts = prompts_by_role(student), [np.empty(0, np.int32)], [np.empty(0, np.int64)]
    with progress.task("tokenising", len(positions)) as advance:
        for start in range(0, len(positions), _CHUNK):
            chunk = positions[start : start + _CHUNK]
            flat, lengths = short_cut.flat(_prompted(targets, chunk, prompts))
            tokens.append(flat)
            counts.append(lengths)
            advance(len(chunk))
    return np.concatenate(tokens), np.concatenate(counts)


def _prompted(targets: Targets, positions: Indices, prompts: Mapping[Any, str]) -> list[str]:
    """Returns texts, each with the prompt of its role before it."""
    texts, kinds = targets.texts(positions), targets.kinds(positions)
    return [prompts[role_of(kind)] + text for text, kind in zip(texts, kinds, strict=True)]


def _mapped(
    known: Tokens, names: _Names, student: SentenceTransformer, targets: Targets, short_cut: ShortCut
) -> Tokens | None:
    """Another tokenizer's tokens under the student's ids; None if a sample shows that they are others."""
    tokens, counts = known
    ids = _id_map(names, _names_of(student.tokenizer))
    tokens = ids[tokens]
    starts = counts.cumsum() - counts
    lost = np.zeros(len(counts), bool)
    lost[np.unique(np.searchsorted(starts, np.flatnonzero(tokens < 0), side="right") - 1)] = True
    kept = np.flatnonzero(~lost)
    sample = kept[np.linspace(0, len(kept) - 1, min(_COMPARED, len(kept)), dtype=np.int64)]
    flat, lengths = short_cut.flat(_prompted(targets, sample, prompts_by_role(student)))
    expected = np.concatenate(
        [np.empty(0, np.int32), *(tokens[starts[row] : starts[row] + counts[row]] for row in sample)]
    )
    if not np.array_equal(lengths, counts[sample]) or not np.array_equal(flat, expected):
        return None
    again = np.flatnonzero(lost)
    fresh, new_counts = _tokenised(student, targets, again, short_cut, SILENT)
    sizes = counts.copy()
    sizes[again] = new_counts
    result = np.empty(int(sizes.sum()), np.int32)
    is_new = np.repeat(lost, sizes)
    result[is_new], result[~is_new] = fresh, tokens[~np.repeat(lost, counts)]
    return result, sizes


def _names_of(tokenizer: Any) -> _Names:
    special = {name: getattr(tokenizer, name) for name in _SPECIAL if getattr(tokenizer, name) is not None}
    return _Names(ids=tokenizer.get_vocab(), special=special)


def _id_map(old: _Names, new: _Names) -> NDArray[np.int32]:
    """The new id of each old one, by the token's string or its special role; −1 if it is gone."""
    # A token with two roles, such as RoBERTa's <s>, may have only one of them in the other tokenizer.
    same = {token: new.special[role] for role, token in old.special.items() if role in new.special}
    ids = np.full(max(old.ids.values()) + 1, -1, np.int32)
    for token, number in old.ids.items():
        ids[number] = new.ids.get(same.get(token, token), -1)
    return ids
