"""The user's texts as steps see them: a part to learn from, a part to choose by, and a part that only measures.

Which part a text falls into is a hash of the text itself, so equal texts never end up in two. The documentation found
in this Python environment is a source like any other, called `environment`; its parts are whole packages.

Files are read once for their fingerprint and for the few texts that are kept back, and once more only when somebody
asks for the texts to learn from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from trundle.data.environment import Documented, environment_pairs, split_by_package
from trundle.data.examples import Example, LabelledRow, _read_examples, _read_labelled
from trundle.data.sampling import _Fingerprinted, _held_out, distinct, draw, sample
from trundle.data.texts import Text, read_texts
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress

ENVIRONMENT = "environment"
HELD_OUT_SHARE = 0.15
_ENOUGH_HELD_OUT = 16_000
"""Of a large corpus no more than about this many texts are kept from training."""
_FEW_HELD_OUT, _LARGEST_SHARE = 320, 0.25
"""Of a small one about this many are, so that a measurement means something, up to this share of it."""

Part = Literal["train", "validation", "held_out"]
_MOST_KEPT_FIRST: tuple[Part, ...] = ("held_out", "validation", "train")


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
    examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples a step may learn from, read when asked for: sources without them are refused only then."""
    validation_examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples a step may choose by: none of their queries is learned from."""
    held_out_examples: Callable[[], Iterator[Example]] = lambda: iter(())
    """The labelled tuples that only measure the result: their queries are neither learned from nor chosen by."""
    labelled: Callable[[Part], Iterator[LabelledRow]] = lambda _part: iter(())
    """The texts or pairs with a label of one part, read when asked for; a pair is kept back if one of its texts is."""
    facts: Callable[[], tuple[Mapping[str, Any], ...]]
    """What the lineage keeps: each source with the number of its texts and a fingerprint of their content."""


def read_corpus(sources: Sequence[str], *, seed: int, progress: Progress = SILENT) -> Corpus:
    """Files, folders and `environment`, streamed one after the other; what can't be read is refused at once."""
    sources = tuple(dict.fromkeys(sources))
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
    def first_reading() -> tuple[tuple[Mapping[str, Any], ...], _KeptBack]:
        back = _KeptBack(seed)
        facts = []
        for source in sources:
            if source == ENVIRONMENT:
                facts.append(texts_facts(source, all_texts(source)))
                back.count += int(facts[-1]["texts"])
            else:
                facts.append(texts_facts(source, back.watching(source, read_texts(source))))
        return tuple(facts), back

    def share() -> float:
        return first_reading()[1].share

    @cache
    def kept_back_documentation() -> frozenset[str]:
        if ENVIRONMENT not in sources:
            return frozenset()
        others = itertools.chain(documented()["validation"], documented()["held_out"])
        return frozenset(text.text for text in as_texts(others))

    def may_train_on(text: str) -> bool:
        return _part_of(text, share(), seed) == "train" and text not in kept_back_documentation()

    def train() -> Iterator[Text]:
        for source in sources:
            texts = as_texts(documented()["train"]) if source == ENVIRONMENT else read_texts(source)
            yield from (text for text in texts if may_train_on(text.text))

    def kept(wanted: Part) -> Iterator[Text]:
        for source in sources:
            if source == ENVIRONMENT:
                yield from as_texts(documented()[wanted])
            else:
                texts = first_reading()[1].texts(source)
                yield from (text for text in texts if _part_of(text.text, share(), seed) == wanted)

    def examples() -> Iterator[Example]:
        for source in sources:
            read = _as_examples(documented()["train"]) if source == ENVIRONMENT else _read_examples(source)
            yield from _trainable(read, may_train_on)

    def validation_examples() -> Iterator[Example]:
        def may_choose_by(text: str) -> bool:
            return _part_of(text, share(), seed) != "held_out"

        for source in sources:
            if source == ENVIRONMENT:
                yield from _as_examples(documented()["validation"])
            else:
                asked = (
                    example
                    for example in _read_examples(source)
                    if _part_of(example.query, share(), seed) == "validation"
                )
                yield from _trainable(asked, may_choose_by)

    def held_out_examples() -> Iterator[Example]:
        for source in sources:
            if source == ENVIRONMENT:
                yield from _as_examples(documented()["held_out"])
            else:
                read = _read_examples(source)
                yield from (one for one in read if _part_of(one.query, share(), seed) == "held_out")

    def labelled(wanted: Part) -> Iterator[LabelledRow]:
        for source in sources:
            if source == ENVIRONMENT:
                raise BadInput(f"{ENVIRONMENT} has texts without labels; give a file with a text and a label")
            for row in _read_labelled(source):
                parts = {_part_of(text, share(), seed) for text in row.texts}
                if wanted == next(part for part in _MOST_KEPT_FIRST if part in parts):
                    yield row

    return Corpus(
        train=train,
        validation=lambda: kept("validation"),
        held_out=lambda: kept("held_out"),
        may_train_on=may_train_on,
        examples=examples,
        validation_examples=validation_examples,
        held_out_examples=held_out_examples,
        labelled=labelled,
        facts=lambda: first_reading()[0],
    )


