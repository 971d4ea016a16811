"""The user's texts in three parts: to train on, to validate with, and to measure the result.

A hash of the text decides its part, so equal texts never end up in two. The source `environment` is the
documentation of the installed Python packages; its parts consist of complete packages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from trundle.data.environment import Documented, environment_pairs, split_by_package
from trundle.data.examples import Example, LabelledRow, _read_examples, _read_labelled
from trundle.data.sampling import _count_and_fingerprint, distinct, draw, sample
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress

ENVIRONMENT = "environment"
HELD_OUT_SHARE = 0.15
_ENOUGH_HELD_OUT = 16_000
"""About this many texts of a large corpus are not trained on."""
_FEW_HELD_OUT, _LARGEST_SHARE = 320, 0.25
"""About this many texts of a small corpus are not trained on, up to this share of it."""

Part = Literal["train", "validation", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts that can be streamed any number of times."""

    train: Callable[[], Iterator[Text]]
    """The texts to train on."""
    validation: Callable[[], Iterator[Text]]
    """The texts that decide when to stop and which checkpoint to keep."""
    held_out: Callable[[], Iterator[Text]]
    """The texts that only measure the result."""
    may_train_on: Callable[[str], bool] = lambda _text: True
    """Whether a text made from others may be trained on, because it is not a validation or held-out text."""
    examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples to train on; a source without tuples is rejected only when this is called."""
    validation_examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples to validate with: none of their queries is trained on."""
    held_out_examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples that only measure: their queries are in no other part."""
    labelled: Callable[[Part], Iterator[LabelledRow]] = lambda _part: iter(())
    """The texts or pairs with a label of one part; a pair is held out if one of its texts is."""
    facts: Callable[[], tuple[Mapping[str, Any], ...]]
    """The lineage's record of each source: its number of texts and a fingerprint of their content."""


def read_corpus(sources: Sequence[str], *, seed: int, progress: Progress = SILENT) -> Corpus:
    """Open files, folders and `environment` as one corpus; unreadable sources are rejected at once."""
    reader = _CorpusReader(tuple(dict.fromkeys(sources)), seed, progress)
    return Corpus(
        train=reader.train,
        validation=lambda: reader.texts_of("validation"),
        held_out=lambda: reader.texts_of("held_out"),
        may_train_on=reader.may_train_on,
        examples=lambda: reader.examples("train"),
        validation_examples=lambda: reader.examples("validation"),
        held_out_examples=lambda: reader.examples("held_out"),
        labelled=reader.labelled,
        facts=lambda: reader.facts_and_held_out[0],
    )


class _CorpusReader:
    """Reads the sources once for their facts and held-out texts, and again for the texts to train on."""

    def __init__(self, sources: Sequence[str], seed: int, progress: Progress) -> None:
        self._sources, self._seed, self._progress = sources, seed, progress
        for source in sources:
            if source != ENVIRONMENT:
                next(read_texts(source), None)

    @cached_property
    def _documented(self) -> dict[Part, list[Documented]]:
        pairs = environment_pairs(progress=self._progress)
        train, others = split_by_package(pairs, HELD_OUT_SHARE, self._seed)
        validation, measured = split_by_package(others, 0.5, self._seed)
        return {"train": train, "validation": validation, "held_out": measured}

    @cached_property
    def facts_and_held_out(self) -> tuple[tuple[Mapping[str, Any], ...], _HeldOutTexts]:
        held_out = _HeldOutTexts(self._seed)
        facts = []
        for source in self._sources:
            if source == ENVIRONMENT:
                pairs = itertools.chain.from_iterable(self._documented.values())
                facts.append(texts_facts(source, as_texts(pairs)))
                held_out.count += int(facts[-1]["texts"])
            else:
                facts.append(texts_facts(source, held_out.watching(source, read_texts(source))))
        return tuple(facts), held_out

    @cached_property
    def _other_documentation(self) -> frozenset[str]:
        if ENVIRONMENT not in self._sources:
            return frozenset()
        others = itertools.chain(self._documented["validation"], self._documented["held_out"])
        return frozenset(text.text for text in as_texts(others))

    def _part_of(self, text: str) -> Part:
        return _part_of(text, self.facts_and_held_out[1].share, self._seed)

    def may_train_on(self, text: str) -> bool:
        return self._part_of(text) == "train" and text not in self._other_documentation

    def train(self) -> Iterator[Text]:
        for source in self._sources:
            texts = as_texts(self._documented["train"]) if source == ENVIRONMENT else read_texts(source)
            yield from (text for text in texts if self.may_train_on(text.text))

    def texts_of(self, part: Part) -> Iterator[Text]:
        for source in self._sources:
            if source == ENVIRONMENT:
                yield from as_texts(self._documented[part])
            else:
                texts = self.facts_and_held_out[1].texts(source)
                yield from (text for text in texts if self._part_of(text.text) == part)

    def examples(self, part: Part) -> Iterator[Example]:
        found: Iterator[Example]
        for source in self._sources:
            if source == ENVIRONMENT:
                pairs = self._documented[part]
                found = (Example(query=one.query, positive=one.document, source=source) for one in pairs)
            else:
                found = (one for one in _read_examples(source) if self._part_of(one.query) == part)
            if part == "train":
                found = _usable(found, self.may_train_on)
            elif part == "validation" and source != ENVIRONMENT:
                found = _usable(found, lambda text: self._part_of(text) != "held_out")
            yield from found

    def labelled(self, part: Part) -> Iterator[LabelledRow]:
        for source in self._sources:
            if source == ENVIRONMENT:
                raise BadInput(f"{ENVIRONMENT} has texts without labels; pass a file with a text and a label")
            for row in _read_labelled(source):
                parts = {self._part_of(text) for text in row.texts}
                if part == next(one for one in ("held_out", "validation", "train") if one in parts):
                    yield row


