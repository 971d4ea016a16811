"""The two sides weights are judged by: samples of a domain and of everything else, and a search each that only measures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trundle.data.corpus import read_corpus
from trundle.data.examples import DROPOUT, pairs_from_texts
from trundle.data.sampling import distinct, draw, representatives, sample
from trundle.errors import BadInput
from trundle.evaluate import scoring
from trundle.evaluate.tasks import KnownItemTask
from trundle.methods.contract import Context
from trundle.model import encode as encode_module

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

    from trundle.data.corpus import Corpus
    from trundle.data.examples import Example
    from trundle.embedder import Embedder

_Name = Literal["domain", "general"]
_POOL = 4
"""Samples are chosen from so many times their number: clustering more of them takes long and changes little."""
_READ_TEXTS = 1024
_FEWEST = 2
_JUDGED = 400
_FEWEST_JUDGED = 20


@dataclass(frozen=True, kw_only=True)
class _Side:
    """One source of samples."""

    name: _Name
    corpus: Corpus
    made: str | None
    """Why its pairs are made out of texts, where it has no tuples."""

    def samples(self) -> Iterator[Example]:
        """What may be learned from."""
        if self.made is None:
            return self.corpus.examples()
        return pairs_from_texts(self.corpus.train(), allowed=self.corpus.may_train_on)

    def kept_back(self) -> Iterator[Example]:
        """What only measures; a text searched for by itself is always found, so it says nothing."""
        if self.made is None:
            return self.corpus.held_out_examples()
        pairs = pairs_from_texts(self.corpus.held_out())
        return (pair for pair in pairs if pair.source != DROPOUT)


def _open_side(name: _Name, source: str | None, context: Context) -> _Side:
    """Read a source by the rules of --data: only its train rows, and nothing that is kept back."""
    if source is not None:
        key = f"weights {name} {source} {context.seed}"
        if key not in context.opened:
            context.opened[key] = read_corpus([source], seed=context.seed, progress=context.progress)
        corpus = context.opened[key]
    elif name == "domain" and context.corpus is not None:
        corpus = context.corpus
    else:
        raise BadInput(
            f"say where the tuples or texts of the {name} side are with --{name} FILE, in a recipe weights.{name}"
            + (", or with --data FILE" if name == "domain" else "; the method domain-fisher does without")
        )
    try:
        found, made = next(corpus.examples(), None), None
    except BadInput as error:
        found, made = None, str(error)
    if found is None and next(corpus.train(), None) is None:
        raise BadInput(
            f"the {name} side has nothing to learn from; give a file with tuples of query and positive, or texts"
        )
    return _Side(name=name, corpus=corpus, made=made or ("it has no tuples" if found is None else None))


def _same_data(domain: _Side, general: _Side) -> bool:
    """Whether both sides hold the same texts in the same order, wherever they lie."""
    prints = [[fact["fingerprint"] for fact in side.corpus.facts()] for side in (domain, general)]
    return bool(prints[0]) and prints[0] == prints[1]


def _draw_samples(
    model: SentenceTransformer, side: _Side, count: int, context: Context
) -> tuple[list[Example], dict[str, Any]]:
    """Tuples that stand for all of a side: the nearest to each centre of a k-means over its queries' vectors."""
    different = distinct(side.samples(), key=lambda one: one.query)
    pool = sample(different, _POOL * count, seed=context.seed)
    if len(pool) < _FEWEST:
        raise BadInput(
            f"the {side.name} side has {len(pool)} tuple to learn from, and a search among others takes at least "
            f"{_FEWEST}; give more, better thousands"
        )
    if len(pool) > count:
        encode = encode_module.embedder(model, name=f"{side.name} queries", progress=context.progress).query
        chosen = representatives(encode([one.query for one in pool]), count, seed=context.seed)
        drawn = [pool[place] for place in chosen]
    else:
        drawn = pool
        context.progress.say(
            f"{side.name}: {len(pool):,} samples are all there are ({count:,} asked for), so none are chosen by k-means"
        )
    ways = Counter(Path(one.source).name for one in drawn)
    if side.made is not None:
        listed = ", ".join(f"{number:,} {way}" for way, number in ways.most_common())
        context.progress.say(f"{side.name}: no labelled tuples, so pairs are made from the texts: {listed}")
    facts = {
        "samples": len(drawn),
        "of": len(pool),
        "pairs": "made from texts" if side.made is not None else "given",
        "from": dict(sorted(ways.items())),
    }
    return sorted(drawn, key=lambda one: (one.source, draw(one.query, context.seed))), facts


def _texts_of(sides: Sequence[_Side], context: Context) -> list[str]:
    """Texts to see on what a model does: of all sides alike, else of --data, if that is given."""
    if not sides:
        train = iter(()) if context.corpus is None else context.corpus.train()
        return [text.text for text in sample(train, _READ_TEXTS, seed=context.seed)]
    each = _READ_TEXTS // (2 * len(sides))
    pairs = [pair for side in sides for pair in sample(side.samples(), each, seed=context.seed)]
    return [text for pair in pairs for text in (pair.query, pair.positive)]


def _make_judge(sides: list[_Side], context: Context) -> Callable[[Embedder], Mapping[str, float]] | None:
    """How well held-back queries of each side find their document, for any model; None where too few are held back."""
    tasks = []
    for side in sides:
        kept = (one for one in side.kept_back() if not _learned_from(one.query, context))
        pairs = [(one.query, one.positive) for one in sample(kept, _JUDGED, seed=context.seed)]
        if len(pairs) >= _FEWEST_JUDGED:
            tasks.append(KnownItemTask(name=side.name, pairs=pairs))
        else:
            context.progress.say(
                f"{side.name}: only {len(pairs)} queries are held back, too few to measure a search by"
            )
    if not tasks:
        return None

    def judge(embedder: Embedder) -> Mapping[str, float]:
        found = scoring.evaluate(embedder, tasks)
        return {
            f"{one.task} {one.main}, {len(task.pairs):,} queries": one.score
            for one, task in zip(found, tasks, strict=True)
        }

    return judge


def _learned_from(text: str, context: Context) -> bool:
    """Whether a later step that trains on --data may see a text that this side keeps back."""
    return context.corpus is not None and context.corpus.may_train_on(text)