class _KeptBack:
    """Collects the texts that are not trained on while they stream by, before anybody knows how many there will be.

    The share kept back only ever falls with the number of texts, and what is within a small share is within a larger
    one: so what is dropped on the way would not have been kept in the end.
    """

    def __init__(self, seed: int) -> None:
        self.count = 0
        self._seed = seed
        self._found: dict[str, list[tuple[float, Text]]] = {}

    @property
    def share(self) -> float:
        """What share of the texts so far is kept back."""
        return _kept_back(self.count)

    def watching(self, source: str, texts: Iterable[Text]) -> Iterator[Text]:
        """Pass a source's texts through."""
        found = self._found.setdefault(source, [])
        full = 2 * _ENOUGH_HELD_OUT
        for text in texts:
            self.count += 1
            drawn = draw(text.text, self._seed)
            if drawn < self.share:
                found.append((drawn, text))
                if len(found) >= full:
                    found[:] = [(drawn, text) for drawn, text in found if drawn < self.share]
                    full = 2 * max(len(found), _ENOUGH_HELD_OUT)
            yield text

    def texts(self, source: str) -> Iterator[Text]:
        """The texts of a source that are kept back, in their order."""
        return (text for drawn, text in self._found[source] if drawn < self.share)


def _kept_back(texts: int) -> float:
    """What share of so many texts is not trained on."""
    texts = max(texts, 1)
    return min(max(HELD_OUT_SHARE, _FEW_HELD_OUT / texts), _LARGEST_SHARE, _ENOUGH_HELD_OUT / texts)


def _part_of(text: str, share: float, seed: int) -> Part:
    """Which part a text belongs to; half of what is kept back validates, half measures."""
    if not _held_out(text, share, seed):
        return "train"
    return "validation" if _held_out(text, 0.5, seed + 1) else "held_out"


def as_texts(pairs: Iterable[Documented]) -> Iterator[Text]:
    """A documented name as two texts: what is asked for, and where it is answered."""
    for pair in pairs:
        yield Text(text=pair.query, kind="query")
        yield Text(text=pair.document, kind="document")


def _as_examples(pairs: Iterable[Documented]) -> Iterator[Example]:
    """A documented name as a labelled tuple."""
    for pair in pairs:
        yield Example(query=pair.query, positive=pair.document, source=ENVIRONMENT)


def _trainable(examples: Iterable[Example], may_use: Callable[[str], bool]) -> Iterator[Example]:
    """The tuples whose query and positive are free to use, without the negatives that are not."""
    for example in examples:
        if may_use(example.query) and may_use(example.positive):
            yield replace(example, negatives=tuple(filter(may_use, example.negatives)))


def texts_facts(source: str, texts: Iterable[Text]) -> Mapping[str, Any]:
    """How many texts a source has, and a fingerprint of them."""
    stream = _Fingerprinted(f"{text.kind or 'text'} {text.text}" for text in texts)
    for _ in stream:
        pass
    return {"source": source, "texts": stream.count, "fingerprint": stream.fingerprint}


_Lineages = Iterable[Mapping[str, Any] | None]


def unseen_texts(
    sources: Sequence[str], lineages: _Lineages, count: int, *, seed: int = 0, progress: Progress = SILENT
) -> list[Text]:
    """At most `count` texts that none of the models with these lineages has learned from."""
    learned = [part for lineage in lineages for part in _generations(lineage)]
    streams = (_of_source(source, learned, seed, progress) for source in sources)
    texts = (text for stream in streams for text in stream)
    return sample(distinct(texts, key=lambda text: text.text), count, seed=seed)


def _generations(lineage: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """A lineage and those of the models it was made from, where texts were used."""
    while lineage is not None:
        if lineage.get("data"):
            yield lineage
        lineage = lineage.get("parent")


def _of_source(
    source: str, learned: Sequence[Mapping[str, Any]], seed: int, progress: Progress
) -> Iterator[Text]:
    if source == ENVIRONMENT:
        # Its parts are whole packages; which ones is a matter of the seed alone.
        seeds = [part["seed"] for part in learned if ENVIRONMENT in {fact["source"] for fact in part["data"]}]
        yield from read_corpus([source], seed=seeds[0] if seeds else seed, progress=progress).held_out()
        return
    fingerprint = texts_facts(source, read_texts(source))["fingerprint"]
    kept = [_was_kept(part) for part in learned if fingerprint in _fingerprints(part)]
    if kept:
        progress.say(f"{source}: learned from, so only what was held out then is measured on")
    yield from (text for text in read_texts(source) if all(held(text.text) for held in kept))


def _fingerprints(lineage: Mapping[str, Any]) -> set[str]:
    return {fact["fingerprint"] for fact in lineage["data"]}


def _was_kept(lineage: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a text was held out when the model with this lineage was made."""
    share = _kept_back(sum(int(fact["texts"]) for fact in lineage["data"]))
    return lambda text: _part_of(text, share, int(lineage["seed"])) == "held_out"
