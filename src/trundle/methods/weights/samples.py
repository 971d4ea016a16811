"""The samples that score weights, from a domain and from general data, and a retrieval evaluation on each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus, read_corpus
from trundle.data.examples import DROPOUT, Example, pairs_from_texts
from trundle.data.sampling import distinct, draw, representatives, sample
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate import scoring
from trundle.evaluate.tasks import KnownItemTask
from trundle.methods.contract import Context
from trundle.methods.training import HEALING_TEXTS
from trundle.model import encode as encode_module

_Name = Literal["domain", "general"]
_POOL = 4
"""Samples are chosen among this many times their number: clustering more takes long and changes little."""
_FEWEST = 2
_EVALUATION_QUERIES = 400
_FEWEST_QUERIES = 20


@dataclass(frozen=True, kw_only=True)
class _SampleSource:
    name: _Name
    corpus: Corpus
    from_texts: bool
    """Whether it has no tuples, so that pairs are made from its texts."""

    def samples(self) -> Iterator[Example]:
        if self.from_texts:
            return pairs_from_texts(self.corpus.train(), allowed=self.corpus.may_train_on)
        return self.corpus.examples()

    def held_out(self) -> Iterator[Example]:
        """Tuples for evaluation; a pair of two identical texts is always retrieved, so it is left out."""
        if self.from_texts:
            pairs = pairs_from_texts(self.corpus.held_out())
            return (pair for pair in pairs if pair.source != DROPOUT)
        return self.corpus.held_out_examples()


def _open_source(name: _Name, source: str | None, context: Context) -> _SampleSource:
    """Read a source by the rules of --data: only its training rows, nothing that is held out."""
    if source is not None:
        key = f"weights {name} {source} {context.seed}"
        if key not in context.opened:
            context.opened[key] = read_corpus([source], seed=context.seed, progress=context.progress)
        corpus = context.opened[key]
    elif name == "domain" and context.corpus is not None:
        corpus = context.corpus
    else:
        otherwise = ", or with --data FILE" if name == "domain" else "; domain-fisher does not need it"
        raise BadInput(f"pass the {name} data with --{name} FILE, in a recipe weights.{name}{otherwise}")
    try:
        has_tuples = next(corpus.examples(), None) is not None
    except BadInput:  # no columns of tuples
        has_tuples = False
    if not has_tuples and next(corpus.train(), None) is None:
        raise BadInput(f"the {name} source is empty; pass a file with tuples or texts")
    return _SampleSource(name=name, corpus=corpus, from_texts=not has_tuples)


def _same_data(domain: _SampleSource, general: _SampleSource) -> bool:
    prints = [[fact["fingerprint"] for fact in source.corpus.facts()] for source in (domain, general)]
    return bool(prints[0]) and prints[0] == prints[1]


def _draw_samples(
    model: SentenceTransformer, source: _SampleSource, count: int, context: Context
) -> tuple[list[Example], dict[str, Any]]:
    """Sample the tuples closest to the centres of a k-means over the vectors of their queries."""
    different = distinct(source.samples(), key=lambda one: one.query)
    pool = sample(different, _POOL * count, seed=context.seed)
    if len(pool) < _FEWEST:
        raise BadInput(f"the {source.name} source has {len(pool)} tuple; pass {_FEWEST}, better thousands")
    if len(pool) > count:
        encode = encode_module.embedder(model, name=f"{source.name} queries", progress=context.progress).query
        chosen = representatives(encode([one.query for one in pool]), count, seed=context.seed)
        drawn = [pool[place] for place in chosen]
    else:
        drawn = pool
        context.progress.say(f"{source.name}: all {len(pool):,} samples are used ({count:,} requested)")
    ways = Counter(Path(one.source).name for one in drawn)
    if source.from_texts:
        listed = ", ".join(f"{number:,} {way}" for way, number in ways.most_common())
        context.progress.say(f"{source.name}: no labelled tuples, so pairs are made from the texts: {listed}")
    facts = {
        "samples": len(drawn),
        "of": len(pool),
        "pairs": "made from texts" if source.from_texts else "given",
        "from": dict(sorted(ways.items())),
    }
    return sorted(drawn, key=lambda one: (one.source, draw(one.query, context.seed))), facts


def _healing_texts(sources: Sequence[_SampleSource], context: Context) -> list[str]:
    """Texts to heal a cut on: the same number of each source, or those of --data."""
    if not sources:
        train = iter(()) if context.corpus is None else context.corpus.train()
        return [text.text for text in sample(train, HEALING_TEXTS, seed=context.seed)]
    each = HEALING_TEXTS // (2 * len(sources))
    pairs = [pair for source in sources for pair in sample(source.samples(), each, seed=context.seed)]
    return [text for pair in pairs for text in (pair.query, pair.positive)]


def _make_evaluator(
    sources: list[_SampleSource], context: Context
) -> Callable[[Embedder], Mapping[str, float]] | None:
    """Return a function that measures retrieval with held-out queries; None if there are too few."""
    tasks = []
    corpus = context.corpus
    for source in sources:
        # A later method that trains on --data may see a text that this source holds out.
        unseen = (one for one in source.held_out() if corpus is None or not corpus.may_train_on(one.query))
        chosen = sample(unseen, _EVALUATION_QUERIES, seed=context.seed)
        pairs = [(one.query, one.positive) for one in chosen]
        if len(pairs) >= _FEWEST_QUERIES:
            tasks.append(KnownItemTask(name=source.name, pairs=pairs))
        else:
            context.progress.say(f"{source.name}: {len(pairs)} held-out queries are too few to evaluate")
    if not tasks:
        return None

    def evaluate(embedder: Embedder) -> Mapping[str, float]:
        found = scoring.evaluate(embedder, tasks)
        return {
            f"{one.task} {one.main}, {len(task.pairs):,} queries": one.score
            for one, task in zip(found, tasks, strict=True)
        }

    return evaluate
