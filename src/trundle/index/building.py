"""Texts into a store. What is stored already is not embedded again, so a build that was stopped goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from trundle.embedder import Encode
from trundle.index.contract import Store
from trundle.progress import SILENT, Progress

AT_ONCE = 512


@dataclass(frozen=True, kw_only=True)
class Built:
    """What came of a build."""

    total: int
    added: int


def build_index(
    store: Store, texts: Iterable[str], encode: Encode, *, progress: Progress = SILENT, at_once: int = AT_ONCE
) -> Built:
    """Embed the texts that are missing and store them, a part at a time; each part is kept for good."""
    added = 0
    source = iter(texts)
    with progress.task("embedding and storing", None) as advance:
        while part := list(islice(source, at_once)):
            added += _add(store, part, encode)
            advance(len(part))
    store.finish()
    return Built(total=store.count(), added=added)


def _add(store: Store, texts: Sequence[str], encode: Encode) -> int:
    new = store.missing(texts)
    if new:
        store.add(new, encode(new))
    return len(new)
