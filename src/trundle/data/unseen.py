"""Texts to measure a model on: of those it has learned from, only the part that was kept back.

A model's lineage says which sources it learned from and with which seed, so the part that was held out then can be
found again. A source it has never seen is used whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from trundle.data.corpus import ENVIRONMENT, kept_back, part_of, read_corpus, texts_facts
from trundle.data.sampling import distinct, sample
from trundle.data.texts import Text, read_texts
from trundle.progress import SILENT, Progress

Lineages = Iterable[Mapping[str, Any] | None]


def unseen_texts(
    sources: Sequence[str], lineages: Lineages, count: int, *, seed: int = 0, progress: Progress = SILENT
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
    share = kept_back(sum(int(fact["texts"]) for fact in lineage["data"]))
    return lambda text: part_of(text, share, int(lineage["seed"])) == "held_out"
