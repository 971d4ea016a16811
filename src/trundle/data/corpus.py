"""The user's texts as steps see them: a part to learn from, a part to choose by, and a part that only measures.

Which part a text falls into is a hash of the text itself, so equal texts never end up in two. The documentation found
in this Python environment is a source like any other, called `environment`; its parts are whole packages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trundle.data.environment import Documented, environment_pairs, split_by_package
from trundle.data.sampling import Fingerprinted, held_out
from trundle.data.texts import Text, read_texts
from trundle.progress import SILENT, Progress

ENVIRONMENT = "environment"
HELD_OUT_SHARE = 0.15
ENOUGH_HELD_OUT = 16_000
"""Of a large corpus no more than about this many texts are kept from training."""

Part = Literal["train", "validation", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts that can be streamed as often as needed."""

    train: Callable[[], Iterator[Text]]
    """The texts a step may learn from."""
    validation: Callable[[], Iterator[Text]]
    """The texts a step may choose by: when to stop, which checkpoint to keep."""
    held_out: Callable[[], Iterator[Text]]
    """The texts that only measure the result."""
    may_train_on: Callable[[str], bool] = lambda _text: True
    """Whether a text made from others is free to learn from, or is one that is kept back."""
    facts: Callable[[], tuple[Mapping[str, Any], ...]]
    """What the lineage keeps: each source with the number of its texts and a fingerprint of their content."""


def read_corpus(sources: Sequence[str], *, seed: int, progress: Progress = SILENT) -> Corpus:
    """Files, folders and `environment`, streamed one after the other; what can't be read is refused at once."""
    for source in sources:
        if source != ENVIRONMENT:
            next(read_texts(source), None)

    @cache
    def documented() -> dict[Part, list[Documented]]:
        train, others = split_by_package(environment_pairs(progress=progress), HELD_OUT_SHARE, seed)
        validation, measured = split_by_package(others, 0.5, seed)
        return {"train": train, "validation": validation, "held_out": measured}

    def all_texts(source: str) -> Iterator[Text]:
        if source == ENVIRONMENT:
            return as_texts(itertools.chain.from_iterable(documented().values()))
        return read_texts(source)

    @cache
    def facts() -> tuple[Mapping[str, Any], ...]:
        return tuple(_facts(source, all_texts(source)) for source in sources)

    @cache
    def share() -> float:
        return kept_back(sum(int(fact["texts"]) for fact in facts()))

    @cache
    def kept_back_documentation() -> frozenset[str]:
        if ENVIRONMENT not in sources:
            return frozenset()
        others = itertools.chain(documented()["validation"], documented()["held_out"])
        return frozenset(text.text for text in as_texts(others))

    def may_train_on(text: str) -> bool:
        return part_of(text, share(), seed) == "train" and text not in kept_back_documentation()

    def part(wanted: Part) -> Iterator[Text]:
        for source in sources:
            if source == ENVIRONMENT:
                texts = as_texts(documented()[wanted])
            else:
                texts = (text for text in read_texts(source) if part_of(text.text, share(), seed) == wanted)
            yield from texts if wanted != "train" else (text for text in texts if may_train_on(text.text))

    return Corpus(
        train=lambda: part("train"),
        validation=lambda: part("validation"),
        held_out=lambda: part("held_out"),
        may_train_on=may_train_on,
        facts=facts,
    )


def kept_back(texts: int) -> float:
    """What share of so many texts is not trained on."""
    return min(HELD_OUT_SHARE, ENOUGH_HELD_OUT / max(texts, 1))


def part_of(text: str, share: float, seed: int) -> Part:
    """Which part a text belongs to; half of what is kept back validates, half measures."""
    if not held_out(text, share, seed):
        return "train"
    return "validation" if held_out(text, 0.5, seed + 1) else "held_out"


def as_texts(pairs: Iterable[Documented]) -> Iterator[Text]:
    """A documented name as two texts: what is asked for, and where it is answered."""
    for pair in pairs:
        yield Text(text=pair.query, kind="query")
        yield Text(text=pair.document, kind="document")


def _facts(source: str, texts: Iterable[Text]) -> Mapping[str, Any]:
    stream = Fingerprinted(texts)
    for _ in stream:
        pass
    return {"source": source, "texts": stream.count, "fingerprint": stream.fingerprint}
