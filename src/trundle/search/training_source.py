"""What a search learns from: any teacher, the models that may be cut and trained, and the texts.

A local model teaches by encoding the user's texts, and its own cuts are candidates. An endpoint encodes them
too. A table, a store of targets or an index has texts and vectors of its own; if the model or endpoint that
made it is named, that one labels queries and pieces of texts as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

from trundle.data.corpus import Corpus, corpus_of, with_pieces
from trundle.data.sampling import augmented, sample
from trundle.data.texts import Text, read_texts
from trundle.embedder import Embedder
from trundle.errors import BadInput
from trundle.evaluate.fidelity import MEASURED_TEXTS
from trundle.evaluate.index_check import IndexCheck, check_queries, check_rows
from trundle.evaluate.retrieval import unit
from trundle.index.rows import SearchedRows
from trundle.methods.align.teacher_vectors import validation_count
from trundle.model.encode import labelling_embedder
from trundle.model.load import demo_model
from trundle.model.save import model_digest
from trundle.pipeline.run import Request
from trundle.progress import Progress
from trundle.search.budget import _proof_texts
from trundle.search.limits import TeacherOptions
from trundle.search.prospects import _Prospects
from trundle.teacher import teacher_kind
from trundle.teacher.stored import IndexRows, stored_embedder
from trundle.teacher.targets import Targets
from trundle.teacher.teacher import Teacher, open_teacher, opened_key

_CALLS = 5000
"""Texts that an endpoint, or who made an index, gets at most unless told otherwise."""
_COMPARED = 32
"""Rows used to check who made an index."""
_SAME_MODEL = 0.98
_PIECES = ("sentences", "spans")
_DEMO_MODEL = "all-MiniLM-L6-v2"
_COUNTED_TEXTS = 500
_SEARCHED_ROWS, _ASKED, _FEWEST_ASKED = 20_000, 1000, 20
"""Rows that the result searches in at the end, and the most and the fewest queries."""
_ENDPOINT_RATE, _LOOKED_UP_RATE = 100.0, 50_000.0
"""Vectors a second of an endpoint, which is not timed because that costs money, and of a store."""


@dataclass(frozen=True, kw_only=True)
class _TrainingSource:
    """One search's teacher, models and texts."""

    name: str
    """What recipes and records call the teacher."""
    owner: str | None
    """The local model that made the vector space; its cuts need no linear map."""
    bases: tuple[str, ...]
    """The models whose cuts are candidates."""
    corpus: Corpus | None
    teacher: Teacher | None = None
    """None if the owner itself teaches."""
    options: TeacherOptions = field(default_factory=TeacherOptions)
    maker: str | None = None
    """Who made the index, if it is named."""
    asked: int | None = None
    """How many training texts the teacher has to encode; None: all of them."""
    most: float = float("inf")
    """The most texts that it may get."""
    rows: Targets | None = None
    total: int = 0
    """The number of rows of the index."""

    @property
    def endpoint_model(self) -> str | None:
        """The teacher's name, if it is an endpoint alone."""
        return self.options.model if self.maker is None else None

    def identity(self) -> str:
        """What distinguishes the teacher from others; empty if the owner itself teaches."""
        return "" if self.teacher is None else self.teacher.identity()

    def prospects(self, models: Mapping[str, SentenceTransformer], progress: Progress) -> _Prospects:
        """What can be predicted about the models in the teacher's space."""
        assert self.corpus is not None
        return _Prospects(
            source=self.name,
            bases=models,
            corpus=self.corpus,
            progress=progress,
            owner=self.owner,
            width=0 if self.teacher is None else self.teacher.width,
        )

    def label_rate(self, rate: float, there: float) -> float:
        """How many vectors a second the teacher gives, if it encodes `rate` texts a second."""
        if self.teacher is None or not math.isfinite(there):
            return rate
        encoded = there if self.asked is None else min(self.asked, there)
        rate = _ENDPOINT_RATE if self.owner is None else rate
        return there / (encoded / rate + there / _LOOKED_UP_RATE)

    def most_texts(self, there: float) -> float:
        """How many training texts there may be, so that no more than `most` texts are sent in all."""
        if there + validation_count(None) + MEASURED_TEXTS <= self.most:
            return there
        fewer = int(self.most)
        while fewer and fewer + validation_count(fewer) + _proof_texts(fewer) > self.most:
            fewer -= max(1, fewer // 100)
        return min(there, fewer)

    def check(self, student: Embedder, request: Request) -> IndexCheck | None:
        """Ask held-out rows, and held-out queries if there are some, and compare with the stored vectors."""
        assert self.rows is not None
        assert self.corpus is not None
        assert self.teacher is not None
        progress, teacher = request.progress, self.teacher.embedder
        places = sample(range(len(self.rows)), _SEARCHED_ROWS, request.seed)
        texts = self.rows.texts(places)
        position = {text: place for place, text in enumerate(texts)}
        drawn = SearchedRows(
            index=self.name,
            texts=texts,
            vectors=self.rows.vectors(places),
            total=self.total,
            similarity=self.teacher.similarity or "cosine",
        )
        held_out = list(self.corpus.held_out())
        asked = [position[text.text] for text in held_out if text.kind != "query" and text.text in position]
        if len(asked) < _FEWEST_ASKED or teacher is None:
            progress.say(f"not checked on the index: {len(asked)} held-out rows, {_FEWEST_ASKED} are needed")
            return None
        asked = sample(asked, _ASKED, request.seed)
        found = check_rows(drawn, student, asked, progress=progress)
        found = replace(found, queries_from="rows that it was not trained on")
        queries = [text.text for text in held_out if text.kind == "query"][:_ASKED]
        if len(queries) < _FEWEST_ASKED:
            return found
        maker = replace(teacher, name=str(self.maker))
        better = check_queries(drawn, student, maker, queries, progress=progress)
        return replace(better, rows=found.rows, queries_from="yours that it was not trained on")

    def opened(self) -> dict[str, Any]:
        """The opened teacher, as the runs of a search share it."""
        return {} if self.teacher is None else {opened_key(self.name, self.endpoint_model): self.teacher}


def _find_training_source(
    request: Request, options: TeacherOptions, students: Sequence[str], *, minutes: float
) -> _TrainingSource:
    """Open the teacher and name the models, before any model is loaded."""
    source, progress = request.source, request.progress
    if not isinstance(source, str):
        raise BadInput("a search needs the name or folder of a model; save the model and pass its folder")
    options.check(source, request.corpus, pair=request.pair)
    kind = "model" if not source else teacher_kind(source)
    if options.index is None and kind == "model":
        bases = tuple(dict.fromkeys((source, *students)))
        return _TrainingSource(name=source, owner=source, bases=bases, corpus=request.corpus, options=options)
    owner = source if source and kind == "model" else None
    training = _TrainingSource(name=source, owner=owner, bases=(), corpus=None, options=options)
    if options.index is not None:
        teacher = options.open_index(
            minutes=minutes, seed=request.seed, fresh=request.fresh, progress=progress
        )
        training = replace(training, name=teacher.name, teacher=teacher, maker=source or None)
    else:
        calls = options.calls or _CALLS
        teacher = open_teacher(source, options.model, calls=calls, progress=progress)
        if teacher.brings_texts:
            training = replace(training, name=teacher.name, teacher=teacher)
        else:
            training = replace(training, teacher=teacher, corpus=request.corpus, most=calls - 1)
    if not students and owner is None:
        students = [str(demo_model("a search without --student"))]
        progress.say(f"no --student is named, so {_DEMO_MODEL} of the extra demo is used")
    return replace(training, bases=tuple(dict.fromkeys((*([owner] if owner else []), *students))))


def _prepare(
    training: _TrainingSource, models: Mapping[str, SentenceTransformer], request: Request
) -> _TrainingSource:
    """Read the rows of an index, table or store, and make texts for who made it to label."""
    teacher, options, progress = training.teacher, training.options, request.progress
    tokenizer = next(iter(models.values())).tokenizer
    if teacher is None:
        return training
    if not teacher.brings_texts:
        assert training.corpus is not None
        there = sum(int(fact["texts"]) for fact in training.corpus.facts())
        some = training.corpus.distinct_train(_COUNTED_TEXTS, request.seed)
        _announce(teacher.name, min(there, int(training.most)), some, request, tokenizer)
        return training
    rows = teacher.stored(progress=progress)
    if not len(rows):
        raise BadInput(f"{training.name} has no rows to learn from; fill it first")
    documents = (text for start in range(0, len(rows), 8192) for text in _texts_of(rows, start, start + 8192))
    queries = [Text(text=text.text, kind="query") for text in _queries(options)]
    maker, identity = _maker(training, models, request)
    calls = (options.calls or _CALLS) - (_COMPARED if maker else 0)
    queries = sample(queries, max(0, calls), seed=request.seed)
    corpus = corpus_of(
        (each for part in (documents, queries) for each in part), training.name, seed=request.seed
    )
    pieces: list[Text] = []
    if maker is not None:
        pieces = _pieces(corpus, max(0, calls - len(queries)), request.seed)
        corpus = with_pieces(corpus, pieces, f"pieces of {training.name}") if pieces else corpus
        labelled = [*queries, *pieces]
        _announce(str(training.maker), len(labelled) + _COMPARED, labelled, request, tokenizer)
        if not request.dry_run or training.owner is not None:  # nothing is sent in a dry run
            _check_maker(maker, rows, training.name, request.seed)
    embedder = replace(
        stored_embedder(rows, training.name, maker=maker), similarity=teacher.similarity or "cosine"
    )
    owner = None if training.owner is None else models[training.owner]
    known = f"{teacher.identity()} {identity}"
    return replace(
        training,
        corpus=corpus,
        rows=rows,
        total=teacher.rows.reader.count if isinstance(teacher.rows, IndexRows) else len(rows),
        asked=len(queries) + len(pieces),
        teacher=replace(
            teacher,
            identity=lambda: known,
            normalises=rows.normalised,
            embedder=embedder,
            rows=None,
            store=None,
            prompts={} if owner is None else owner.prompts,
            default_prompt_name=None if owner is None else owner.default_prompt_name,
        ),
    )


def _texts_of(rows: Targets, start: int, stop: int) -> list[Text]:
    return rows.chosen(range(start, min(stop, len(rows))))


def _queries(options: TeacherOptions) -> list[Text]:
    return [] if options.queries is None else list(dict.fromkeys(read_texts(options.queries)))


def _maker(
    training: _TrainingSource, models: Mapping[str, SentenceTransformer], request: Request
) -> tuple[Embedder | None, str]:
    """Who made the index as an embedder, and its identity."""
    if training.maker is None:
        return None, ""
    if training.owner is not None:
        model = models[training.owner]
        return labelling_embedder(model, name=training.owner, progress=request.progress), model_digest(model)
    most = training.options.calls or _CALLS
    from trundle.teacher.endpoint import open_endpoint

    return open_endpoint(training.maker, training.options.model, most=most)


def _pieces(corpus: Corpus, count: int, seed: int) -> list[Text]:
    """Sentences and spans of training texts, as short as queries are."""
    found: list[Text] = []
    known: set[str] = set()
    for text in augmented(corpus.sample_train(count, seed), _PIECES, seed=seed, allowed=corpus.may_train_on):
        if len(found) == count:
            break
        if text.text not in known:
            known.add(text.text)
            found.append(text)
    return found


def _announce(name: str, count: int, examples: Iterable[Text], request: Request, tokenizer: Any) -> None:
    """Say how many texts and about how many tokens a teacher will get."""
    counted = sample(examples, _COUNTED_TEXTS, request.seed)
    tokens = sum(map(len, tokenizer([text.text for text in counted])["input_ids"])) if counted else 0
    would = "would get" if request.dry_run else "gets"
    about = f"about {tokens * count / max(1, len(counted)):,.0f} tokens"
    request.progress.say(f"{name} {would} at most {count:,} texts, {about}")


def _check_maker(maker: Embedder, rows: Targets, name: str, seed: int) -> None:
    """Reject a model that did not make the index: its labels would be of another vector space."""
    places = sample(range(len(rows)), _COMPARED, seed=seed)
    vectors, stored = maker.document(rows.texts(places)), rows.vectors(places)
    if vectors.shape[1] != stored.shape[1]:
        widths = (
            f"{maker.name} returns vectors of width {vectors.shape[1]} and {name} holds {stored.shape[1]}"
        )
        raise BadInput(f"{widths}; name the model that made it, or leave --teacher out")
    cosine = float(np.einsum("ij,ij->i", unit(vectors), unit(stored)).mean())
    if cosine < _SAME_MODEL:
        differ = f"the vectors of {maker.name} differ from those of {name} (cosine {cosine:.3f})"
        raise BadInput(f"{differ}; name the model that made it, or leave --teacher out")
