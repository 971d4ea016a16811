"""The user's texts in three parts: to train on, to validate with, and to measure the result.

A hash of the text decides its part, so equal texts never end up in two. The source `environment` is the
documentation of the installed Python packages; its parts consist of complete packages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trundle.data.environment import _Documented, environment_pairs, split_by_package
from trundle.data.examples import Example, LabelledRow, _read_examples, _read_labelled
from trundle.data.sampling import _drawn, distinct, draw, key_bits, sample
from trundle.data.text_store import TextStore, _is_stored, _read_store
from trundle.data.texts import Text, parse_source, read_texts
from trundle.errors import BadInput
from trundle.progress import SILENT, Progress

ENVIRONMENT = "environment"
HELD_OUT_SHARE = 0.15
_ENOUGH_HELD_OUT = 16_000
"""About this many texts of a large corpus are not trained on."""
_FEW_HELD_OUT, _LARGEST_SHARE = 320, 0.25
"""About this many texts of a small corpus are not trained on, up to this share of it."""

Part = Literal["train", "validation", "held_out"]
_PARTS: tuple[Part, ...] = get_args(Part)
_Chosen = tuple[TextStore, NDArray[np.int64]]


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
    distinct_texts: Callable[[int | None, int], Iterator[Text]] | None = None
    """A faster `distinct_train`."""
    sampled_texts: Callable[[int, int], Iterator[Text]] | None = None
    """A faster `sample_train`."""
    files: tuple[str, ...] = ()
    """The files that are read."""

    def distinct_train(self, most: int | None, seed: int) -> Iterator[Text]:
        """Return the texts to train on, each kind and text once; a sample of them unless `most` is None."""
        if self.distinct_texts is not None:
            return self.distinct_texts(most, seed)
        texts = distinct(self.train(), key=lambda text: f"{text.kind}\0{text.text}")
        return texts if most is None else iter(sample(texts, most, seed))

    def sample_train(self, count: int, seed: int) -> Iterator[Text]:
        """Return a sample of the texts to train on; those of files are drawn without reading the others."""
        if self.sampled_texts is not None:
            return self.sampled_texts(count, seed)
        return iter(sample(self.train(), count, seed))


def read_corpus(sources: Sequence[str], *, seed: int, progress: Progress = SILENT) -> Corpus:
    """Open files, folders and `environment` as one corpus; unreadable sources are rejected at once."""
    reader = _CorpusReader(tuple(dict.fromkeys(sources)), seed, progress)
    return _corpus_from(reader, files=tuple(files_of(sources)))


def files_of(sources: Iterable[str]) -> list[str]:
    """Return the files of the sources, each once."""
    named = [source for source in sources if source != ENVIRONMENT]
    return list(dict.fromkeys(str(file) for source in named for file in parse_source(source).files))


def corpus_of(texts: Iterable[Text], name: str, *, seed: int) -> Corpus:
    """Split texts in memory into the parts of a corpus; `name` is what a lineage calls them."""
    reader = _CorpusReader((), seed, SILENT)
    reader._sources, reader._stores = (name,), {name: TextStore.of(texts)}
    return replace(_corpus_from(reader), examples=lambda: iter(()), labelled=lambda _part: iter(()))


def with_pieces(corpus: Corpus, pieces: Sequence[Text], name: str) -> Corpus:
    """Add texts that are only trained on."""
    more = TextStore.of(pieces)
    return replace(
        corpus,
        train=lambda: itertools.chain(corpus.train(), pieces),
        facts=lambda: (*corpus.facts(), more.facts(name)),
        distinct_texts=None,
        sampled_texts=None,
    )


def _corpus_from(reader: _CorpusReader, files: tuple[str, ...] = ()) -> Corpus:
    return Corpus(
        train=lambda: reader.texts_of("train"),
        validation=lambda: reader.texts_of("validation"),
        held_out=lambda: reader.texts_of("held_out"),
        may_train_on=reader.may_train_on,
        examples=lambda: reader.examples("train"),
        validation_examples=lambda: reader.examples("validation"),
        held_out_examples=lambda: reader.examples("held_out"),
        labelled=reader.labelled,
        facts=reader.facts,
        files=files,
        distinct_texts=lambda most, seed: _distinct(reader.chosen("train"), most, seed, kinds=True),
        sampled_texts=lambda count, seed: _sampled(reader.chosen("train"), count, seed),
    )


class _CorpusReader:
    """Reads the sources when their texts are needed, and splits them by the hashes of their texts."""

    def __init__(self, sources: Sequence[str], seed: int, progress: Progress) -> None:
        self._sources, self._seed, self._progress = sources, seed, progress
        for source in sources:
            if source != ENVIRONMENT and not _is_stored(source):
                next(read_texts(source), None)

    @cached_property
    def _documented(self) -> dict[Part, list[_Documented]]:
        pairs = environment_pairs(progress=self._progress)
        train, others = split_by_package(pairs, HELD_OUT_SHARE, self._seed)
        validation, measured = split_by_package(others, 0.5, self._seed)
        return {"train": train, "validation": validation, "held_out": measured}

    @cached_property
    def _stores(self) -> dict[str, TextStore]:
        return {
            source: _read_store(source, self._progress)
            if source != ENVIRONMENT
            else TextStore.of(as_texts(itertools.chain.from_iterable(self._documented.values())))
            for source in self._sources
        }

    def facts(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(store.facts(source) for source, store in self._stores.items())

    @cached_property
    def _share(self) -> float:
        return _share_not_trained_on(sum(map(len, self._stores.values())))

    @cached_property
    def _other_documentation(self) -> frozenset[str]:
        if ENVIRONMENT not in self._sources:
            return frozenset()
        others = itertools.chain(self._documented["validation"], self._documented["held_out"])
        return frozenset(text.text for text in as_texts(others))

    @cached_property
    def _parts(self) -> dict[str, NDArray[np.int8]]:
        """The part of each text of each source, as its position in `_PARTS`; -1 if it is in none."""
        others = np.array([key_bits(text) for text in self._other_documentation], np.uint64)
        found = {}
        for source, store in self._stores.items():
            parts = hashed = _hashed_parts(store, self._share, self._seed)
            if source == ENVIRONMENT:
                counts = [2 * len(self._documented[part]) for part in _PARTS]
                parts = np.repeat(np.arange(len(_PARTS), dtype=np.int8), counts)
            elsewhere = (hashed != 0) | np.isin(store.keys()[:, 0], others)
            found[source] = np.where((parts == 0) & elsewhere, np.int8(-1), parts)
        return found

    def chosen(self, part: Part) -> list[_Chosen]:
        """The texts of a part: the stores and the positions in them."""
        code = _PARTS.index(part)
        return [
            (store, np.flatnonzero(self._parts[source] == code)) for source, store in self._stores.items()
        ]

    def _part_of(self, text: str) -> Part:
        return _part_of(text, self._share, self._seed)

    def may_train_on(self, text: str) -> bool:
        return self._part_of(text) == "train" and text not in self._other_documentation

    def texts_of(self, part: Part) -> Iterator[Text]:
        for store, positions in self.chosen(part):
            yield from store.texts(positions)

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


def _share_not_trained_on(texts: int) -> float:
    texts = max(texts, 1)
    return min(max(HELD_OUT_SHARE, _FEW_HELD_OUT / texts), _LARGEST_SHARE, _ENOUGH_HELD_OUT / texts)


def _part_of(text: str, share: float, seed: int) -> Part:
    if draw(text, seed) >= share:
        return "train"
    return "validation" if draw(text, seed + 1) < 0.5 else "held_out"


def _hashed_parts(store: TextStore, share: float, seed: int) -> NDArray[np.int8]:
    """What `_part_of` returns for each text of a store, as positions in `_PARTS`."""
    bits = store.keys()[:, 0]
    other = np.where(_drawn(bits, seed + 1) < 0.5, np.int8(1), np.int8(2))
    return np.where(_drawn(bits, seed) >= share, np.int8(0), other)


def _distinct(chosen: Sequence[_Chosen], most: int | None, seed: int, *, kinds: bool) -> Iterator[Text]:
    """What `distinct`, by text or by kind and text, and then `sample` return for these texts."""
    if not chosen:
        return
    keys = np.concatenate([store.keys(kinds=kinds)[places] for store, places in chosen])
    rows = pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), len(keys), [None, pa.py_buffer(keys)])
    numbers = rows.dictionary_encode().indices.to_numpy()  # in the order in which they first occur
    first = np.flatnonzero(np.diff(np.maximum.accumulate(numbers), prepend=-1))
    if most is not None:
        first = first[sample(range(len(first)), most, seed)]
    yield from _at(chosen, first)


def _sampled(chosen: Sequence[_Chosen], count: int, seed: int) -> Iterator[Text]:
    """What `sample` returns for these texts."""
    total = sum(len(places) for _, places in chosen)
    return _at(chosen, np.array(sample(range(total), count, seed), np.int64))


def _at(chosen: Sequence[_Chosen], numbers: NDArray[np.int64]) -> Iterator[Text]:
    """The texts with these numbers, which are sorted and count through all stores."""
    start = 0
    for store, places in chosen:
        low, high = np.searchsorted(numbers, [start, start + len(places)])
        yield from store.texts(places[numbers[low:high] - start])
        start += len(places)


def as_texts(pairs: Iterable[_Documented]) -> Iterator[Text]:
    """Yield two texts per documented name: its query and its document."""
    for pair in pairs:
        yield Text(text=pair.query, kind="query")
        yield Text(text=pair.document, kind="document")


def _usable(examples: Iterable[Example], may_use: Callable[[str], bool]) -> Iterator[Example]:
    for example in examples:
        if may_use(example.query) and may_use(example.positive):
            yield replace(example, negatives=tuple(filter(may_use, example.negatives)))


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
    chosen = [each for source in sources for each in _unseen_in(source, trained, seed, progress)]
    return list(_distinct(chosen, count, seed, kinds=False))


def _unseen_in(
    source: str, trained: Sequence[Mapping[str, Any]], seed: int, progress: Progress
) -> list[_Chosen]:
    if source == ENVIRONMENT:
        # Its parts are complete packages, and the seed alone decides which.
        seeds = [one["seed"] for one in trained if ENVIRONMENT in {fact["source"] for fact in one["data"]}]
        return _CorpusReader([source], seeds[0] if seeds else seed, progress).chosen("held_out")
    store = _read_store(source, progress)
    splits = [
        (_share_not_trained_on(sum(int(fact["texts"]) for fact in one["data"])), int(one["seed"]))
        for one in trained
        if store.fingerprint in {fact["fingerprint"] for fact in one["data"]}
    ]
    if splits:
        progress.say(f"a model was trained on {source}, so only its held-out texts are used")
    unseen = np.ones(len(store), np.bool_)
    for split in splits:
        unseen &= _hashed_parts(store, *split) == _PARTS.index("held_out")
    return [(store, np.flatnonzero(unseen))]