class _HeldOutTexts:
    """Collects the texts that are not trained on while they stream by, before their number is known."""

    def __init__(self, seed: int) -> None:
        self.count, self._seed = 0, seed
        self._found: dict[str, list[tuple[float, Text]]] = {}

    @property
    def share(self) -> float:
        return _share_not_trained_on(self.count)

    def watching(self, source: str, texts: Iterable[Text]) -> Iterator[Text]:
        found = self._found.setdefault(source, [])
        full = 2 * _ENOUGH_HELD_OUT
        for text in texts:
            self.count += 1
            # The share only decreases, so a text that is dropped here would be dropped in the end.
            if (drawn := draw(text.text, self._seed)) < self.share:
                found.append((drawn, text))
                if len(found) >= full:
                    found[:] = [(drawn, text) for drawn, text in found if drawn < self.share]
                    full = 2 * max(len(found), _ENOUGH_HELD_OUT)
            yield text

    def texts(self, source: str) -> Iterator[Text]:
        return (text for drawn, text in self._found[source] if drawn < self.share)


def _share_not_trained_on(texts: int) -> float:
    texts = max(texts, 1)
    return min(max(HELD_OUT_SHARE, _FEW_HELD_OUT / texts), _LARGEST_SHARE, _ENOUGH_HELD_OUT / texts)


def _part_of(text: str, share: float, seed: int) -> Part:
    if draw(text, seed) >= share:
        return "train"
    return "validation" if draw(text, seed + 1) < 0.5 else "held_out"


def as_texts(pairs: Iterable[Documented]) -> Iterator[Text]:
    """Yield two texts per documented name: its query and its document."""
    for pair in pairs:
        yield Text(text=pair.query, kind="query")
        yield Text(text=pair.document, kind="document")


def _usable(examples: Iterable[Example], may_use: Callable[[str], bool]) -> Iterator[Example]:
    for example in examples:
        if may_use(example.query) and may_use(example.positive):
            yield replace(example, negatives=tuple(filter(may_use, example.negatives)))


def texts_facts(source: str, texts: Iterable[Text]) -> Mapping[str, Any]:
    """Return the number of texts of a source and a fingerprint of them."""
    count, fingerprint = _count_and_fingerprint(f"{text.kind or 'text'} {text.text}" for text in texts)
    return {"source": source, "texts": count, "fingerprint": fingerprint}


def unseen_texts(
    sources: Sequence[str],
    lineages: Iterable[Mapping[str, Any] | None],
    count: int,
    *,
    seed: int = 0,
    progress: Progress = SILENT,
) -> list[Text]:
    """Sample up to `count` texts that none of the models with these lineages was trained on."""
    trained = []
    for generation in lineages:
        while generation is not None:
            if generation.get("data"):
                trained.append(generation)
            generation = generation.get("parent")
    texts = (text for source in sources for text in _unseen_in(source, trained, seed, progress))
    return sample(distinct(texts, key=lambda text: text.text), count, seed=seed)


def _unseen_in(
    source: str, trained: Sequence[Mapping[str, Any]], seed: int, progress: Progress
) -> Iterator[Text]:
    if source == ENVIRONMENT:
        # Its parts are complete packages, and the seed alone decides which.
        seeds = [one["seed"] for one in trained if ENVIRONMENT in {fact["source"] for fact in one["data"]}]
        yield from read_corpus([source], seed=seeds[0] if seeds else seed, progress=progress).held_out()
        return
    fingerprint = texts_facts(source, read_texts(source))["fingerprint"]
    splits = [
        (_share_not_trained_on(sum(int(fact["texts"]) for fact in one["data"])), int(one["seed"]))
        for one in trained
        if fingerprint in {fact["fingerprint"] for fact in one["data"]}
    ]
    if splits:
        progress.say(f"{source}: was trained on, so only its held-out texts are used for measuring")
    for text in read_texts(source):
        if all(_part_of(text.text, *split) == "held_out" for split in splits):
            yield text
