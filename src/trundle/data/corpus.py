"""The user's texts as steps see them: a part to learn from, and a part that only measures.

Which side a text falls on is a hash of the text itself, so equal texts never end up on both sides. The documentation
found in this Python environment is a source like any other, called `environment`; it is split by package.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from trundle.data.environment import Documented, environment_pairs, split_by_package
from trundle.data.sampling import Fingerprinted, held_out
from trundle.data.texts import Text, read_texts
from trundle.progress import SILENT, Progress

ENVIRONMENT = "environment"
HELD_OUT_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts that can be streamed as often as needed."""

    train: Callable[[], Iterator[Text]]
    """The texts a step may learn from."""
    held_out: Callable[[], Iterator[Text]]
    """The texts that only measure."""
    facts: Callable[[], tuple[Mapping[str, Any], ...]]
    """What the lineage keeps: each source with the number of its texts and a fingerprint of their content."""


def read_corpus(sources: Sequence[str], *, seed: int, progress: Progress = SILENT) -> Corpus:
    """Files, folders and `environment`, streamed one after the other; what can't be read is refused at once."""
    for source in sources:
        if source != ENVIRONMENT:
            next(read_texts(source), None)

    @cache
    def documented() -> tuple[list[Documented], list[Documented]]:
        return split_by_package(environment_pairs(progress=progress), HELD_OUT_SHARE, seed)

    def texts_of(source: str, side: bool | None) -> Iterator[Text]:
        if source == ENVIRONMENT:
            train, measured = documented()
            return as_texts(train + measured if side is None else measured if side else train)
        return _on_side(read_texts(source), side, seed)

    def side(measured: bool) -> Iterator[Text]:
        return itertools.chain.from_iterable(texts_of(source, measured) for source in sources)

    def facts() -> tuple[Mapping[str, Any], ...]:
        return tuple(_facts(source, texts_of(source, None)) for source in sources)

    return Corpus(train=lambda: side(False), held_out=lambda: side(True), facts=cache(facts))


def as_texts(pairs: Iterable[Documented]) -> Iterator[Text]:
    """A documented name as two texts: what is asked for, and where it is answered."""
    for pair in pairs:
        yield Text(text=pair.query, kind="query")
        yield Text(text=pair.document, kind="document")


def _on_side(texts: Iterable[Text], side: bool | None, seed: int) -> Iterator[Text]:
    return (text for text in texts if side is None or held_out(text.text, HELD_OUT_SHARE, seed) is side)


def _facts(source: str, texts: Iterable[Text]) -> Mapping[str, Any]:
    stream = Fingerprinted(texts)
    for _ in stream:
        pass
    return {"source": source, "texts": stream.count, "fingerprint": stream.fingerprint}
